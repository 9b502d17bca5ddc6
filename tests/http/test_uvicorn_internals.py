"""What is used of uvicorn is there, and does what we count on. Fails on a version that has changed it."""

import asyncio
from pathlib import Path
from typing import Any

from dragoman.http.connection.transport import LingeringTransport
from dragoman.http.connection.uvicorn_internals import (
    INSIDES,
    ASGI3Application,
    Config,
    HttpToolsProtocol,
    RequestResponseCycle,
    Server,
    ServerState,
    pass_on,
    short_cut,
)

SOURCE = Path(__file__).parents[2] / "src" / "dragoman"
REQUEST = b"GET /a?b=c HTTP/1.1\r\nhost: here\r\n\r\n"
START = {"type": "http.response.start", "status": 200, "headers": []}


class Wire(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []

    def write(self, data: Any) -> None:
        self.written.append(bytes(data))

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def close(self) -> None: ...


class WatchedProtocol(HttpToolsProtocol):
    started: RequestResponseCycle | None = None

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self.started = cycle
        super()._start_asgi_task(cycle, app)


def test_only_one_file_knows_uvicorn() -> None:
    using = [
        str(file.relative_to(SOURCE))
        for file in SOURCE.rglob("*.py")
        if any(line.startswith(("import uvicorn", "from uvicorn")) for line in file.read_text().splitlines())
    ]
    assert using == ["http/connection/uvicorn_internals.py"]


async def answer(scope: Any, receive: Any, send: Any) -> None:
    await send(START)
    await send({"type": "http.response.body", "body": b"one", "more_body": True})
    write = short_cut(send)
    assert write is not None and write(b"one")
    await send({"type": "http.response.body", "body": b"", "more_body": False})
    assert not write(b"late")


async def one_request() -> tuple[Server, WatchedProtocol, Wire]:
    config = Config(answer, http=WatchedProtocol, log_config=None, lifespan="off")
    server, wire = Server(config), Wire()
    protocol = WatchedProtocol(config, server.server_state, {}, asyncio.get_running_loop())
    protocol.connection_made(wire)
    protocol.data_received(REQUEST)
    await asyncio.gather(*server.server_state.tasks)
    protocol._unset_keepalive_if_required()
    return server, protocol, wire


def test_the_insides_are_as_we_use_them() -> None:
    server, protocol, wire = asyncio.run(one_request())
    parts: list[Any] = [server, protocol.cycle, protocol.flow, server.server_state]
    mapping = {type(one): one for one in parts}
    mapping[HttpToolsProtocol] = protocol
    missing = [
        f"{kind.__name__}.{name}"
        for kind, names in INSIDES.items()
        for name in names
        if not hasattr(mapping[kind], name)
    ]
    assert not missing
    assert isinstance(server.server_state, ServerState)
    # Every request is begun where we look, and ends as we read it.
    assert protocol.started is protocol.cycle
    assert (protocol.cycle.response_started, protocol.cycle.response_complete) == (True, True)
    assert (protocol.scope["method"], protocol.url, protocol.flow.write_paused) == ("GET", b"/a?b=c", False)
    # A piece that we write ourselves is what uvicorn makes of the same one.
    assert wire.written[1] == wire.written[2] == b"3\r\none\r\n"
    pass_on(server, 15)
    assert server._captured_signals == [15]


def test_what_waits_for_more_leaves_with_it_or_when_it_is_released() -> None:
    wire = Wire()
    transport = LingeringTransport(wire, bool, 1.0)
    for released in (False, True):
        transport.cork()
        transport.write(b"head ")
        transport.uncork_on_next_write()
        assert not wire.written
        if released:
            transport.uncork()
        transport.write(b"words")
        transport.write(b" more")
        transport.uncork()
        assert wire.written == ([b"head ", b"words", b" more"] if released else [b"head words", b" more"])
        wire.written.clear()
