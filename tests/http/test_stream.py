"""The last yards to the socket: whole, in order, and without a queue that grows."""

import asyncio
import json
import socket
from urllib.parse import urlsplit

import pytest
from starlette.types import Message

from dragoman.api.chat.reply import ChatSpelling
from dragoman.api.reply import ChunkOptions, Head, Speller, StreamWriter
from dragoman.engines.protocol import ModelCard
from dragoman.engines.scripted import CHATML, Script, ScriptedEngine, say
from dragoman.http import run_turn
from dragoman.http.run_turn import Pump, TurnStream
from dragoman.turns.reading import Pieces
from dragoman.turns.turn import Turn
from tests.http.conftest import Serve
from tests.support.http import HELLO
from tests.support.turns import spec, turn_of
from tests.support.wait import becomes


def writer_of(turn: Turn, engine: ScriptedEngine) -> StreamWriter:
    speller = Speller(Pieces(engine.tokenizer.pieces))
    spelling = ChatSpelling(speller, logprobs=False)
    return StreamWriter(Head("id", 1, "m", "f"), spelling, ChunkOptions(), lambda: turn.usage, plain=True)


def text_of(data: bytes) -> str:
    events = [json.loads(line[6:]) for line in data.decode().split("\n\n") if line.startswith("data: {")]
    return "".join(event["choices"][0]["delta"].get("content", "") for event in events if event["choices"])


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
            turn, writer_of(turn, engine).write, lambda: b"", gate.send, Pump(), keep_alive=60
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
            written = TurnStream(turn, write, lambda: b"", gate.send, Pump(), keep_alive=60, holds_last=True)
            await written.done
            written.close()
        return gate.sent, written.last

    sent, last = asyncio.run(main())
    assert b'"finish_reason":"stop"' in last and b'"finish_reason":"stop"' not in b"".join(sent)
    assert text_of(b"".join(sent) + last) == "Hello"


async def crowd(streams: int, text: str) -> list[list[bytes]]:
    """What so many streams of one server send each, of an engine that says a token at a time."""
    pump = Pump()

    async def one() -> list[bytes]:
        engine, gate = ScriptedEngine(say(text)), Gate()
        async with turn_of(engine, spec()) as turn:
            written = TurnStream(
                turn, writer_of(turn, engine).write, lambda: b"", gate.send, pump, keep_alive=60
            )
            await written.done
            written.close()
        return gate.sent

    sent = await asyncio.gather(*(one() for _ in range(streams)))
    assert pump.open == 0
    return sent


def test_a_crowd_of_streams_says_together_what_comes_within_milliseconds() -> None:
    for sent in asyncio.run(crowd(run_turn.CROWD, "x" * 50)):
        assert text_of(b"".join(sent)) == "x" * 50
        assert text_of(sent[0]) == "x"
        assert b"".join(sent).count(b"data: ") < 25


def test_a_few_streams_say_each_token_as_it_comes() -> None:
    for sent in asyncio.run(crowd(run_turn.CROWD - 1, "x" * 50)):
        assert b"".join(sent).count(b"data: ") >= 50


def test_a_failing_send_fails_the_stream() -> None:
    class Broken(Gate):
        async def send(self, message: Message) -> None:
            raise OSError("gone")

    async def main() -> None:
        await run(ScriptedEngine(say("x")), Broken())

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
        pump, begun = Pump(), []

        async def come(number: int) -> None:
            await pump.lull()
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
        pump = Pump()
        first = asyncio.create_task(pump.lull())
        others = []
        while not first.done():
            others.append(asyncio.create_task(pump.lull()))
            await asyncio.sleep(0)
        await asyncio.wait(others)

    asyncio.run(main())
