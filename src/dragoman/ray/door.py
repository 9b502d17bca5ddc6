"""The door of a fleet: one ASGI app before many servers, which all speak HTTP themselves.

A request is read as far as it takes to know where it belongs: its model, and whose conversation it goes on.
It is then passed to one of the replicas as it is, and so is what comes back: nobody here knows tokens.

What the door is for is what happens when a replica dies. Before it has answered, another one is asked, as
long as that cannot do anything twice. After that the client has a part of the answer: an event stream is
ended with an error event in its API's form, and it is cut only between two events, so that the client can
read it. Any other reply is broken off, which HTTP shows.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct
from starlette.types import Message, Receive, Scope, Send

from dragoman.errors import (
    BadRequest,
    BodyTooLarge,
    DragomanError,
    EngineFailed,
    ModelNotFound,
    Unavailable,
)
from dragoman.http.exchange import advice
from dragoman.http.keys import Keys
from dragoman.http.routes.table import APIS, OPEN_PATHS, errors_at
from dragoman.ray.fleet import Fleet, Passage, ReplicaBeat, StreamedReply
from dragoman.routing import Router, RoutingKey, key_of_body
from dragoman.settings import Settings

logger = logging.getLogger("dragoman.ray")

TOLD = b"x-dragoman-replica"
HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer"}
    | {b"transfer-encoding", b"upgrade", b"expect", b"host", b"content-length"}
)
"""Headers that are about one connection."""
COMPUTED = frozenset(path for api in APIS for path in api.computed)
"""Of these nothing is left where a replica died before it answered."""
HEALTH = frozenset({"/health", "/healthz", "/ping"})
MODELS = frozenset({"/v1/models", "/models"})
STREAMS = {b"text/event-stream": b"\n\n", b"application/x-ndjson": b"\n"}
"""Kinds of replies that can be ended with an error, and where their events end."""


class _NamedFields(Struct):
    model: Any = None
    conversation: Any = None


_read_named = msgspec.json.Decoder(_NamedFields).decode
_read_list = msgspec.json.Decoder(dict[str, Any]).decode


class DoorRequest(Struct):
    """One request, as far as the door reads it."""

    scope: Scope
    receive: Receive
    headers: dict[bytes, bytes]
    owner: str
    body: bytes | None = None
    """None: it is passed on as it comes, and can be sent once."""
    model: str = ""
    again: bool = True
    """Whether another replica may be asked after one has begun with it."""


class Door:
    """`fleet.hear` says who is there. What keys there are, the door looks up before it reads a body."""

    def __init__(self, fleet: Fleet, settings: Settings) -> None:
        self._fleet = fleet
        self._settings = settings
        self._keys = Keys(settings)
        self.told_breaks = 0
        """Streams whose replica died, and whose clients were told."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            for kind in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{kind}.complete"})
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        else:
            await receive()
            await send({"type": "websocket.close", "code": 1011, "reason": "not through the door: use HTTP"})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        try:
            await self._answer(scope, headers, receive, send)
        except DragomanError as error:
            error.let_go()
            errors = errors_at(scope["path"], headers)
            await _reply(send, errors.status(error), errors.body(error), advice(error))

    async def _answer(
        self, scope: Scope, headers: Mapping[bytes, bytes], receive: Receive, send: Send
    ) -> None:
        path, method = scope["path"], scope["method"]
        if method in ("GET", "HEAD") and path in HEALTH:
            await _reply(send, 200, {"status": "ok"})
            return
        if method in ("GET", "HEAD") and path == "/ready":
            self._check_ready()
            await _reply(send, 200, {"status": "ready"})
            return
        is_open = method in ("GET", "HEAD") and path in OPEN_PATHS
        owner = "" if is_open else self._keys.of(headers).sha256
        asked = DoorRequest(scope, receive, dict(headers), owner)
        if method == "GET" and path in MODELS and len(self._fleet.routers) > 1:
            await self._list_models(asked, send)
            return
        await self._read(asked)
        await self._pass(asked, send)

    def _check_ready(self) -> None:
        for model, router in self._fleet.routers.items():
            if not router.names:
                raise _nobody(model)

    async def _read(self, asked: DoorRequest) -> None:
        """The body, and what is to be known of it. Forms are files, and are passed on as they come."""
        media = asked.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        first = next(iter(self._fleet.routers))
        asked.model = first
        if media == b"multipart/form-data":
            asked.again = False
            return
        asked.body = await _read_body(asked.receive, self._settings.limits.body_bytes)
        method, path = asked.scope["method"], asked.scope["path"]
        asked.again = method in ("GET", "HEAD", "DELETE") or path in COMPUTED
        if method != "POST" or not asked.body or len(self._fleet.routers) < 2:
            return
        try:
            named = _read_named(asked.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            # What is wrong with it, a replica says.
            return
        asked.again = asked.again and named.conversation is None
        if isinstance(named.model, str) and named.model:
            asked.model = self._find(named.model)

    def _find(self, name: str) -> str:
        if name in self._fleet.routers:
            return name
        if self._settings.any_model:
            return next(iter(self._fleet.routers))
        known = ", ".join(self._fleet.routers)
        raise ModelNotFound(f"There is no model '{name[:128]}' here; there is: {known}.", param="model")

    # To a replica and back

    async def _pass(self, asked: DoorRequest, send: Send) -> None:
        router = self._fleet.routers[asked.model]
        hints = {name.decode("latin-1"): value.decode("latin-1") for name, value in asked.headers.items()}
        key = key_of_body(asked.body or b"", hints, asked.owner)
        tried: set[str] = set()
        while beat := self._next(router, key, tried):
            tried.add(beat.id)
            router.begin(key, beat.id)
            try:
                passage = await self._asked(asked, beat)
                if passage is None:
                    continue
                if passage.status == 503 and asked.again and self._next(router, key, tried):
                    # It is stopping, or has too much to do.
                    passage.close()
                    continue
                await self._pass_back(asked, beat, passage, send)
                return
            finally:
                router.end(beat.id)
        raise _nobody(asked.model)

    def _next(self, router: Router, key: RoutingKey, tried: set[str]) -> ReplicaBeat | None:
        for id_ in router.rank(key, tried):
            if id_ not in tried and (beat := self._fleet.place(id_)) is not None:
                return beat
        return None

    async def _asked(self, asked: DoorRequest, beat: ReplicaBeat) -> Passage | None:
        """A passage with the head of a reply. None: another one may be asked."""
        try:
            passage = await self._fleet.open(beat)
        except (OSError, TimeoutError):
            self._fleet.lose(beat.id)
            return None
        try:
            if asked.body is None:
                await _send_on(passage, _head(asked, beat, chunked=True), asked.receive)
            else:
                passage.ask(_head(asked, beat), asked.body)
            if await _unless_gone(asked.receive, passage):
                return passage
        except BaseException:
            passage.close()
            raise
        self._fleet.lose(beat.id)
        if not asked.again:
            raise _died()
        return None

    async def _pass_back(self, asked: DoorRequest, beat: ReplicaBeat, passage: Passage, send: Send) -> None:
        headers = [(name, value) for name, value in passage.headers if name not in HOP]
        sizes = [(name, value) for name, value in passage.headers if name == b"content-length"]
        kind = next((value for name, value in headers if name == b"content-type"), b"")
        ending = STREAMS.get(kind.partition(b";")[0].strip())
        told = [*headers, *sizes, (TOLD, beat.id.encode())]
        await send({"type": "http.response.start", "status": passage.status, "headers": told})
        reply = StreamedReply(passage, send, ending)
        watcher = asyncio.ensure_future(_gone(asked.receive))
        try:
            await asyncio.wait({reply.done, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if not reply.done.done():
                passage.close()
                return
            reply.done.result()
        except OSError:
            # The client does not take it.
            passage.close()
            return
        except BaseException:
            # Serve ends the task of a request whose client has left.
            passage.close()
            raise
        finally:
            watcher.cancel()
            reply.close()
        await self._end(asked, beat, passage, send, ending)

    async def _end(
        self, asked: DoorRequest, beat: ReplicaBeat, passage: Passage, send: Send, ending: bytes | None
    ) -> None:
        last = b""
        if passage.broken:
            self._fleet.lose(beat.id)
            logger.warning("A replica was lost under a reply: %s", beat.id)
            if ending is None:
                # Broken off: to end it would say that this is all.
                raise ConnectionResetError("the replica is gone")
            self.told_breaks += 1
            last = errors_at(asked.scope["path"], asked.headers).event(_died())
        else:
            self._fleet.rest(beat.id, passage)
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _list_models(self, asked: DoorRequest, send: Send) -> None:
        """Those of all deployments, each as one of its replicas tells it."""
        asked.body, listed = b"", list[Any]()
        for model, router in self._fleet.routers.items():
            tried: set[str] = set()
            while beat := self._next(router, RoutingKey(), tried):
                tried.add(beat.id)
                passage = await self._asked(asked, beat)
                if passage is None:
                    continue
                data = await passage.whole()
                if passage.status != 200:
                    raise Unavailable(f"The model '{model}' does not say what it is.")
                listed += _read_list(data).get("data", [])
                self._fleet.rest(beat.id, passage)
                break
        await _reply(send, 200, {"object": "list", "data": listed})


def _head(asked: DoorRequest, beat: ReplicaBeat, *, chunked: bool = False) -> bytes:
    scope = asked.scope
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    target = raw + (b"?" + scope["query_string"] if scope.get("query_string") else b"")
    lines = [b"%b %b HTTP/1.1" % (scope["method"].encode(), target)]
    lines.append(b"host: %b" % f"{beat.host}:{beat.port}".encode())
    lines += [b"%b: %b" % (name, value) for name, value in scope["headers"] if name.lower() not in HOP]
    if chunked:
        lines.append(b"transfer-encoding: chunked")
    elif asked.body or scope["method"] in ("POST", "PUT", "PATCH"):
        lines.append(b"content-length: %d" % len(asked.body or b""))
    return b"\r\n".join(lines) + b"\r\n\r\n"


async def _read_body(receive: Receive, most: int) -> bytes:
    pieces, size = list[bytes](), 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise BadRequest("The body broke off.")
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
        if size > most:
            raise BodyTooLarge(f"The body has more than {most} bytes, which is the most that is taken here.")
        if not message.get("more_body"):
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)


async def _send_on(passage: Passage, head: bytes, receive: Receive) -> None:
    passage.ask(head)
    while passage.is_open:
        message = await receive()
        if message["type"] == "http.disconnect":
            passage.close()
            return
        if piece := message.get("body", b""):
            passage.send_more(piece)
        if not message.get("more_body"):
            passage.send_more(b"")
            return


async def _unless_gone(receive: Receive, passage: Passage) -> bool:
    """Whether the replica answers; a client that leaves meanwhile ends it."""
    answer = asyncio.ensure_future(passage.answered())
    watcher = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({answer, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise BadRequest("The client left.")
        return answer.result()
    finally:
        answer.cancel()
        watcher.cancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _reply(send: Send, status: int, body: Any, more: Mapping[bytes, bytes] | None = None) -> None:
    data = msgspec.json.encode(body)
    headers = {b"content-type": b"application/json", b"content-length": b"%d" % len(data), **(more or {})}
    start: Message = {"type": "http.response.start", "status": status, "headers": list(headers.items())}
    await send(start)
    await send({"type": "http.response.body", "body": data, "more_body": False})


def _nobody(model: str) -> Unavailable:
    return Unavailable(f"No replica of the model '{model}' is there now; try again.", code="no_replica")


def _died() -> EngineFailed:
    return EngineFailed("The replica that made this answer is gone; ask again.", code="replica_lost")
