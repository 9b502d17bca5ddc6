"""The ASGI app: routes, and around them request ids, authentication, errors, access log and metrics."""

import asyncio
import logging
import re
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from dragoman import logs
from dragoman._version import __version__
from dragoman.api.batches import LineReply, LineRequest
from dragoman.api.messages.reply import HEADER, spell_head
from dragoman.engines.protocol import Engine
from dragoman.errors import DragomanError, EngineFailed, MethodNotAllowed, NotFound
from dragoman.http.admission import ActiveRequest, ByteBudget, ReplyBudget, RequestKind, RequestLimiter
from dragoman.http.app_state import METHODS, AppState, Endpoint, Handler, Routes
from dragoman.http.connection.limiter import CountedConnection
from dragoman.http.exchange import NOTICE_FIELDS, Exchange, QueryString, retry_headers
from dragoman.http.keys import ForwardedHeaders, OriginPolicy, is_known_here, preflight
from dragoman.http.metrics import CONTENT_TYPE, Exposition
from dragoman.http.operations import QUIET, OperationsReport
from dragoman.http.routes import table
from dragoman.http.routes.responses_socket import ResponsesSocket
from dragoman.http.routes.table import BOARD, METRICS, OPEN_PATHS, SOCKET, Api, errors_at
from dragoman.http.upkeep import StallWatch
from dragoman.models import ModelPool
from dragoman.settings import Settings
from dragoman.tracing import SESSION, Telemetry, current, session, traced
from dragoman.turns.tool_loop import ClientGone

logger = logging.getLogger("dragoman.http")

ALLOWED = b"access-control-allow-origin"
PARENT = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
"""A W3C `traceparent` header."""
UNTRACED = frozenset({"/health", "/healthz", "/ping", "/ready", METRICS})
"""Paths without traces, because probes and scrapers request them all the time."""
LINES, LINE_BYTES = 2**31, 2**62
"""Limits for batch lines, practically unlimited: the batch worker bounds their number and size."""


class App:
    """The ASGI app for any server or test: `App(engine)`, or `App({"name": engine})` for several models."""

    def __init__(
        self,
        engine: Engine | Mapping[str, Engine] | ModelPool,
        settings: Settings | None = None,
        *,
        template: str | None = None,
    ) -> None:
        self.settings = settings or Settings()
        self.host = AppState(engine, self.settings, template)
        self.host.answer_line = self._answer_line
        self._line_room = RequestLimiter(LINES, LINES, lambda: 1.0)
        self._line_bytes = ByteBudget(LINE_BYTES, 0, "Lines"), ReplyBudget(LINE_BYTES, 0)
        self._guard = OriginPolicy(self.settings)
        self._forwarded = ForwardedHeaders(self.settings) or None
        self._root = self.settings.root_path
        self._keys = self.host.keys
        meter = None if self.host.tracing is None else self.host.tracing.meter
        vllm = self.settings.metrics_names == "vllm"
        self._exposition = Exposition(self.host.recorder.metrics, meter, vllm=vllm)
        self._operations = OperationsReport(self.host)
        self._open = OPEN_PATHS | ({METRICS, BOARD} if self.settings.metrics == "open" else set())
        self._routes = Routes([*self._api_routes(table.APIS), *self._own_routes()])

    def _api_routes(self, apis: Sequence[Api]) -> Iterator[Route]:
        # Generating routes come first, because they are looked up most often.
        for api in apis:
            yield from self._some("POST", api.computed, "asks")
        for api in apis:
            yield from self._some("POST", api.post, "looks")
            yield from self._some("POST", api.forms, "sends")
            yield from self._some("POST", api.uncounted)
            yield from self._some("GET", api.get)
            yield from self._some("DELETE", api.delete)

    def _some(
        self, method: str, handlers: Mapping[str, Handler], kind: RequestKind | None = None
    ) -> Iterator[Route]:
        for path, handler in handlers.items():
            endpoint = Endpoint(self.host, path, handler, kind)
            yield Route(path, endpoint, methods=[method])

    def _own_routes(self) -> Iterator[Route]:
        own: dict[str, Handler] = {
            "/health": self._health,
            "/healthz": self._health,
            "/ping": self._health,
            "/ready": self._ready,
            **({} if self.settings.metrics == "off" else {METRICS: self._metrics, BOARD: self._tell}),
            "/version": self._version,
        }
        return self._some("GET", own)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._root and scope["type"] != "lifespan":
            _strip_root(scope, self._root)
        if self._forwarded is not None and scope["type"] != "lifespan":
            self._forwarded.apply(scope)
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        else:
            await self._websocket(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = asyncio.get_running_loop().time()
        host, settings = self.host, self.settings
        rest = host.workers, host.bodies, host.replies, settings.unknown_fields
        exchange = Exchange(scope, receive, send, settings.limits, *rest)
        exchange.resolve_attachments = host.documents.fill
        if HEADER in exchange.headers or exchange.path.startswith(table.MESSAGES.path):
            exchange.also = lambda head: spell_head(head, time.time())
        if self.host.admission.draining:
            exchange.head[b"connection"] = b"close"
        scope["dragoman.exchange"] = exchange
        fields = {"request_id": exchange.request_id}
        if host.tracing is not None and exchange.path not in UNTRACED:
            logs.log_context.set(fields)
            await self._traced(exchange, began, host.tracing)
            return
        if match := PARENT.fullmatch(exchange.headers.get(b"traceparent", b"")):
            # Without tracing, the log still has the client's trace id.
            fields["trace_id"] = match[1].decode()
        logs.log_context.set(fields)
        await self._served(exchange, began)

    async def _served(self, exchange: Exchange, began: float) -> None:
        self.host.recorder.metrics.in_flight += 1
        try:
            await self._run_guarded(exchange, self._handle(exchange))
        finally:
            exchange.close()
            self.host.recorder.metrics.in_flight -= 1
            self._record(exchange, asyncio.get_running_loop().time() - began)
            # Break the reference cycle, which would keep the body until a garbage collection.
            del exchange.scope["dragoman.exchange"]

    async def _traced(self, exchange: Exchange, began: float, tracing: Telemetry) -> None:
        trace = tracing.begin(exchange.method, exchange.headers)
        exchange.head[b"traceresponse"] = trace.response
        try:
            with tracing.use_trace(trace):
                await self._served(exchange, began)
        finally:
            route = self._routes.name(exchange.scope)
            trace.span.update_name(f"{_method(exchange)} {route}" if route != "other" else _method(exchange))
            trace.end({"status": exchange.status, **exchange.log_fields}, _describe_request(exchange, route))

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        headers = dict(scope["headers"])
        session.set(headers.get(SESSION, b"").decode("latin-1"))
        try:
            self._guard.check(scope, headers)
            owner = self._keys.authenticate(headers).sha256
            if SOCKET not in (scope["path"], *table.path_variants(scope["path"])):
                raise NotFound(f"There is no WebSocket at {_loggable(scope['path'])}; use {SOCKET}.")
            if connection := _connection(scope):
                connection.set_owner(owner)
                connection.open_socket()
        except DragomanError as error:
            await _refuse(scope, send, error)
            return
        scope["dragoman.owner"] = owner
        if self.host.tracing is not None:
            current.set(self.host.tracing.remote(headers))
        await send({"type": "websocket.accept"})
        await ResponsesSocket(self.host, owner, receive, send).serve()

    async def _answer_line(self, owner: str, asked: LineRequest) -> LineReply:
        """Answer a line of a batch, as a request of its owner without a connection."""
        host, loop = self.host, asyncio.get_running_loop()
        began, caught = loop.time(), _InProcessClient(asked.body)
        scope = {"type": "http", "method": "POST", "path": asked.url, "headers": [], "query_string": b""}
        rest = self.settings.limits, host.workers, *self._line_bytes, self.settings.unknown_fields
        exchange = Exchange(scope, caught.receive, caught.send, *rest)
        exchange.owner, exchange.resolve_attachments, exchange.waits = owner, host.documents.fill, True

        async def work() -> None:
            exchange.key = host.keys.require(owner)
            with ActiveRequest(host.admission, self._line_room, owner) as exchange.active:
                await table.POST[asked.url](host, exchange)

        host.recorder.metrics.in_flight += 1
        facts: dict[str, Any] = {"method": "BATCH", "path": asked.url, "request_id": exchange.request_id}
        with traced(host.tracing, f"BATCH {asked.url}", facts):
            try:
                await self._run_guarded(exchange, work())
            finally:
                exchange.close()
                host.recorder.metrics.in_flight -= 1
                facts |= {"status": exchange.status, **exchange.log_fields}
            host.recorder.record(asked.url, facts, loop.time() - began)
        return LineReply(exchange.status, exchange.request_id, caught.body, caught.told)

    async def _handle(self, exchange: Exchange) -> None:
        if await self._admits(exchange):
            await self._dispatch(exchange)

    async def _run_guarded(self, exchange: Exchange, work: Coroutine[Any, Any, None]) -> None:
        """Run the work, and turn errors into replies."""
        try:
            await work
        except ClientGone:
            exchange.log_fields["finish"] = "disconnect"
        except EngineFailed as error:
            begun = exchange.log_fields.get("completion_tokens")
            await _fail(
                exchange,
                error if begun or exchange.explain_failure is None else await exchange.explain_failure(error),
            )
        except DragomanError as error:
            await _fail(exchange, error)
        except Exception:
            # The text of an unexpected exception stays in the log: it may contain paths, prompts or keys.
            logger.exception("Request failed: %s %s", exchange.method, exchange.request_id)
            failed = DragomanError("The server failed; see its log.", code="internal_error")
            await _fail(exchange, failed)

    async def _admits(self, exchange: Exchange) -> bool:
        """Return whether the request continues to a route. Raise if it is not allowed."""
        try:
            exchange.head |= self._guard.check(exchange.scope, exchange.headers)
        except DragomanError:
            # Bytes that follow a rejected request are not trusted, whichever client or proxy sent them.
            exchange.head[b"connection"] = b"close"
            raise
        asked = preflight(exchange.method, exchange.headers)
        if asked is not None and ALLOWED in exchange.head:
            await exchange.reply(b"", b"text/plain", extra=asked)
            return False
        if not (exchange.method in ("GET", "HEAD") and _sent_path(exchange.scope) in self._open):
            exchange.key = self._keys.authenticate(exchange.headers)
            exchange.owner = exchange.key.sha256
            if connection := _connection(exchange.scope):
                connection.set_owner(exchange.owner)
        if self._keys:
            exchange.head[b"cache-control"] = b"no-store"
        return True

    async def _dispatch(self, exchange: Exchange) -> None:
        route = self._find(exchange.scope, exchange.path)
        if exchange.method == "POST":
            self._check_media(exchange, route.path)
        await route.app(exchange.scope, exchange.receive, exchange.send)

    def _check_media(self, exchange: Exchange, path: str) -> None:
        if path in table.FORMS:
            exchange.check_form()
        else:
            exchange.check_media(any_type=path in table.ANY_MEDIA)

    def _find(self, scope: Scope, sent: str) -> Route:
        """Return the route, and set the path to the declared one, however the client wrote it.

        This is not a redirect, which would be built from the Host header that a client chooses.
        """
        if not sent.isprintable():
            raise NotFound("Unknown path; see /docs.", code="unknown_path")
        route, methods = self._routes.at(scope)
        if route is None and methods:
            message = f"{_loggable(sent)} does not support {scope['method']}; see /docs."
            raise MethodNotAllowed(message, allowed=sorted(methods))
        for path in () if route else table.path_variants(sent):
            scope["path"] = path
            route, _ = self._routes.at(scope)
            if route is not None:
                break
        if route is not None and (scope["path"] == sent or route.path not in table.UNCOUNTED):
            return route
        meant = route.path if route else table.nearest_path(sent, self._routes.paths)
        scope["path"] = sent
        raise _unknown_path(sent, meant)

    def _record(self, exchange: Exchange, seconds: float) -> None:
        facts = {
            "method": exchange.method,
            "path": _loggable(exchange.path),
            "status": exchange.status,
            "request_id": exchange.request_id,
            **_client_told(exchange.scope),
            **exchange.log_fields,
        }
        self.host.recorder.record(self._routes.name(exchange.scope), facts, seconds)
        if facts["path"] not in QUIET:
            self._operations.lately.append((exchange.owner, facts, seconds))

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        try:
            await self.host.start()
        except Exception as error:
            if isinstance(error, DragomanError):
                # The message has the remedy; a traceback would not help.
                logger.error("Server did not start: %s", error.message)
            else:
                logger.exception("Engine did not start")
            # Stop what has started.
            await self.host.stop()
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        await send({"type": "lifespan.startup.complete"})
        watch = StallWatch()
        await receive()
        watch.close()
        await self.host.stop()
        await send({"type": "lifespan.shutdown.complete"})

    async def _health(self, host: AppState, exchange: Exchange) -> None:
        if (first := host.pool.startup_model) is not None:
            # Same as llama-server.
            loading = {"status": "loading model", "progress": round(first.progress, 3)}
            await exchange.json(loading, 503, retry_headers(first.loading_error()))
            return
        await host.check_alive()
        await exchange.json({"status": "ok", **host.tell_upstreams(exchange.headers)})

    async def _ready(self, host: AppState, exchange: Exchange) -> None:
        host.admission.check()
        host.pool.check_started()
        await host.check()
        # Only clients that may use the model see its name.
        name, keys = host.pool.default.name, self._keys
        may_know = keys.accepts(exchange.headers) and keys.authenticate(exchange.headers).may_use(name)
        await exchange.json({"status": "ready", **({"model": name} if may_know else {})})

    async def _tell(self, host: AppState, exchange: Exchange) -> None:
        asked = QueryString(exchange).text("request_id")
        await exchange.json(self._operations.tell(exchange.headers, asked))

    async def _metrics(self, host: AppState, exchange: Exchange) -> None:
        await exchange.reply(self._exposition.write(), CONTENT_TYPE)

    async def _version(self, host: AppState, exchange: Exchange) -> None:
        await exchange.json({"version": __version__})


class _InProcessClient:
    """Stands in for a client that sends one body and stays connected; keeps the reply."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self._parts: list[bytes] = []
        self.told: dict[str, str] = {}

    @property
    def body(self) -> bytes:
        return b"".join(self._parts)

    async def receive(self) -> Message:
        if self._body is None:
            await asyncio.get_running_loop().create_future()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.body":
            self._parts.append(message["body"])
        else:
            names = {b"x-dragoman-" + name.encode() for name in NOTICE_FIELDS}
            headers = [(name, value) for name, value in message["headers"] if name in names]
            self.told = {name.decode(): value.decode() for name, value in headers}


def _method(exchange: Exchange) -> str:
    """Return the method, or HTTP for one that a client made up."""
    return exchange.method if exchange.method in METHODS else "HTTP"


def _describe_request(exchange: Exchange, route: str) -> dict[str, Any]:
    """Return the attributes of OpenTelemetry's HTTP conventions."""
    scope, headers = exchange.scope, exchange.headers
    client, server = scope.get("client") or ("", 0), scope.get("server") or ("", 0)
    fields = {
        "http.request.method": exchange.method if exchange.method in METHODS else "_OTHER",
        "http.route": "" if route == "other" else route,
        "http.response.status_code": exchange.status,
        "url.path": _loggable(exchange.path),
        "url.scheme": scope.get("scheme", "http"),
        "network.protocol.version": scope.get("http_version", ""),
        "client.address": client[0],
        "server.address": server[0],
        "server.port": server[1],
        "user_agent.original": headers.get(b"user-agent", b"").decode("latin-1")[:200],
        "http.request.body.size": exchange.body_bytes,
        "dragoman.request_id": exchange.request_id,
    }
    return {name: value for name, value in fields.items() if value}


def _connection(scope: Scope) -> CountedConnection | None:
    """Return the connection, if this package's own server runs the app."""
    connection: CountedConnection | None = scope.get("dragoman.connection")
    return connection


def _sent_path(scope: Scope) -> str:
    """Return the path as it was sent, which no other part of the request can change."""
    raw: bytes | None = scope.get("raw_path")
    return str(scope["path"]) if raw is None else raw.decode("latin-1")


def _strip_root(scope: Scope, root: str) -> None:
    """Remove the prefix of a proxy, which may already have removed it."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    # A path written in another way is not what the proxy allows.
    if raw == root.encode() or raw.startswith(f"{root}/".encode()):
        scope["path"] = scope["path"][len(root) :] or "/"
        scope["raw_path"] = raw[len(root) :] or b"/"


def _client_told(scope: Scope) -> dict[str, str]:
    """Return the client's address, if it is another machine."""
    client = scope.get("client")
    return {} if client is None or is_known_here(client[0]) else {"client": client[0]}


def _unknown_path(sent: str, meant: str | None) -> NotFound:
    remedy = f"did you mean {meant}?" if meant else "see /docs."
    return NotFound(f"Unknown path {_loggable(sent)}; {remedy}", code="unknown_path")


async def _fail(exchange: Exchange, error: DragomanError) -> None:
    await exchange.fail(exchange.key.redact_error(error), errors_at(exchange.scope["path"], exchange.headers))


async def _refuse(scope: Scope, send: Send, error: DragomanError) -> None:
    """Reject a handshake with an HTTP reply, if the server supports that."""
    if "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": 1008})
        return
    body = msgspec.json.encode(errors_at(scope["path"]).body(error))
    headers = [(b"content-type", b"application/json"), *retry_headers(error).items()]
    await send({"type": "websocket.http.response.start", "status": error.status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": body})


def _loggable(path: str) -> str:
    """Return a path as one line of text, whatever a client put into it."""
    return path[:200] if path.isprintable() else ascii(path[:200])
