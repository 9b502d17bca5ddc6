"""A WebSocket through the ingress: messages are relayed unchanged until one side disconnects."""

import asyncio
from collections.abc import Iterator

import msgspec
from starlette.types import Message, Receive, Scope, Send
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from dragoman.api.responses.response import ERRORS
from dragoman.errors import DragomanError
from dragoman.http.admission import ByteReservation

OPEN_S = 5.0
NORMAL = frozenset({1000, 1001, 1005, 1008, 1009, 1013})
"""Close codes that do not mean that the server died."""
OWN = frozenset({b"host", b"connection", b"upgrade", b"user-agent", b"content-length", b"transfer-encoding"})


def open_socket(scope: Scope, host: str, port: int) -> connect:
    """Connect to a replica with the client's headers, including its Host."""
    headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in _passed(scope)]
    name = dict(scope["headers"]).get(b"host", f"{host}:{port}".encode()).decode("latin-1")
    query = scope.get("query_string", b"").decode("latin-1")
    return connect(
        f"ws://{name}{scope['path']}{'?' + query if query else ''}",
        host=host,
        port=port,
        additional_headers=headers,
        user_agent_header=None,
        compression=None,
        open_timeout=OPEN_S,
        ping_interval=None,
        max_size=None,
        proxy=None,
    )


def _passed(scope: Scope) -> Iterator[tuple[bytes, bytes]]:
    for name, value in scope["headers"]:
        if name.lower() not in OWN and not name.lower().startswith(b"sec-websocket"):
            yield name, value


async def relay_socket(
    replica: ClientConnection,
    first: Message,
    receive: Receive,
    send: Send,
    held: ByteReservation,
    died: DragomanError,
) -> None:
    """Relay messages; `first` has already been received. If the replica dies, the client gets an error."""
    up = asyncio.create_task(_pass_up(replica, first, receive, held))
    down = asyncio.create_task(_pass_down(replica, send))
    try:
        await asyncio.wait({up, down}, return_when=asyncio.FIRST_COMPLETED)
        if not up.done() or up.exception() is not None:
            await _end(await down, send, died)
    finally:
        up.cancel()
        down.cancel()
        await asyncio.gather(up, down, return_exceptions=True)


async def _pass_up(
    replica: ClientConnection, message: Message, receive: Receive, held: ByteReservation
) -> None:
    """Relay messages of the client until it disconnects."""
    while message["type"] == "websocket.receive":
        text = message.get("text")
        data = text if text is not None else message["bytes"]
        held.resize(len(data))
        await replica.send(data)
        held.release()
        message = await receive()


async def _pass_down(replica: ClientConnection, send: Send) -> int:
    """Relay messages of the replica; returns its close code."""
    try:
        while True:
            data = await replica.recv()
            kind = "text" if isinstance(data, str) else "bytes"
            await send({"type": "websocket.send", kind: data})
    except ConnectionClosed:
        return replica.close_code or 1006


async def _end(code: int, send: Send, died: DragomanError) -> None:
    if code in NORMAL:
        await send({"type": "websocket.close", "code": 1000 if code == 1005 else code})
    else:
        await fail_socket(died, send, 1011)


async def fail_socket(error: DragomanError, send: Send, code: int) -> None:
    """Send the error in the format of the API, and close the socket."""
    error.clear_frames()
    text = msgspec.json.encode(ERRORS.message(error)).decode()
    await send({"type": "websocket.send", "text": text})
    await send({"type": "websocket.close", "code": code})
