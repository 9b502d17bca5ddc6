"""Batches over HTTP, with OpenAI's client: from a file of requests to files of answers."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch

from dragoman.api.batches import LineRequest
from dragoman.engines.protocol import ModelCard
from dragoman.engines.scripted import CHATML, ScriptedEngine, say
from dragoman.http.app import App
from dragoman.http.server import background
from dragoman.limits import Limits
from dragoman.settings import Settings
from dragoman.turns.queue import background_cancel
from tests.batches.support import CHAT as PATH
from tests.batches.support import jsonl, line, read_lines
from tests.http.conftest import Serve
from tests.support.http import get, post, refusal
from tests.support.parrot import NAME
from tests.support.parrot import parrot as make_parrot
from tests.support.wait import becomes

CHAT: Any = PATH
OVER = ("completed", "failed", "expired", "cancelled")


def connected(url: str, key: str = "any") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


class EmbeddingEngine(ScriptedEngine):
    """It gives vectors, too."""

    async def embed(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[float(len(ids)), 1.0] for ids in prompts]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    card = ModelCard(name=NAME, max_model_len=4096, templates={"default": CHATML})
    with background(EmbeddingEngine(say("Hello"), card=card), Settings(port=0, store="memory")) as text:
        yield text


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with connected(url) as open_ai:
        yield open_ai


def begun(
    client: openai.OpenAI, lines: Iterable[dict[str, Any] | str], endpoint: Any = CHAT, **more: Any
) -> Batch:
    file = client.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more)


def ended(client: openai.OpenAI, id_: str) -> Batch:
    for _ in range(3000):
        batch = client.batches.retrieve(id_)
        if batch.status in OVER:
            return batch
        time.sleep(0.01)
    raise AssertionError("The batch does not end.")


def lines_in(client: openai.OpenAI, file: str | None) -> dict[str, dict[str, Any]]:
    """What came of each line, by its id; each is there once."""
    lines = read_lines(client.files.content(file).read()) if file else []
    by_id = {one["custom_id"]: one for one in lines}
    assert len(by_id) == len(lines)
    return by_id


def test_what_is_asked_in_a_batch_is_answered_as_it_is_by_itself(client: openai.OpenAI, url: str) -> None:
    asked = [line("good", "Hello"), line("wrong", temperature=9), line("odd", rolez="x")]
    batch = begun(client, asked, metadata={"a": "b"})
    assert (batch.object, batch.endpoint, batch.completion_window, batch.metadata) == (
        *("batch", CHAT, "24h"),
        {"a": "b"},
    )
    over = ended(client, batch.id)
    assert over.status == "completed" and over.model == NAME
    counts = over.request_counts
    assert counts and (counts.total, counts.completed, counts.failed) == (3, 2, 1)
    good = lines_in(client, over.output_file_id)
    (bad,) = lines_in(client, over.error_file_id).values()
    alone = post(url, CHAT, asked[0]["body"]).json()
    body = good["good"]["response"]["body"]
    assert {**body, "id": "", "created": 0} == {**alone, "id": "", "created": 0}
    assert (good["good"]["response"]["status_code"], good["good"]["error"]) == (200, None)
    assert good["odd"]["response"]["headers"] == {"x-dragoman-ignored": "rolez"}
    refused = post(url, CHAT, asked[1]["body"])
    assert (bad["response"]["status_code"], bad["response"]["body"]) == (400, refused.json())
    assert bad["error"]["code"] == refused.json()["error"]["code"]
    usage = over.usage
    assert usage and usage.output_tokens == sum(
        one["response"]["body"]["usage"]["completion_tokens"] for one in good.values()
    )
    assert over.in_progress_at and over.finalizing_at and over.completed_at


@pytest.mark.parametrize(
    ("endpoint", "body", "told"),
    [
        ("/v1/completions", {"prompt": "hi"}, "text_completion"),
        ("/v1/embeddings", {"input": ["one", "two"]}, "list"),
        ("/v1/responses", {"input": "hi"}, "response"),
    ],
)
def test_a_batch_is_for_any_of_these(
    client: openai.OpenAI, endpoint: str, body: dict[str, Any], told: str
) -> None:
    asked = {"custom_id": "1", "method": "POST", "url": endpoint, "body": {"model": NAME, **body}}
    over = ended(client, begun(client, [asked], endpoint).id)
    (fields,) = lines_in(client, over.output_file_id).values()
    assert fields["response"]["body"]["object"] == told


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in line("a").items() if key != name}


WRONG: list[tuple[dict[str, Any] | str, str, str | None]] = [
    ("{no json", "invalid_json_line", None),
    ("[]", "invalid_json_line", None),
    ('{"custom_id": "a", "body": 5}', "invalid_value", "body"),
    (without("custom_id"), "missing_required_parameter", "custom_id"),
    (without("method"), "missing_required_parameter", "method"),
    (without("url"), "missing_required_parameter", "url"),
    (without("body"), "missing_required_parameter", "body"),
    ({**line("a"), "custom_id": 5}, "invalid_value", "custom_id"),
    ({**line("a"), "custom_id": "x" * 513}, "invalid_value", "custom_id"),
    ({**line("a"), "method": "GET"}, "invalid_method", "method"),
    (line("a", url="/v1/embeddings"), "invalid_url", "url"),
    (line("a", stream=True), "streaming_unsupported", "body.stream"),
    (line("a", background=True), "unsupported_field", "body.background"),
    (line("a", model=None), "invalid_request", "body.model"),
    (line("a", messages=None), "invalid_request", "body.messages"),
    (line("a", model="nobody"), "model_not_found", "body.model"),
    (line("a", model=5), "invalid_value", "body.model"),
    (line("first"), "duplicate_custom_id", "custom_id"),
]


@pytest.mark.parametrize(
    ("wrong", "code", "param"), WRONG, ids=[f"{code} {param}" for _, code, param in WRONG]
)
def test_one_wrong_line_and_nothing_is_asked(
    client: openai.OpenAI, wrong: dict[str, Any] | str, code: str, param: str | None
) -> None:
    over = ended(client, begun(client, [line("first"), wrong]).id)
    assert over.status == "failed" and over.failed_at and over.errors and over.errors.data
    (fault,) = over.errors.data
    assert (fault.code, fault.line, fault.param) == (code, 2, param)
    assert over.output_file_id is None


def test_every_wrong_line_is_told(client: openai.OpenAI) -> None:
    names = ("custom_id", "method", "url", "body")
    over = ended(client, begun(client, [without(name) for name in names]).id)
    assert over.errors and over.errors.data
    assert [(fault.line, fault.param) for fault in over.errors.data] == list(enumerate(names, 1))


@pytest.mark.parametrize(
    ("changed", "param"),
    [
        ({"endpoint": "/v1/nothing"}, "endpoint"),
        ({"completion_window": "48h"}, "completion_window"),
        ({"completion_window": ""}, "completion_window"),
        ({"metadata": {"tags": ["a"]}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after.seconds"),
        ({"input_file_id": None}, "input_file_id"),
    ],
)
def test_what_is_no_batch_is_refused(url: str, changed: dict[str, Any], param: str) -> None:
    good = {"input_file_id": "file-1", "endpoint": CHAT, "completion_window": "24h"}
    status, text = refusal(post(url, "/v1/batches", {**good, **changed}))
    assert status == 400 and text is not None and text.startswith(param)


def test_a_file_that_nobody_has_makes_a_batch_that_failed(client: openai.OpenAI) -> None:
    batch = client.batches.create(input_file_id="file-nobody", endpoint=CHAT, completion_window="24h")
    over = ended(client, batch.id)
    assert over.errors and over.errors.data
    (fault,) = over.errors.data
    assert (over.status, fault.code) == ("failed", "invalid_request")
    assert "cannot find file" in (fault.message or "").lower()


def test_a_batch_is_made_though_its_file_is_deleted(serve: Serve) -> None:
    client = connected(serve(make_parrot(interval=0.01), store="memory"))
    batch = begun(client, [line("a"), line("b")])
    assert client.files.delete(batch.input_file_id).deleted
    assert ended(client, batch.id).status == "completed"


def test_a_batch_that_nobody_has_is_not_found(client: openai.OpenAI) -> None:
    for call in (client.batches.retrieve, client.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            call("batch_nobody")


def test_what_is_over_cannot_be_cancelled(client: openai.OpenAI) -> None:
    over = ended(client, begun(client, [line("a")]).id)
    with pytest.raises(openai.ConflictError, match="Cannot cancel a batch with status 'completed'"):
        client.batches.cancel(over.id)


def test_a_batch_at_work_is_cancelled_and_tells_how_far_it_is(serve: Serve) -> None:
    client = connected(serve(make_parrot(interval=0.005), store="memory", limits=Limits(in_flight=2)))
    batch = begun(client, [line(str(number), "word " * 10) for number in range(500)])
    assert becomes(lambda: (client.batches.retrieve(batch.id).request_counts or batch).completed > 2)  # type: ignore[union-attr]
    result = client.batches.cancel(batch.id)
    assert result.status == "cancelling" and result.cancelling_at
    over = ended(client, batch.id)
    assert over.status == "cancelled" and over.cancelled_at
    done, undone = lines_in(client, over.output_file_id), lines_in(client, over.error_file_id)
    assert done and len(done) + len(undone) == 500
    assert {one["error"]["code"] for one in undone.values()} == {"batch_cancelled"}


def test_batches_are_listed_from_the_newest_on(serve: Serve) -> None:
    client = connected(serve(make_parrot(), store="memory"))
    ids = [begun(client, [line("a")]).id for _ in range(3)]
    first = client.batches.list(limit=2)
    assert ([batch.id for batch in first.data], first.has_more) == (ids[:0:-1], True)
    assert [batch.id for batch in client.batches.list(limit=1)] == ids[::-1]


def test_the_same_key_again_is_the_same_batch(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"endpoint": CHAT, "completion_window": "24h"}
    key = {"idempotency_key": "once"}
    one, two = (
        client.batches.create(input_file_id="bogus", metadata=metadata, extra_body=key, **asked)
        for metadata in ({"a": "b", "c": "d"}, {"c": "d", "a": "b"})
    )
    assert (one.id, one.created_at) == (two.id, two.created_at)
    with pytest.raises(openai.ConflictError, match="idempotency key"):
        client.batches.create(input_file_id="other", extra_body=key, **asked)


def test_one_key_never_sees_another_s_batches(serve: Serve) -> None:
    url = serve(make_parrot(), store="memory", api_key=["one", "two"])
    batch = begun(connected(url, "one"), [line("a")])
    over = ended(connected(url, "one"), batch.id)
    other = {"authorization": "Bearer two"}
    assert get(url, f"/v1/batches/{batch.id}", **other).status_code == 404
    assert get(url, "/v1/batches", **other).json()["data"] == []
    assert get(url, f"/v1/files/{over.output_file_id}/content", **other).status_code == 404
    # And of a file of another's there is no batch.
    stolen = connected(url, "two").batches.create(
        input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"
    )
    assert ended(connected(url, "two"), stolen.id).status == "failed"


def test_a_server_that_is_killed_goes_on_and_does_nothing_twice(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.scripted_server", str(tmp_path), "slow-parrot"]
    lines = 400
    kept: dict[str, str] = {}
    batch = ""
    for number in range(3):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            client = connected(process.stdout.readline().strip())
            if not batch:
                asked = [line(str(each), f"word {each}") for each in range(lines)]
                batch = begun(client, asked).id
            if number == 2:
                over = ended(client, batch)
                answers = lines_in(client, over.output_file_id)
                process.terminate()
                break
            least = len(kept) + 20
            assert becomes(lambda: _completed(client, batch) >= least)  # noqa: B023
            process.send_signal(signal.SIGKILL)
        output = next(tmp_path.rglob("output")).read_bytes()
        whole = output[: output.rfind(b"\n") + 1]
        kept = {one["custom_id"]: one["id"] for one in read_lines(whole)}
        assert len(kept) >= least
    assert over.status == "completed" and over.request_counts and over.request_counts.completed == lines
    assert set(answers) == {str(number) for number in range(lines)}
    assert {id_: answers[id_]["id"] for id_ in kept} == kept


def _completed(client: openai.OpenAI, id_: str) -> int:
    counts = client.batches.retrieve(id_).request_counts
    return counts.completed if counts else 0


def test_an_engine_that_is_gone_for_a_while_fails_no_line(serve: Serve) -> None:
    engine = make_parrot()
    client = connected(serve(engine, store="memory"))
    engine._dead = True
    batch = begun(client, [line("a"), line("b")])
    time.sleep(0.2)
    assert client.batches.retrieve(batch.id).status == "in_progress"
    engine._dead = False
    assert len(lines_in(client, ended(client, batch.id).output_file_id)) == 2


def test_counts_are_there_while_it_runs(serve: Serve) -> None:
    client = connected(serve(make_parrot(interval=0.02), store="memory", limits=Limits(in_flight=1)))
    batch = begun(client, [line(str(number)) for number in range(20)])
    assert becomes(lambda: 0 < _completed(client, batch.id) < 20)
    assert json.loads(client.batches.retrieve(batch.id).to_json())["request_counts"]["total"] == 20
    client.batches.cancel(batch.id)


def test_what_people_said_is_not_pushed_out_of_memory(tmp_path: Path) -> None:
    """Lines leave nothing behind that a conversation might go on from: they may be fifty thousand."""

    async def scenario() -> None:
        app = App(make_parrot(), Settings(store="memory", files_dir=str(tmp_path)))
        await app.host.start()
        asked = LineRequest("a", PATH, json.dumps(line("a")["body"]).encode())
        token = background_cancel.set(lambda: None)
        reply = await app.host.answer_line("", asked)
        background_cancel.reset(token)
        loaded = app.host.pool.default.loaded
        assert loaded is not None
        assert reply.status == 200 and not loaded.model.planner.turn_cache._kept
        await app.host.answer_line("", asked)
        assert loaded.model.planner.turn_cache._kept
        await app.host.stop()

    asyncio.run(scenario())
