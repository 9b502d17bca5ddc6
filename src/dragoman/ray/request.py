"""A request as the ingress reads it, and how it is sent to a replica."""

import asyncio

from msgspec import Struct
from starlette.types import Receive, Scope

from dragoman.errors import BadRequest, BodyTooLarge, RequestTimeout
from dragoman.http.admission import ByteReservation
from dragoman.ray.fleet import ReplicaConnection, ReplicaHeartbeat
from dragoman.routing import RoutingKey, key_of_body

HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer"}
    | {b"transfer-encoding", b"upgrade", b"expect", b"content-length"}
)
"""Hop-by-hop headers, and those that are recomputed."""
LONG_NUMBER = 16


class IngressRequest(Struct):
    """One request, as far as the ingress reads it."""

    scope: Scope
    receive: Receive
    headers: dict[bytes, bytes]
    owner: str
    body: bytes | None = None
    """None for a body that is streamed to the replica, and can be sent only once."""
    model: str = ""
    retryable: bool = True
    """Whether another replica may be tried after one has received it."""
    maker: ReplicaHeartbeat | None = None
    """The replica that runs the response which the request is about."""
    counts: bool = False
    """Whether it requests an answer, of which each key may have a limited number."""


def media_of(asked: IngressRequest) -> bytes:
    return asked.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()


def length_of(asked: IngressRequest) -> int:
    """Return the length of a streamed body, if the client announced it."""
    data = asked.headers.get(b"content-length", b"")
    return int(data) if data.isdigit() and len(data) < LONG_NUMBER else 0


def key_of(asked: IngressRequest) -> RoutingKey:
    hints = {name.decode("latin-1"): value.decode("latin-1") for name, value in asked.headers.items()}
    return key_of_body(asked.body or b"", hints, asked.owner)


def write_head(asked: IngressRequest, beat: ReplicaHeartbeat) -> bytes:
    scope = asked.scope
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    target = raw + (b"?" + scope["query_string"] if scope.get("query_string") else b"")
    lines = [b"%b %b HTTP/1.1" % (scope["method"].encode(), target)]
    if b"host" not in asked.headers:
        lines.append(b"host: %b" % f"{beat.host}:{beat.port}".encode())
    # Keep the Host header of the client: replicas check it.
    lines += [b"%b: %b" % (name, value) for name, value in scope["headers"] if name.lower() not in HOP]
    if asked.body is None and not length_of(asked):
        lines.append(b"transfer-encoding: chunked")
    elif asked.body is None:
        lines.append(b"content-length: %d" % length_of(asked))
    elif asked.body or scope["method"] in ("POST", "PUT", "PATCH"):
        lines.append(b"content-length: %d" % len(asked.body))
    return b"\r\n".join(lines) + b"\r\n\r\n"


async def read_body(receive: Receive, most: int, held: ByteReservation) -> bytes:
    pieces, size = list[bytes](), 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise BadRequest("The body was cut off.")
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
        if size > most:
            raise BodyTooLarge(f"The body has more than {most} bytes, which is the limit.")
        held.resize(size)
        if not message.get("more_body"):
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)


async def forward_form(
    passage: ReplicaConnection, asked: IngressRequest, beat: ReplicaHeartbeat, patience: float
) -> None:
    """Stream a form to a replica. A client that stops sending, or a replica that stops reading, ends it."""
    passage.ask(write_head(asked, beat))
    chunked = not length_of(asked)
    try:
        while passage.is_open and not passage.status:
            async with asyncio.timeout(patience):
                message = await asked.receive()
                if message["type"] == "http.disconnect":
                    passage.close()
                    return
                if piece := message.get("body", b""):
                    await passage.send_more(piece, chunked=chunked)
            if not message.get("more_body"):
                if chunked:
                    await passage.send_more(b"", chunked=True)
                return
    except TimeoutError:
        raise RequestTimeout("The body of the request did not arrive in time.") from None
