"""The ingress of a fleet: one ASGI app in front of many HTTP servers.

A request is read as far as routing needs: its model, and the conversation that it continues. It is then
passed unchanged to one of the replicas, and so is the reply, without any work per token.

The ingress handles the death of replicas. Before a replica has replied, another one is tried, if that cannot
execute anything twice. Afterwards the client has part of the answer: an event stream ends with an error event
in its API's format, and it is cut only between two events, so that the client can parse it. Any other reply
is aborted, which HTTP shows.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
from msgspec import Struct
from starlette.types import Message, Receive, Scope, Send
from websockets.exceptions import InvalidHandshake

from dragoman.errors import (
    BadRequest,
    DragomanError,
    EngineFailed,
    ModelNotFound,
    NotFound,
    Overloaded,
    RequestTimeout,
    ServerFull,
    Unavailable,
)
from dragoman.http.admission import ByteBudget, ByteReservation
from dragoman.http.exchange import retry_headers
from dragoman.http.keys import ApiKeys
from dragoman.http.metrics import CONTENT_TYPE
from dragoman.http.routes.responses import RESPONSE_HEADER
from dragoman.http.routes.table import APIS, METRICS, OPEN_PATHS, SOCKET, errors_at, path_variants
from dragoman.ray.fleet import Fleet, ProxiedReply, ReplicaConnection, ReplicaHeartbeat
from dragoman.ray.metrics import FleetMetricsCollector
from dragoman.ray.request import (
    HOP,
    IngressRequest,
    forward_form,
    key_of,
    length_of,
    media_of,
    read_body,
    write_head,
)
from dragoman.ray.socket import fail_socket, open_socket, relay_socket
from dragoman.routing import Router, RoutingKey
from dragoman.settings import Settings

logger = logging.getLogger("dragoman.ray")

TOLD = b"x-dragoman-replica"
COMPUTED = frozenset(path for api in APIS for path in api.computed)
"""Routes that leave nothing behind if a replica dies before it replies, so they can be retried."""
HEALTH = frozenset({"/health", "/healthz", "/ping"})
MODELS = frozenset({"/v1/models", "/models"})
RESPONSES = "/v1/responses/"
MOST_INSIDE = 1024
STREAMS = {b"text/event-stream": b"\n\n", b"application/x-ndjson": b"\n"}
"""Content types of replies that can end with an error event, with the end of their events."""


class _NamedFields(Struct):
    model: Any = None
    conversation: Any = None


_read_named = msgspec.json.Decoder(_NamedFields).decode
_read_list = msgspec.json.Decoder(dict[str, Any]).decode


class Ingress:
    """The ingress app. Replicas report to `fleet.hear`. API keys are checked before a body is read."""

    def __init__(self, fleet: Fleet, settings: Settings, most: int = MOST_INSIDE) -> None:
        """`most` limits the concurrent requests."""
        self._fleet = fleet
        self._settings = settings
        self._keys = ApiKeys(settings)
        self._keys.on_change = self._take_keys
        limits = settings.limits
        self._bodies = ByteBudget(limits.bodies_bytes, len(self._keys), "The bodies of requests")
        self._most, self._inside = most, Counter[str]()
        self._figures = FleetMetricsCollector(fleet, vllm=settings.metrics_names == "vllm")
        self._open = OPEN_PATHS | ({METRICS} if settings.metrics == "open" else set())

    def _take_keys(self) -> None:
        self._bodies.set_key_count(len(self._keys))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            for kind in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{kind}.complete"})
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        else:
            await self._websocket(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        try:
            await self._answer(scope, headers, receive, send)
        except DragomanError as error:
            error.clear_frames()
            errors = errors_at(scope["path"], headers)
            await _reply(send, errors.status(error), errors.body(error), retry_headers(error))

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
        is_open = method in ("GET", "HEAD") and path in self._open
        owner = "" if is_open else self._keys.authenticate(headers).sha256
        asked = IngressRequest(scope, receive, dict(headers), owner)
        asked.counts = method == "POST" and path in COMPUTED
        held = self._bodies.reserve(owner)
        with self._admit(asked), held:
            if method == "GET" and path in MODELS and len(self._fleet.routers) > 1:
                await self._list_models(asked, send)
            elif method == "GET" and path == METRICS and not asked.scope["query_string"]:
                await self._tell_figures(send)
            else:
                await self._read(asked, held)
                await self._proxy(asked, send, held)

    @contextmanager
    def _admit(self, asked: IngressRequest) -> Iterator[None]:
        """Admit a request, or reject it before its body is read. No key can take the places of all others."""
        owner, inside = asked.owner, self._inside
        most = self._settings.limits.per_key
        if asked.counts and owner and most is not None and self._fleet.counts.of(owner) >= most:
            raise Overloaded(
                f"This API key already has {most} requests running or queued; retry when one finishes."
            )
        keys = len(inside.keys() | {owner})
        if inside.total() >= self._most and inside[owner] >= max(1, self._most // keys):
            raise ServerFull(f"{self._most} requests are running or queued; retry soon.")
        inside[owner] += 1
        try:
            yield
        finally:
            inside[owner] -= 1
            if not inside[owner]:
                del inside[owner]

    async def _tell_figures(self, send: Send) -> None:
        """Send the metrics of all replicas; those of one replica with `?replica=NAME` come from the replica
        itself.
        """
        if self._settings.metrics == "off":
            raise NotFound("Metrics are turned off on this server.")
        await _reply(send, 200, self._figures.write(), {b"content-type": CONTENT_TYPE})

    def _check_ready(self) -> None:
        for model, router in self._fleet.routers.items():
            if not router.names:
                raise _nobody(model)

    async def _read(self, asked: IngressRequest, held: ByteReservation) -> None:
        """Read the body and find the model. Forms contain files, and are streamed to the replica."""
        method, path = asked.scope["method"], asked.scope["path"]
        asked.model = next(iter(self._fleet.routers))
        if path.startswith(RESPONSES) and (maker := self._fleet.producer(path.split("/")[3])):
            asked.maker, asked.model = maker, maker.model
        elif path == METRICS:
            name = asked.scope["query_string"].decode("latin-1").partition("replica=")[2]
            if (named := self._fleet.replica(name)) is None:
                raise NotFound("There is no replica of this name.")
            asked.maker, asked.model = named, named.model
        if media_of(asked) == b"multipart/form-data":
            asked.retryable = False
            held.resize(length_of(asked))
            return
        limit = self._settings.body_timeout
        try:
            async with asyncio.timeout(limit):
                asked.body = await read_body(asked.receive, self._settings.limits.body_bytes, held)
        except TimeoutError:
            raise RequestTimeout("The body of the request did not arrive in time.") from None
        asked.retryable = method in ("GET", "HEAD", "DELETE") or path in COMPUTED
        if method == "POST" and asked.body:
            self._name(asked)

    def _name(self, asked: IngressRequest) -> None:
        """Find the model that a body names."""
        try:
            named = _read_named(asked.body or b"")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            # The replica reports what is wrong with the body.
            return
        asked.retryable = asked.retryable and named.conversation is None
        if len(self._fleet.routers) > 1 and isinstance(named.model, str) and named.model:
            asked.model = self._find(named.model)

    def _find(self, name: str) -> str:
        if name in self._fleet.routers:
            return name
        if self._settings.any_model:
            return next(iter(self._fleet.routers))
        known = ", ".join(self._fleet.routers)
        raise ModelNotFound(f"There is no model '{name[:128]}' here; available: {known}.", param="model")

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Proxy a WebSocket. Its first message decides where it goes: it names a model and a conversation."""
        await receive()
        headers = dict(scope["headers"])
        try:
            owner = self._keys.authenticate(headers).sha256
            if SOCKET not in (scope["path"], *path_variants(scope["path"])):
                raise NotFound(f"The only WebSocket route is {SOCKET}.")
        except DragomanError as error:
            await send({"type": "websocket.close", "code": 1008, "reason": error.message[:100]})
            return
        await send({"type": "websocket.accept"})
        asked = IngressRequest({**scope, "method": "POST"}, receive, headers, owner)
        held = self._bodies.reserve(owner)
        try:
            # A silent socket counts, too.
            with self._admit(asked), held:
                first = await receive()
                if first["type"] != "websocket.receive":
                    return
                asked.body = (first.get("text") or "").encode() or first.get("bytes") or b""
                held.resize(len(asked.body))
                asked.model = next(iter(self._fleet.routers))
                self._name(asked)
                await self._pass_socket(asked, first, send, held)
        except DragomanError as error:
            await fail_socket(error, send, 1013)

    async def _pass_socket(
        self, asked: IngressRequest, first: Message, send: Send, held: ByteReservation
    ) -> None:
        router, key = self._fleet.routers[asked.model], key_of(asked)
        asked.body = b""
        tried: set[str] = set()
        while beat := self._next(router, key, tried):
            tried.add(beat.id)
            with self._at(router, key, beat, asked):
                try:
                    async with open_socket(asked.scope, beat.host, beat.port) as replica:
                        await relay_socket(replica, first, asked.receive, send, held, _died())
                    return
                except (OSError, TimeoutError, InvalidHandshake):
                    self._fleet.drop(beat.id)
        raise _nobody(asked.model)

    # To a replica and back.

    async def _proxy(self, asked: IngressRequest, send: Send, held: ByteReservation) -> None:
        router, key = self._fleet.routers[asked.model], key_of(asked)
        tried: set[str] = set()
        while beat := self._next(router, key, tried, asked.maker):
            tried.add(beat.id)
            with self._at(router, key, beat, asked):
                passage = await self._asked(asked, beat)
                if passage is None:
                    continue
                if passage.status == 503 and asked.retryable and self._next(router, key, tried):
                    # The replica is stopping, or overloaded.
                    passage.close()
                    continue
                # No other replica will be tried.
                asked.body = b""
                held.release()
                await self._proxy_reply(asked, beat, passage, send)
                return
        raise _nobody(asked.model)

    @contextmanager
    def _at(
        self, router: Router, key: RoutingKey, beat: ReplicaHeartbeat, asked: IngressRequest
    ) -> Iterator[None]:
        """Count the request at the replica inside the block."""
        router.begin(key, beat.id)
        if asked.counts:
            self._fleet.counts.enter(beat.id, asked.owner)
        try:
            yield
        finally:
            router.end(beat.id)
            if asked.counts:
                self._fleet.counts.leave(beat.id, asked.owner)

    def _next(
        self, router: Router, key: RoutingKey, tried: set[str], first: ReplicaHeartbeat | None = None
    ) -> ReplicaHeartbeat | None:
        named = [first.id] if first is not None else []
        for id_ in (*named, *router.rank(key, tried)):
            if id_ not in tried and (beat := self._fleet.replica(id_)) is not None:
                return beat
        return None

    async def _asked(self, asked: IngressRequest, beat: ReplicaHeartbeat) -> ReplicaConnection | None:
        """Send the request and return a connection with the headers of the reply; None if another replica may
        be tried.
        """
        try:
            passage = await self._fleet.open(beat)
        except (OSError, TimeoutError):
            self._fleet.drop(beat.id)
            return None
        try:
            if asked.body is None:
                await forward_form(passage, asked, beat, self._settings.body_timeout)
            else:
                passage.ask(write_head(asked, beat), asked.body)
            if await _unless_gone(asked.receive, passage):
                return passage
        except BaseException:
            passage.close()
            raise
        self._fleet.drop(beat.id)
        if not asked.retryable:
            raise _died()
        return None

    async def _proxy_reply(
        self, asked: IngressRequest, beat: ReplicaHeartbeat, passage: ReplicaConnection, send: Send
    ) -> None:
        headers = [(name, value) for name, value in passage.headers if name not in HOP]
        sizes = [(name, value) for name, value in passage.headers if name == b"content-length"]
        kind = next((value for name, value in headers if name == b"content-type"), b"")
        ending = STREAMS.get(kind.partition(b";")[0].strip())
        items = [*headers, *sizes, (TOLD, beat.id.encode())]
        if text := next((value.decode("latin-1") for name, value in headers if name == RESPONSE_HEADER), ""):
            self._fleet.set_producer(text, beat.id)
            self._fleet.routers[beat.model].remember(text, beat.id, asked.owner)
        await send({"type": "http.response.start", "status": passage.status, "headers": items})
        reply = ProxiedReply(passage, send, ending)
        watcher = asyncio.ensure_future(_gone(asked.receive))
        try:
            await asyncio.wait({reply.done, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if not reply.done.done():
                passage.close()
                return
            reply.done.result()
        except OSError:
            # The client no longer reads.
            passage.close()
            return
        except BaseException:
            # Serve cancels the task of a request whose client has disconnected.
            passage.close()
            raise
        finally:
            watcher.cancel()
            reply.close()
        await self._end(asked, beat, passage, send, ending)

    async def _end(
        self,
        asked: IngressRequest,
        beat: ReplicaHeartbeat,
        passage: ReplicaConnection,
        send: Send,
        ending: bytes | None,
    ) -> None:
        last = b""
        if passage.broken:
            self._fleet.drop(beat.id)
            logger.warning("Replica lost during a reply: %s", beat.id)
            if ending is None:
                # Abort the connection: a normal end would mean that the reply is complete.
                raise ConnectionResetError("the replica is gone")
            self._figures.told_breaks += 1
            last = errors_at(asked.scope["path"], asked.headers).event(_died())
        else:
            self._fleet.return_connection(beat.id, passage)
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _list_models(self, asked: IngressRequest, send: Send) -> None:
        """List the models of all deployments, each as one of its replicas reports it."""
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
                    raise Unavailable(f"The model '{model}' did not list itself; retry.")
                listed += _read_list(data).get("data", [])
                self._fleet.return_connection(beat.id, passage)
                break
        await _reply(send, 200, {"object": "list", "data": listed})


async def _unless_gone(receive: Receive, passage: ReplicaConnection) -> bool:
    """Whether the replica replies; raises if the client disconnects first."""
    answer = asyncio.ensure_future(passage.answered())
    watcher = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({answer, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise BadRequest("The client disconnected.")
        return answer.result()
    finally:
        answer.cancel()
        watcher.cancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _reply(send: Send, status: int, body: Any, more: Mapping[bytes, bytes] | None = None) -> None:
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    headers = {b"content-type": b"application/json", b"content-length": b"%d" % len(data), **(more or {})}
    start: Message = {"type": "http.response.start", "status": status, "headers": list(headers.items())}
    await send(start)
    await send({"type": "http.response.body", "body": data, "more_body": False})


def _nobody(model: str) -> Unavailable:
    return Unavailable(f"No replica of the model '{model}' is available; retry.", code="no_replica")


def _died() -> EngineFailed:
    return EngineFailed("The replica that generated this answer is gone; retry.", code="replica_lost")
