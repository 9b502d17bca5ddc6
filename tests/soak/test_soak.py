"""The logic of the soak: it finds nothing where nothing is wrong, and each fault where there is one."""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from dragoman.engines.scripted import Script, say
from dragoman.http.server import background
from dragoman.settings import Settings
from dragoman.types import Job
from tests.soak import probes, run
from tests.soak.admin import Administrator
from tests.soak.client import Client
from tests.soak.connection import Limits
from tests.soak.fault import Fault
from tests.soak.ledger import MOST_FAULTS, SHOWN_FAULTS, Ledger
from tests.soak.people import TEMPERAMENTS, Person
from tests.soak.probes import MOST_DESCRIPTORS, MOST_MIB, Probes
from tests.soak.question import PATHS, Question
from tests.soak.server import Resources, Server
from tests.soak.topics import ask
from tests.soak.windows import Windows
from tests.support.parrot import NAME, parrot
from tests.support.raw_server import SSE_HEAD, raw_server, reply
from tests.support.raw_server import Script as Said

QUICK = Limits(silence_s=0.2, whole_s=0.5, long_s=0.5)
HELLO = ask("Hello", temperature=0.0)
LONGEST = 65_536
"""Tokens of context: one for each byte here."""
CHUNK = b'data: {"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": null}]}\n\n'


class FakeServer(Server):
    """A server without a process; a test sets its address and what it holds."""

    def __init__(self, log: Path, url: str = "", *resources: Resources) -> None:
        self.url, self.log = url, log
        self.resources = list(resources)
        self.status = ""
        self._log_read = 0
        log.touch()

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def kill(self) -> None: ...

    def check(self) -> None:
        if self.status:
            raise Fault("server", self.status)

    def measure(self) -> Resources:
        return self.resources.pop(0) if self.resources else Resources(0, 0, 0)


def make_client(url: str) -> Client:
    return Client(url, NAME, Ledger(lambda count: []), Windows(), QUICK)


@contextmanager
def serve_answers(answer: Callable[[Job], Script]) -> Iterator[Client]:
    with background(parrot(answer=answer), Settings(port=0, store="memory")) as url:
        yield make_client(url)


def put(client: Client, question: Question = HELLO, *, stream: bool = False, times: int = 1) -> None:
    async def main() -> None:
        for _ in range(times):
            await client.ask("someone", "chat", question, stream=stream)

    asyncio.run(main())


@pytest.mark.parametrize("temperament", TEMPERAMENTS)
def test_nothing_is_found_where_nothing_is_wrong(temperament: str) -> None:
    """And a person does every action of the temperament."""

    async def live(client: Client) -> None:
        people = [Person(str(number), temperament, client, Random(number)) for number in range(4)]
        for person in people:
            person._draw_pause = lambda: 0.0  # type: ignore[method-assign]
        await asyncio.gather(*(person.live(time.monotonic() + 1.0) for person in people))

    engine = parrot(context=LONGEST, answer=lambda job: say("Hello"))
    with background(engine, Settings(port=0, store="memory")) as url:
        client = Client(url, NAME, Ledger(lambda count: []), Windows())
        asyncio.run(live(client))
    assert [str(failure) for failure in client.ledger.failures] == []
    assert client.ledger.requests > 10
    asked = [act for act in TEMPERAMENTS[temperament] if not act.startswith("leave")]
    if temperament != "curious":
        # It has too much to do for a second.
        assert client.ledger.find_missing(asked) == []


def test_the_same_is_read_of_every_api_whole_and_in_a_stream() -> None:
    async def main(client: Client) -> list[Any]:
        asks = [client.ask("someone", api, HELLO, stream=stream) for api in PATHS for stream in (False, True)]
        return [await each for each in asks]

    with serve_answers(lambda job: say("Hello")) as client:
        answers = asyncio.run(main(client))
    assert client.ledger.failures == []
    assert {answer.text for answer in answers} == {"Hello"}
    assert client.ledger.kinds["answer compared"] == len(PATHS)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_differs_is_found(stream: bool) -> None:
    numbers = itertools.count()
    with serve_answers(lambda job: say(f"answer {next(numbers)}")) as client:
        put(client, stream=stream, times=2)
        assert client.ledger.faults == {"differs": 1}
        put(client, ask("Hello", temperature=1.0), stream=stream, times=2)
    assert client.ledger.faults == {"differs": 1}
    assert "answer 0" in str(client.ledger.failures[0])


def test_an_error_in_a_stream_is_found() -> None:
    with serve_answers(lambda job: say("abc", fault="exception", fault_at=2)) as client:
        put(client, stream=True)
        put(client)
    assert client.ledger.faults == {"error in a stream": 1, "5xx": 1}


def test_an_answer_that_stands_still_is_found() -> None:
    with serve_answers(lambda job: say("abc", fault="hang", fault_at=2)) as client:
        put(client, stream=True)
        put(client)
    assert client.ledger.faults == {"stuck": 2}


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        ([reply(500, b"no")], "5xx"),
        ([reply(503, b"no")], "5xx"),
        ([reply(400, b"no")], "4xx"),
        ([SSE_HEAD, CHUNK], "unfinished"),
        ([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\ndata:"], "unfinished"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{}"], "unfinished"),
        ([reply(200, b"no JSON")], "unfinished"),
        ([], "unfinished"),
    ],
)
def test_what_a_server_may_not_say_is_found(script: Said, kind: str) -> None:
    with raw_server(script) as server:
        client = make_client(server.url)
        put(client, stream=b"data" in b"".join(part or b"" for part in script))
    assert client.ledger.faults == {kind: 1}


def test_a_server_that_is_not_there_is_found() -> None:
    client = make_client("http://127.0.0.1:9")
    put(client)
    assert client.ledger.faults == {"broken": 1}


def test_what_was_announced_is_no_fault() -> None:
    """Only a restart excuses a broken connection; nothing excuses a 503 without Retry-After."""
    later, never = Fault("5xx", "503", retry_after=True), Fault("5xx", "503")
    windows, began = Windows(), time.monotonic()
    assert not windows.excuses(later, began)
    with windows.announce_change("tiny"):
        assert windows.excuses(later, began, "tiny")
        assert not windows.excuses(later, began)
        assert not windows.excuses(Fault("broken", ""), began, "tiny")
    with windows.announce_restart():
        assert not windows.is_server_there
        assert windows.excuses(later, began)
        assert windows.excuses(Fault("broken", ""), began)
        assert not windows.excuses(never, began)
        assert not windows.excuses(Fault("differs", ""), began)
    assert windows.excuses(later, began)
    assert not windows.excuses(later, time.monotonic() + 60)


@pytest.mark.parametrize("status", [200, 503])
def test_a_server_that_is_not_ready_is_found_and_told_once(status: int, tmp_path: Path) -> None:
    async def main(watcher: Probes) -> None:
        watching = asyncio.create_task(watcher.watch())
        await asyncio.sleep(1.2)
        watching.cancel()

    with raw_server([reply(status, b"{}")]) as server:
        client = make_client(server.url)
        asyncio.run(main(Probes(FakeServer(tmp_path / "log", server.url), client)))
    assert client.ledger.faults == ({} if status == 200 else {"unready": 2})


def test_a_line_of_level_error_is_found(tmp_path: Path) -> None:
    server = FakeServer(tmp_path / "log")
    lines = ['{"level":"info"}', "not JSON", '{"level":"error","message":"no"}', '{"level":"critical"']
    server.log.write_text("\n".join(lines))
    assert server.read_errors() == [lines[2]]
    server.log.write_text("\n".join(lines) + "}\n")
    assert server.read_errors() == ['{"level":"critical"}']
    assert server.read_errors() == []


@pytest.mark.parametrize(
    ("last", "faults"),
    [
        (Resources((100 + MOST_MIB - 1) << 20, 10, 10), {}),
        (Resources((100 + MOST_MIB + 1) << 20, 10, 10), {"growth": 1}),
        (Resources(100 << 20, 11 + MOST_DESCRIPTORS, 10), {"growth": 1}),
        (Resources(100 << 20, 10, 100), {"growth": 1}),
    ],
)
def test_growth_is_found(
    last: Resources, faults: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "SETTLE_S", 0.0)
    with serve_answers(lambda job: say("Hello")) as client:
        rests = [rest for rest in (Resources(1, 1, 1), Resources(100 << 20, 10, 10), last) for _ in range(2)]
        watcher = Probes(FakeServer(tmp_path / "log", client.url, *rests), client)

        async def main() -> None:
            for _ in rests:
                await watcher.rest()

        asyncio.run(main())
    watcher.compare()
    assert client.ledger.faults == faults
    assert client.ledger.kinds["growth measured"] == 1


@pytest.mark.parametrize("stops", [False, True])
def test_a_restart_is_announced_and_ends_the_soak_where_it_fails(stops: bool, tmp_path: Path) -> None:
    async def stop() -> None:
        await asyncio.sleep(0)
        if not stops:
            raise Fault("server", "it was there after SIGTERM")

    server, client = FakeServer(tmp_path / "log"), make_client("")
    server.stop = stop  # type: ignore[method-assign]
    began = time.monotonic()
    asyncio.run(Administrator(server, client, Random(1)).restart())
    assert client.windows.covers_restart(began)
    assert client.windows.is_server_there
    assert client.ledger.over.is_set() != stops
    assert client.ledger.faults == ({} if stops else {"server": 1})


@pytest.mark.parametrize("fails", [False, True])
def test_a_soak_ends_by_itself_and_says_how_it_went(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A short soak need not have done every kind of action; a long one must."""
    monkeypatch.setattr(run, "PROVEN_MINUTES", 1.0)
    monkeypatch.setattr(Administrator, "work", lambda self, until: asyncio.sleep(0))
    fault = {"fault": "exception"} if fails else {}
    engine = parrot(context=LONGEST, answer=lambda job: say("Hello", **fault))  # type: ignore[arg-type]
    with background(engine, Settings(port=0, store="memory", log_level="error")) as url:
        short = run.Soak(FakeServer(tmp_path / "log", url), run.Options(minutes=0.02))
        asyncio.run(short.run())
        long = run.Soak(FakeServer(tmp_path / "log", url), run.Options(minutes=2.0, requests=30))
        asyncio.run(long.run())
    assert short.print_summary() != fails
    text = capsys.readouterr().out
    assert "one person" in text or fails
    assert ("=== 5xx" in text) == fails
    if fails:
        assert len(short.ledger.failures) == SHOWN_FAULTS
        assert short.ledger.faults["5xx"] >= MOST_FAULTS
    assert not long.print_summary()
    assert "NEVER  restart" in capsys.readouterr().out or fails
