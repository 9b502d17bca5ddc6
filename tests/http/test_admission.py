"""The line in front of the engine: who waits, how it ends, and who is refused."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from msgspec import Struct

from dragoman.engines.scripted import ScriptedEngine
from dragoman.http.admission import Admission, Metrics
from dragoman.limits import Limits
from dragoman.settings import Settings
from dragoman.turns.queue import WorkerPool
from tests.http.conftest import Serve
from tests.support.http import post
from tests.support.parrot import HANG, parrot
from tests.support.wait import becomes

CHAT = "/v1/chat/completions"


def saying(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


def bearer(key: str | None) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


@contextmanager
def streaming(url: str, text: str, key: str | None = None) -> Iterator[httpx.Response]:
    body = saying(text, stream=True)
    with httpx.stream("POST", url + CHAT, json=body, headers=bearer(key), timeout=120) as reply:
        yield reply


def figure(url: str, name: str, key: str | None = None) -> float:
    lines = httpx.get(f"{url}/metrics", headers=bearer(key)).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


class Crowd(Struct):
    """Clients of a server whose one place is taken."""

    engine: ScriptedEngine
    url: str
    pool: ThreadPoolExecutor

    key: str | None = None
    """Of the one who has the place."""

    def ask(self, text: str, key: str | None = None, **fields: Any) -> "Future[httpx.Response]":
        """Returns when it waits."""
        before = self.waiting
        asked = self.pool.submit(post, self.url, CHAT, saying(text, **fields), **bearer(key))
        assert becomes(lambda: self.waiting == before + 1)
        return asked

    @property
    def waiting(self) -> float:
        return figure(self.url, "dragoman_answers_waiting", self.key)


@contextmanager
def crowd(url: str, engine: ScriptedEngine, key: str | None = None) -> Iterator[Crowd]:
    """When the block is over, the place comes free."""
    with ThreadPoolExecutor() as pool, streaming(url, HANG, key):
        assert becomes(lambda: engine.live == 1)
        yield Crowd(engine, url, pool, key)


@pytest.fixture
def narrow(serve: Serve) -> Iterator[tuple[str, ScriptedEngine]]:
    engine = parrot()
    yield serve(engine, store="none", limits=Limits(in_flight=1), shutdown_grace=0), engine


Narrow = tuple[str, ScriptedEngine]


def prompts(engine: ScriptedEngine) -> list[str]:
    return [bytes(id_ for id_ in job.prompt if id_ < 256).decode().split("\n")[1] for job in engine.jobs]


@pytest.mark.parametrize("stream", [False, True])
def test_what_waits_is_answered_when_a_place_comes_free(narrow: Narrow, stream: bool) -> None:
    with crowd(*narrow) as others:
        asked = others.ask("hello", stream=stream)
        assert len(others.engine.jobs) == 1
    assert asked.result().status_code == 200
    assert "[DONE]" in asked.result().text if stream else asked.result().json()["choices"]


def test_a_lower_priority_is_begun_first(narrow: Narrow) -> None:
    with crowd(*narrow) as others:
        asked = [others.ask("last", priority=1), others.ask("usual"), others.ask("first", priority=-1)]
    assert all(one.result().status_code == 200 for one in asked)
    assert prompts(others.engine)[1:] == ["first", "usual", "last"]


def test_a_key_is_served_before_the_rest_of_the_flood_of_another(serve: Serve) -> None:
    engine, keys = parrot(), ["flood", "drop"]
    url = serve(engine, store="none", api_key=keys, limits=Limits(in_flight=1), shutdown_grace=0)
    with crowd(url, engine, "flood") as others:
        asked = [others.ask(key, key) for key in ("flood", "flood", "flood", "drop")]
    assert all(one.result().status_code == 200 for one in asked)
    assert prompts(engine)[1:] == ["flood", "drop", "flood", "flood"]


def test_one_that_leaves_while_it_waits_never_reaches_the_engine(narrow: Narrow) -> None:
    with crowd(*narrow) as others:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(others.url + CHAT, json=saying("never"), timeout=0.5)
        assert becomes(lambda: others.waiting == 0)
    assert post(others.url, CHAT, saying("after")).status_code == 200
    assert prompts(others.engine) == [HANG, "after"]


def test_a_stream_that_waits_for_long_is_kept_alive(serve: Serve) -> None:
    engine = parrot()
    url = serve(engine, store="none", limits=Limits(in_flight=1), keep_alive=0.05, shutdown_grace=0)
    with crowd(url, engine), streaming(url, "hello") as reply:
        seen = b""
        for part in reply.iter_raw():
            seen += part
            if seen.count(b": keep-alive") == 2:
                break
        assert len(engine.jobs) == 1


def test_an_engine_that_fails_meanwhile_is_told_by_the_status(serve: Serve) -> None:
    """All that wait are let go, and none of them is left without an answer."""
    engine = parrot()
    url = serve(engine, store="none", limits=Limits(in_flight=1), shutdown_grace=0)
    with crowd(url, engine) as others:
        asked = [others.ask("hello", stream=number % 2 == 0) for number in range(4)]
        engine._dead = True
    assert [one.result().status_code for one in asked] == [503] * 4
    assert {one.result().json()["error"]["code"] for one in asked} == {"engine_failed"}


def test_beyond_the_line_is_429_before_the_body_is_read(serve: Serve) -> None:
    engine = parrot()
    url = serve(engine, store="none", limits=Limits(in_flight=1, queue=1), shutdown_grace=0)
    with crowd(url, engine) as others:
        others.ask("hello")
        refused = httpx.post(url + CHAT, content=b"this is no JSON")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        assert figure(url, 'dragoman_refused_total{reason="queue"}') == 1


def test_one_key_cannot_keep_the_others_out(serve: Serve) -> None:
    engine = parrot()
    limits = Limits(in_flight=4, per_key=1)
    url = serve(engine, store="none", api_key=["a", "b"], limits=limits, shutdown_grace=0)
    with streaming(url, HANG, "a"):
        assert becomes(lambda: engine.live == 1)
        assert post(url, CHAT, saying("hi"), **bearer("a")).status_code == 429
        assert post(url, CHAT, saying("hi"), **bearer("b")).status_code == 200
        assert figure(url, 'dragoman_refused_total{reason="key"}', "b") == 1


def test_several_keys_share_the_line_by_themselves(serve: Serve) -> None:
    engine = parrot()
    limits = Limits(in_flight=1, queue=1)
    url = serve(engine, store="none", api_key=["a", "b"], limits=limits, shutdown_grace=0)
    with streaming(url, HANG, "a"):
        assert becomes(lambda: engine.live == 1)
        assert post(url, CHAT, saying("hi"), **bearer("a")).status_code == 429


def test_a_request_that_is_done_leaves_no_trace(narrow: Narrow) -> None:
    url, engine = narrow
    for _ in range(3):
        assert post(url, CHAT, saying("hello", n=3)).status_code == 200
    assert figure(url, "dragoman_answers_running") == figure(url, "dragoman_answers_waiting") == 0
    assert engine.live == 0


def test_the_threads_know_whether_other_keys_wait_for_answers() -> None:
    async def play() -> None:
        workers = WorkerPool()
        admission = Admission(Settings(), Metrics(), workers, keys=2)
        assert not workers.has_waiting_others("a")
        with admission.admit("a"), admission.admit("b", "looks"):
            assert not workers.has_waiting_others("a")
            assert workers.has_waiting_others("b")

    asyncio.run(play())
