"""The last yards to the socket: whole, in order, and without a queue that grows."""

import asyncio
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest
from starlette.types import Message

from dragoman.api.chat.reply import ChatSerializer
from dragoman.api.reply import ChunkOptions, LogprobSerializer, ReplyEnvelope, StreamWriter
from dragoman.engines.protocol import ModelCard
from dragoman.engines.scripted import CHATML, Script, ScriptedEngine, say
from dragoman.http import run_turn
from dragoman.http.run_turn import FlushScheduler, TurnStream
from dragoman.turns.choice_reader import TokenTable
from dragoman.turns.turn import Turn
from tests.http.conftest import Serve
from tests.support.http import HELLO, stream
from tests.support.turns import spec, turn_of
from tests.support.wait import becomes


def writer_of(turn: Turn, engine: ScriptedEngine) -> StreamWriter:
    speller = LogprobSerializer(TokenTable(engine.tokenizer.pieces))
    spelling = ChatSerializer(speller, logprobs=False)
    return StreamWriter(
        ReplyEnvelope("id", 1, "m", "f"), spelling, ChunkOptions(), lambda: turn.usage, plain=True
    )


def contents(data: bytes) -> list[str]:
    """The text of each event that has some."""
    events = [json.loads(line[6:]) for line in data.decode().split("\n\n") if line.startswith("data: {")]
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    return [delta["content"] for delta in deltas if delta.get("content")]


def text_of(data: bytes) -> str:
    return "".join(contents(data))


class Gate:
    """An ASGI `send` that waits while it is shut."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.sent: list[bytes] = []

    async def send(self, message: Message) -> None:
        if not self.open.is_set():
            await self.open.wait()
        self.sent.append(message["body"])


async def run(engine: ScriptedEngine, gate: Gate, n: int = 1) -> list[bytes]:
    async with turn_of(engine, spec(n=n)) as turn:
        written = TurnStream(
            turn, writer_of(turn, engine).write, lambda: b"", gate.send, FlushScheduler(), keep_alive=60
        )
        await written.done
        written.close()
    return gate.sent


def test_everything_is_written_in_order() -> None:
    async def main() -> list[bytes]:
        return await run(ScriptedEngine(say("Hello, wörld!")), Gate())

    assert text_of(b"".join(asyncio.run(main()))) == "Hello, wörld!"


def test_a_send_that_waits_holds_nothing_else_up() -> None:
    async def main() -> tuple[list[bytes], bool]:
        gate = Gate()
        gate.open.clear()
        engine = ScriptedEngine(say("x" * 50))
        running = asyncio.create_task(run(engine, gate))
        while engine.live or not engine.jobs:
            await asyncio.sleep(0)
        finished_early = running.done()
        gate.open.set()
        return await running, finished_early

    sent, finished_early = asyncio.run(main())
    assert not finished_early
    assert text_of(b"".join(sent)) == "x" * 50


def test_choices_that_speak_together_leave_in_one_send() -> None:
    async def main() -> list[bytes]:
        return await run(ScriptedEngine(say("ab")), Gate(), n=3)

    sent = asyncio.run(main())
    assert all(data.count(b"data: ") % 3 == 0 for data in sent)
    assert b"".join(sent).count(b"data: ") == 9


def test_the_last_events_can_be_held_for_what_follows_them() -> None:
    async def main() -> tuple[list[bytes], bytes]:
        engine, gate = ScriptedEngine(say("Hello")), Gate()
        async with turn_of(engine, spec()) as turn:
            write = writer_of(turn, engine).write
            written = TurnStream(
                turn, write, lambda: b"", gate.send, FlushScheduler(), keep_alive=60, holds_last=True
            )
            await written.done
            written.close()
        return gate.sent, written.last

    sent, last = asyncio.run(main())
    assert b'"finish_reason":"stop"' in last and b'"finish_reason":"stop"' not in b"".join(sent)
    assert text_of(b"".join(sent) + last) == "Hello"


async def many(streams: int, text: str, write_interval: float = 0.0) -> list[list[bytes]]:
    """What so many streams of one server send each, of an engine that gives each a token at each step."""
    pump, engine = FlushScheduler(write_interval), ScriptedEngine(say(text))

    async def one() -> list[bytes]:
        gate = Gate()
        async with turn_of(engine, spec()) as turn:
            written = TurnStream(
                turn, writer_of(turn, engine).write, lambda: b"", gate.send, pump, keep_alive=60
            )
            await written.done
            written.close()
        return gate.sent

    return await asyncio.gather(*(one() for _ in range(streams)))


@pytest.mark.parametrize("streams", [1, 64])
def test_each_step_of_the_engine_is_one_event_and_one_send(streams: int) -> None:
    for sent in asyncio.run(many(streams, "x" * 50)):
        assert [contents(data) for data in sent[:50]] == [["x"]] * 50


def test_steps_within_the_write_interval_leave_in_one_send_and_stay_events() -> None:
    for sent in asyncio.run(many(64, "x" * 50, write_interval=0.01)):
        assert contents(b"".join(sent)) == ["x"] * 50
        assert contents(sent[0]) == ["x"]
        assert len(sent) < 25


def test_no_event_is_joined_however_long_the_write_interval_is() -> None:
    """More events than a turn keeps apart for a client that reads slowly."""
    for sent in asyncio.run(many(2, "x" * 200, write_interval=1.0)):
        assert contents(b"".join(sent)) == ["x"] * 200


def test_steps_that_are_ready_together_leave_in_one_send_and_stay_events() -> None:
    """The event loop was busy while the engine went on."""

    class Ahead(ScriptedEngine):
        def _step(self) -> None:
            for _ in range(4):
                super()._step()

    async def main() -> list[bytes]:
        return await run(Ahead(say("x" * 40)), Gate())

    sent = asyncio.run(main())
    assert contents(b"".join(sent)) == ["x"] * 40
    assert len(sent) <= 11


@pytest.mark.parametrize("write_interval", [0.0, 0.01])
def test_64_streams_over_sockets_get_an_event_for_each_step(serve: Serve, write_interval: float) -> None:
    url = serve(ScriptedEngine(say("x" * 50), interval=0.002), write_interval=write_interval)
    with ThreadPoolExecutor(64) as clients:
        asked = [clients.submit(stream, url, "/v1/chat/completions", HELLO) for _ in range(64)]
        for one in asked:
            deltas = [chunk["choices"][0]["delta"] for chunk in one.result() if chunk["choices"]]
            assert [delta["content"] for delta in deltas if delta.get("content")] == ["x"] * 50


def test_a_failing_send_fails_the_stream() -> None:
    class BrokenGate(Gate):
        async def send(self, message: Message) -> None:
            raise OSError("gone")

    async def main() -> None:
        await run(ScriptedEngine(say("x")), BrokenGate())

    with pytest.raises(OSError, match="gone"):
        asyncio.run(main())


def test_a_client_that_reads_slowly_gets_it_all_in_fewer_events(serve: Serve) -> None:
    tokens = 60_000
    card = ModelCard(name="long", max_model_len=100_000, templates={"default": CHATML})
    engine = ScriptedEngine(Script([120] * tokens, burst=50), card=card)
    address = urlsplit(serve(engine))
    body = json.dumps({**HELLO, "stream": True, "max_tokens": tokens}).encode()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((address.hostname, address.port))
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
        client.sendall(f"{head}content-type: application/json\r\nconnection: close\r\n\r\n".encode() + body)
        assert becomes(lambda: bool(engine.jobs) and engine.live == 0)
        received = b"".join(iter(lambda: client.recv(1 << 16), b""))
    assert received.endswith(b"0\r\n\r\n")
    assert b"data: [DONE]\n\n" in received
    events = received.count(b'"finish_reason":null')
    assert events < tokens / 2
    contents = [part.split(b'"')[0] for part in received.split(b'"content":"')[1:]]
    assert sum(map(len, contents)) == tokens


def test_streams_begin_when_nobody_else_comes() -> None:
    async def main() -> None:
        pump, begun = FlushScheduler(), []

        async def come(number: int) -> None:
            await pump.wait_quiet()
            begun.append(number)

        coming = []
        for number in range(6):
            coming.append(asyncio.create_task(come(number)))
            await asyncio.sleep(0)
            assert not begun
        coming[2].cancel()
        await asyncio.wait(coming)
        assert begun == [0, 1, 3, 4, 5]

    asyncio.run(main())


def test_streams_begin_though_others_come_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_turn, "OPENING_S", 0.0)

    async def main() -> None:
        pump = FlushScheduler()
        first = asyncio.create_task(pump.wait_quiet())
        others = []
        while not first.done():
            others.append(asyncio.create_task(pump.wait_quiet()))
            await asyncio.sleep(0)
        await asyncio.wait(others)

    asyncio.run(main())
