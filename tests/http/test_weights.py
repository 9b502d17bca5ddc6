"""Weights that change while they serve: the engine is held, and every answer says what it was made with."""

import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from dragoman.engines.protocol import ModelCard
from dragoman.engines.scripted import CHATML, END_ID, ByteTokenizer, ScriptedEngine, say
from dragoman.types import Job, Step
from tests.http.conftest import Serve
from tests.support.http import HELLO, chunks, post, refusal, stream
from tests.support.responses import streamed
from tests.support.wait import becomes

CHAT = "/v1/chat/completions"
PAUSE, RESUME = "/v1/engine/pause", "/v1/engine/resume"


class Plain:
    """An engine whose weights stay as they are."""

    card = ModelCard(name="plain", max_model_len=64, templates={"default": CHATML})
    tokenizer = ByteTokenizer()

    async def generate(self, job: Job) -> AsyncIterator[Step]:
        yield Step([END_ID], finish="stop")


class PausingEngine(ScriptedEngine):
    """Is paused by its owner when it has said three ids."""

    def submit(self, job: Job, sink: Any) -> Any:
        numbers: list[int] = []

        def halting(step: Step) -> None:
            numbers.extend(step.ids)
            self._paused = len(numbers) == 3
            sink(step)

        return super().submit(job, halting)

    @property
    def halted(self) -> bool:
        return self._paused


class VersionedEngine(ScriptedEngine):
    """Says of each step which weights it was, as engines in other processes do."""

    def submit(self, job: Job, sink: Any) -> Any:
        def told(step: Step) -> None:
            step.weight_version = f"step {self.live}"
            sink(step)

        return super().submit(job, told)


def updated(url: str, version: str) -> None:
    assert post(url, PAUSE, {}).status_code == 200
    assert post(url, RESUME, {"weight_version": version}).json()["weight_version"] == version


def test_requests_wait_while_the_engine_is_paused(serve: Serve) -> None:
    engine = ScriptedEngine(say("hi"))
    url = serve(engine)
    assert post(url, PAUSE, {}).json() == {"object": "engine", "status": "paused", "weight_version": None}
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(post(url, CHAT, HELLO)))
    asking.start()
    assert becomes(lambda: engine.live == 1)
    assert not answers
    running = post(url, RESUME, {"weight_version": "v2"}).json()
    assert running == {"object": "engine", "status": "running", "weight_version": "v2"}
    asking.join()
    assert answers[0].json()["weight_version"] == "v2"


def test_an_answer_that_has_begun_goes_on_after_the_pause(serve: Serve) -> None:
    engine = PausingEngine(say("a long answer"))
    url = serve(engine)
    with (
        httpx.Client(verify=False) as client,
        client.stream("POST", url + CHAT, json={**HELLO, "stream": True}) as reply,
    ):
        assert becomes(lambda: engine.halted)
        updated(url, "v3")
        reply.read()
    seen = chunks(reply)
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in seen) == "a long answer"
    assert seen[-1]["weight_version"] == "v3"


def test_every_api_says_which_weights_it_was(serve: Serve) -> None:
    url = serve(ScriptedEngine(say("hi")), store="memory")
    updated(url, "v1")
    raw = {"prompt": "hi"}
    for path, body in ((CHAT, HELLO), ("/v1/completions", raw), ("/v1/responses", {"input": "hi"})):
        assert post(url, path, body).json()["weight_version"] == "v1", path
    for path, body in ((CHAT, HELLO), ("/v1/completions", raw)):
        *_, last = stream(url, path, body)
        assert last["weight_version"] == "v1", path
        *_, last = stream(url, path, {**body, "stream_options": {"include_usage": True}})
        assert (last["choices"], last["weight_version"]) == ([], "v1"), path
    assert streamed(url)[-1]["response"]["weight_version"] == "v1"


def test_what_a_step_says_comes_first(serve: Serve) -> None:
    assert post(serve(VersionedEngine(say("hi"))), CHAT, HELLO).json()["weight_version"] == "step 1"


@pytest.mark.parametrize("path", [CHAT, "/v1/responses"])
def test_nothing_is_said_where_nothing_is_known(serve: Serve, path: str) -> None:
    url = serve(ScriptedEngine(say("hi")))
    assert "weight_version" not in post(url, path, {**HELLO} if path == CHAT else {"input": "hi"}).json()
    if path == CHAT:
        assert all("weight_version" not in chunk for chunk in stream(url, path, HELLO))


def test_a_second_pause_is_the_same_and_a_second_resume_is_too_much(serve: Serve) -> None:
    url = serve(ScriptedEngine(say("hi")))
    assert [post(url, PAUSE, {}).status_code for _ in range(2)] == [200, 200]
    assert [post(url, RESUME, {}).status_code for _ in range(2)] == [200, 409]


def test_no_body_is_needed(serve: Serve) -> None:
    url = serve(ScriptedEngine(say("hi")))
    assert [httpx.post(url + path).status_code for path in (PAUSE, RESUME)] == [200, 200]


@pytest.mark.parametrize("path", [PAUSE, RESUME])
def test_an_engine_that_cannot_is_a_400(serve: Serve, path: str) -> None:
    assert post(serve(Plain()), path, {}).json()["error"]["code"] == "unsupported_model"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (RESUME, {"weight_version": ""}, "weight_version"),
        (RESUME, {"weight_version": 3}, "weight_version"),
        (RESUME, {"weigth_version": "v1"}, "weigth_version"),
        (PAUSE, {"now": True}, "now"),
    ],
)
def test_what_is_wrong_is_named(greeter: str, path: str, body: dict[str, Any], param: str) -> None:
    assert refusal(post(greeter, path, body)) == (400, param)


@pytest.mark.parametrize("path", [PAUSE, RESUME])
def test_a_key_is_needed_where_there_are_keys(serve: Serve, path: str) -> None:
    url = serve(ScriptedEngine(say("hi")), api_key=["secret"])
    assert post(url, path, {}).status_code == 401
