"""Engines are anybody's code: whatever one does, its request ends, with an error, and others go on."""

import asyncio
import json
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest

from dragoman.engines import validate
from dragoman.engines import validate as drive
from dragoman.engines.protocol import ModelCard
from dragoman.engines.scripted import ByteTokenizer
from dragoman.errors import SettingsError, Unavailable
from dragoman.http import upkeep
from dragoman.http.server import background
from dragoman.models import loaded, pool
from dragoman.types import Job, Step
from tests.attacks.unruly import LOGPROBS, MENDED, RAISED, STEPS, A, Dead, Unruly, UnrulyCallbackEngine

CHAT = "/v1/chat/completions"
FAULTY = [name for name in STEPS if name != "good"]


@pytest.fixture(scope="module")
def unruly() -> Iterator[tuple[Unruly, str]]:
    engine = Unruly()
    with background(engine) as url:
        yield engine, url


@pytest.fixture(scope="module")
def calling() -> Iterator[tuple[UnrulyCallbackEngine, str]]:
    engine = UnrulyCallbackEngine()
    with background(engine) as url:
        yield engine, url


def ask(url: str, name: str, **fields: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": name}], **fields}
    return httpx.post(url + CHAT, json=body, timeout=30)


def told(url: str, name: str, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream."""
    lines = ask(url, name, stream=True, **fields).text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def fails(url: str, name: str, **fields: Any) -> None:
    """Whole and streamed, the answer is an error of the engine's, and never looks whole."""
    reply = ask(url, name, **fields)
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "engine_failed")
    events = told(url, name, **fields)
    assert events[-1]["error"]["code"] == "engine_failed"
    assert not any(choice["finish_reason"] for event in events[:-1] for choice in event["choices"])


def goes_on(engine: Unruly, url: str) -> None:
    """The next one is answered, and nothing of the last one is left."""
    assert ask(url, "good").json()["choices"][0]["message"]["content"] == "a"
    assert engine.live == 0


@pytest.mark.parametrize("name", FAULTY)
def test_a_step_that_cannot_be_right_fails_its_answer(
    unruly: tuple[Unruly, str], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine, url = unruly
    fails(url, name)
    goes_on(engine, url)
    if name not in ("no finish", "nothing at all"):
        lines = [record.getMessage() for record in caplog.records if "protocol" in record.getMessage()]
        assert len(lines) == 2, "once for each answer"
        assert all("Unruly" in line for line in lines)


@pytest.mark.parametrize("which", LOGPROBS)
def test_log_probabilities_that_cannot_be_right_fail_their_answer(
    unruly: tuple[Unruly, str], which: str
) -> None:
    engine, url = unruly
    fails(url, f"logprobs: {which}", logprobs=True, top_logprobs=2)
    goes_on(engine, url)


def test_log_probabilities_of_a_prompt_are_missed(unruly: tuple[Unruly, str]) -> None:
    _, url = unruly
    reply = httpx.post(url + "/v1/completions", json={"prompt": "good", "prompt_logprobs": 1})
    assert reply.status_code == 500


@pytest.mark.parametrize("which", ["not of its type", "above zero", "with a far alternative"])
def test_log_probabilities_of_a_prompt_that_cannot_be_right_fail_its_answer(
    unruly: tuple[Unruly, str], which: str
) -> None:
    engine, url = unruly
    assert ask(url, "prompt: missing", prompt_logprobs=2, max_tokens=1).status_code == 200
    reply = ask(url, f"prompt: {which}", prompt_logprobs=2, max_tokens=1)
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "engine_failed")
    goes_on(engine, url)


@pytest.mark.parametrize("which", RAISED)
@pytest.mark.parametrize("when", ["raised", "raised at once"])
def test_whatever_generate_raises_the_request_ends(unruly: tuple[Unruly, str], when: str, which: str) -> None:
    engine, url = unruly
    fails(url, f"{when}: {which}")
    assert "secret" not in ask(url, f"{when}: {which}").text
    goes_on(engine, url)


@pytest.mark.parametrize("name", ["a coroutine", "a plain generator", "nothing"])
def test_a_generate_that_gives_no_async_generator(
    unruly: tuple[Unruly, str], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine, url = unruly
    fails(url, name)
    assert "async generator" in caplog.text
    goes_on(engine, url)


@pytest.mark.parametrize("name", MENDED)
def test_what_goes_beyond_what_was_asked_is_cut_off(unruly: tuple[Unruly, str], name: str) -> None:
    engine, url = unruly
    _, text, finish = MENDED[name]
    fields = {"max_tokens": 8, "stop_token_ids": [ord("z")], "stream_options": {"include_usage": True}}
    whole = ask(url, name, **{**fields, "stream_options": None}).json()
    assert (whole["choices"][0]["message"]["content"], whole["choices"][0]["finish_reason"]) == (text, finish)
    assert 0 <= whole["usage"]["prompt_tokens_details"]["cached_tokens"] <= whole["usage"]["prompt_tokens"]
    events = told(url, name, **fields)
    deltas = [choice["delta"].get("content") or "" for event in events for choice in event["choices"]]
    assert "".join(deltas) == text
    goes_on(engine, url)


def test_an_engine_that_never_ends_is_cut_off(unruly: tuple[Unruly, str]) -> None:
    engine, url = unruly
    reply = ask(url, "endless: ids", max_tokens=50).json()
    assert reply["usage"]["completion_tokens"] == 50
    assert reply["choices"][0]["finish_reason"] == "length"
    goes_on(engine, url)


def test_empty_steps_do_not_go_on_for_ever(
    unruly: tuple[Unruly, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, url = unruly
    monkeypatch.setattr(validate, "MOST_EMPTY", 100)
    fails(url, "endless: nothing")
    goes_on(engine, url)


def test_an_abort_with_words_is_told_and_logged(
    unruly: tuple[Unruly, str], caplog: pytest.LogCaptureFixture
) -> None:
    _, url = unruly
    reply = ask(url, "abort")
    assert (reply.status_code, reply.json()["error"]["message"]) == (503, "The weights are being moved.")
    assert told(url, "abort")[-1]["error"]["message"] == "The weights are being moved."
    assert "The weights are being moved" in caplog.text


@pytest.mark.parametrize("name", ["raises", "raises CancelledError", "raises SystemExit", "no handle"])
def test_a_submit_that_gives_no_handle(calling: tuple[UnrulyCallbackEngine, str], name: str) -> None:
    _, url = calling
    for stream in (False, True):
        reply = ask(url, name, stream=stream)
        assert (reply.status_code, reply.json()["error"]["code"]) == (500, "engine_failed")


def test_a_submit_may_refuse(calling: tuple[UnrulyCallbackEngine, str]) -> None:
    reply = ask(calling[1], "refuses")
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "top_k")


@pytest.mark.parametrize("name", ["wrong index", "odd index"])
def test_a_step_of_a_continuation_that_is_not_there(
    calling: tuple[UnrulyCallbackEngine, str], name: str
) -> None:
    engine, url = calling
    before = engine.handle.cancelled
    fails(url, name)
    assert engine.handle.cancelled == before + 2, "the job is taken from the engine"


def test_a_sink_that_is_called_from_another_thread(calling: tuple[UnrulyCallbackEngine, str]) -> None:
    assert ask(calling[1], "from a thread").json()["choices"][0]["message"]["content"] == "aa"


def test_steps_that_come_before_the_handle(calling: tuple[UnrulyCallbackEngine, str]) -> None:
    engine, url = calling
    before = engine.handle.cancelled
    assert ask(url, "before it returns", stop=["z"]).json()["choices"][0]["message"]["content"] == "aa"
    assert engine.handle.cancelled == before + 1


def test_a_dead_engine_is_a_503() -> None:
    with background(Dead()) as url:
        for stream in (False, True):
            reply = ask(url, "good", stream=stream)
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_failed")
        assert httpx.get(url + "/health").status_code == 503


# Parts that are wrong from the beginning


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("card", "name", ""),
        ("card", "max_model_len", 0),
        ("card", "max_model_len", "64"),
        ("card", "slots", 0),
        ("card", "dimensions", -1),
        ("tokenizer", "pieces", ["a"] * 300),
        ("tokenizer", "pieces", []),
        ("tokenizer", "end_ids", frozenset({-1})),
        ("tokenizer", "eos_id", 5000),
        ("tokenizer", "encode", lambda text: [5000]),
        ("tokenizer", "encode", lambda text: 1 / 0),
    ],
)
def test_an_engine_with_nonsense_in_it_is_not_served(part: str, name: str, value: Any) -> None:
    engine = Unruly()
    engine.card = ModelCard(name="m", max_model_len=64)
    setattr(getattr(engine, part), name, value)
    with pytest.raises(SettingsError, match=f"Unruly cannot be served; {part}"), background(engine):
        pass


def test_a_tokenizer_that_gives_nonsense_later(caplog: pytest.LogCaptureFixture) -> None:
    class Odd(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            return [-1] if "odd" in text else super().encode(text)

    engine = Unruly()
    engine.tokenizer = Odd()
    with background(engine) as url:
        assert ask(url, "odd").json()["error"]["code"] == "engine_failed"
        goes_on(engine, url)
    assert "Odd violated its protocol: the ids that encode gives hold -1" in caplog.text


# Vectors, scores and what else is asked


class Vectors(Unruly):
    def __init__(self) -> None:
        super().__init__()
        self.gives: Any = None

    async def embed(self, prompts: Sequence[Sequence[int]]) -> Any:
        if isinstance(self.gives, BaseException):
            raise self.gives
        return self.gives


@pytest.mark.parametrize(
    "gives",
    [
        None,
        [],
        [[1.0]],
        [[1.0], []],
        [[1.0], [1.0, 2.0]],
        [[1.0], [float("nan")]],
        [[1.0], [float("inf")]],
        [[1.0], ["a"]],
        asyncio.CancelledError(),
        SystemExit(),
        ValueError("secret"),
    ],
    ids=repr,
)
def test_vectors_that_cannot_be_right_fail_their_request(vectors: tuple[Vectors, str], gives: Any) -> None:
    engine, url = vectors
    engine.gives = gives
    reply = httpx.post(url + "/v1/embeddings", json={"input": ["a", "b"]}, timeout=30)
    assert (reply.status_code, "secret" in reply.text) == (500, False)
    assert reply.json()["error"]["code"] == "engine_failed"
    engine.gives = [[1.0], [0.5]]
    assert httpx.post(url + "/v1/embeddings", json={"input": ["a", "b"]}).status_code == 200


@pytest.fixture(scope="module")
def vectors() -> Iterator[tuple[Vectors, str]]:
    engine = Vectors()
    with background(engine) as url:
        yield engine, url


# Its life


class UnrulyLifecycle(Unruly):
    """Its start, check and stop do what they are told to."""

    def __init__(self, **does: Any) -> None:
        super().__init__()
        self._does = does

    async def start(self) -> None:
        await self._do("start")

    async def check(self) -> None:
        await self._do("check")

    async def stop(self) -> None:
        await self._do("stop")

    async def _do(self, name: str) -> None:
        match self._does.get(name):
            case "hang":
                await asyncio.Event().wait()
            case "never let go":
                while not over.is_set():
                    try:
                        await asyncio.sleep(0.05)
                    except asyncio.CancelledError:
                        continue
            case BaseException() as error:
                raise error


over = threading.Event()


@pytest.mark.parametrize("error", [ValueError("secret"), SystemExit(3), asyncio.CancelledError()], ids=repr)
def test_a_start_that_raises(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(Unavailable, match="did not start"), background(UnrulyLifecycle(start=error)):
        pass
    assert "secret" not in "".join(record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("error", [ValueError("secret"), SystemExit(3), asyncio.CancelledError()], ids=repr)
def test_a_check_that_raises_is_a_503(error: BaseException) -> None:
    with background(UnrulyLifecycle(check=error)) as url:
        for path in ("/ready", "/health"):
            reply = httpx.get(url + path)
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_failed")


@pytest.mark.parametrize("how", ["hang", "never let go"])
def test_a_check_that_hangs_is_not_waited_for(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded, "ALIVE_TIMEOUT_S", 0.05)
    over.clear()
    with background(UnrulyLifecycle(check=how)) as url:
        for _ in range(3):
            assert httpx.get(url + "/health").status_code == 200
        assert ask(url, "good").status_code == 200
        over.set()


@pytest.mark.parametrize("how", ["hang", ValueError("secret"), SystemExit(3)], ids=repr)
def test_a_stop_that_hangs_or_raises_does_not_keep_the_server(
    how: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "STOP_TIMEOUT_S", 0.05)
    with background(UnrulyLifecycle(stop=how)) as url:
        assert ask(url, "good").status_code == 200


def test_an_iterator_that_does_not_close_is_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Slow(Unruly):
        async def generate(self, job: Job) -> Any:
            try:
                yield Step([A], finish="length")
            finally:
                await asyncio.sleep(600)

    monkeypatch.setattr(drive, "CLOSE_S", 0.05)
    with background(Slow()) as url:
        assert ask(url, "good").status_code == 200
        deadline = time.monotonic() + 10
        while "did not close" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
    assert "did not close" in caplog.text


def test_an_iterator_that_never_waits_lets_others_go_on() -> None:
    class Greedy(Unruly):
        async def generate(self, job: Job) -> Any:
            while True:
                yield Step([A])

    with background(Greedy()) as url, httpx.stream(
        "POST", url + CHAT, json={"messages": [{"role": "user", "content": "x"}], "stream": True}
    ) as stream:  # fmt: skip
        next(stream.iter_raw())
        assert httpx.get(url + "/version").status_code == 200


def test_an_engine_that_blocks_the_loop_is_named_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class BlockingEngine(Unruly):
        async def generate(self, job: Job) -> Any:
            time.sleep(0.5)
            yield Step([A], finish="length")

    monkeypatch.setattr(upkeep, "LONGEST_S", 0.05)
    with background(BlockingEngine()) as url, caplog.at_level(logging.WARNING):
        assert ask(url, "good").status_code == 200
    assert "Event loop blocked" in caplog.text
    assert "in generate" in caplog.text
