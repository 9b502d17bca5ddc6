"""What all routes share: models, store and limits; a view of one model for its requests; and the router."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

from dragoman.api.batches import LineRequest, OpenAILineCodec
from dragoman.api.chat.body_cache import BodyCache
from dragoman.api.chat.request import ChatRequest
from dragoman.api.messages.batches import MessagesLineCodec
from dragoman.api.shared_fields import TurnSpecCache
from dragoman.batches.manager import AnswerLine, BatchManager
from dragoman.engines.protocol import Engine
from dragoman.errors import DragomanError, Forbidden
from dragoman.http.admission import (
    Admission,
    ByteBudget,
    LiveModel,
    ReplyBudget,
    RequestKind,
    RequestRecorder,
)
from dragoman.http.attachments import AttachmentResolver
from dragoman.http.connection.limiter import ConnectionLimiter, room
from dragoman.http.connection.websocket import FrameScheduler
from dragoman.http.exchange import Exchange, cancel_on_disconnect
from dragoman.http.keys import ApiKeys
from dragoman.http.run_turn import FlushScheduler
from dragoman.http.token_budgets import TokenBudgets
from dragoman.mcp.config import make_mcp_servers
from dragoman.media.fetch import MediaFetcher
from dragoman.models import ModelPool, PooledModel
from dragoman.models.loaded import LoadedModel
from dragoman.responses.manager import ResponseManager
from dragoman.settings import Settings
from dragoman.store import kept_folder, make_file_store
from dragoman.tracing import open_tracing
from dragoman.turns.queue import WorkerPool

logger = logging.getLogger("dragoman.http")

R = TypeVar("R")
WAITING_LINES = 8
"""Batch lines that are prepared ahead of free engine capacity."""
MOST_LINES = 256
"""Maximum number of concurrent batch lines, whatever the engine's capacity."""
FIRST_COMMENT_S = 1.0
"""Seconds after which a stream begins with a comment that the model is loading; an earlier failure has a
status."""


class AppState:
    def __init__(
        self,
        engines: Engine | Mapping[str, Engine] | ModelPool,
        settings: Settings,
        template: str | None = None,
    ) -> None:
        self.settings = settings
        self.limits = settings.limits
        self.flush_scheduler = FlushScheduler(settings.write_interval)
        self.tracing = open_tracing(settings)
        self.recorder = RequestRecorder(self.tracing)
        self.workers = WorkerPool()
        self.keys = ApiKeys(settings)
        self.keys.on_change = self._take_keys
        self.budgets = TokenBudgets(self.keys.get, kept_folder(settings))
        keys = len(self.keys)
        self.admission = Admission(settings, self.recorder.metrics, self.workers, keys=keys)
        self._set_meter()
        self.pool = ModelPool.of(engines, settings)
        self.pool.attach(self.workers, self.admission, template)
        self.connections = ConnectionLimiter(room(self.limits.connections), keys)
        self.bodies = ByteBudget(self.limits.bodies_bytes, keys, "Request bodies")
        self.body_cache, self.spec_cache = BodyCache(), TurnSpecCache(ChatRequest, "messages")
        self.replies = ReplyBudget(self.limits.replies_bytes, keys)
        self.frame_scheduler = FrameScheduler()
        self.looking_at_template = asyncio.Semaphore(1)
        self.files = make_file_store(settings)
        fetcher = MediaFetcher(settings.allow_media_host)
        self.documents = AttachmentResolver(self.files, self.limits, fetcher, self.sees)
        self.answer_line: AnswerLine
        """Answers a line of a batch as a request of its owner; set by the app."""
        self.batches = BatchManager(
            self.files,
            {"openai": OpenAILineCodec(), "anthropic": MessagesLineCodec()},
            lambda owner, asked: self.answer_line(owner, asked),
            self.most_lines,
            self.limits,
            self.pool.check,
        )
        self.mcp = make_mcp_servers(settings)
        self.responses = ResponseManager.of(settings, self.workers, self.mcp)
        self.responses.list_models = lambda: [each.loaded.model for each in self.pool.served if each.loaded]
        self.responses.resubmit, self.responses.has_model = self._ask_again, self._serves
        self.pool.on_change = self._list_live
        self._list_live()

    def _list_live(self) -> None:
        """Update the metrics' list of loaded models."""
        served = [(model.name, model.loaded) for model in self.pool.served]
        self.recorder.metrics.live_models = {
            name: LiveModel(loaded.queue, loaded.engine, loaded.model.planner.adapters)
            for name, loaded in served
            if loaded is not None
        }

    def _take_keys(self) -> None:
        """Apply a change of the number of keys: several share the limits, a single one has all."""
        for each in (self.admission, self.connections, self.bodies, self.replies):
            each.set_key_count(len(self.keys))
        self._set_meter()
        self.budgets.forget(self.keys.get)

    def _set_meter(self) -> None:
        """Count tokens only if a key has a budget."""
        self.admission.set_meter(self.budgets.reserve if self.keys.limited else None)

    def charge(self, owner: str, tokens: int) -> None:
        """Charge tokens to a key's budget for work that is not a turn; raise if too few are left."""
        if self.keys.limited and (settle := self.budgets.reserve(owner, tokens, 0)) is not None:
            settle(tokens)

    def most_lines(self) -> int:
        """Return the maximum number of concurrent batch lines."""
        return min(self.admission.capacity + WAITING_LINES, MOST_LINES)

    # Models for requests.

    async def acquire_model(
        self, name: str | None, exchange: Exchange, *, streams: bool = False
    ) -> "ModelServing":
        """Return the model that a request names, loaded first if needed, and held until the request ends.

        `streams` means that the reply is an event stream, which can report the loading progress.
        """
        pool = self.pool
        model = pool.find(name)
        if model is None or (pool.find_more is not None and name not in model.names):
            model = await pool.find_or_discover(name)
        if exchange.key.models:
            exchange.check_model(name if name in model.names else model.name)
        loaded = pool.try_acquire(model)
        if loaded is None:
            loaded = await self._loaded(model, exchange, streams=streams)
        exchange.release_model, exchange.explain_failure = (
            partial(pool.release, model),
            loaded.explain_failure,
        )
        return self.view(loaded)

    async def sees(self, owner: str, name: str | None) -> bool:
        """Return whether the model that a request names takes images; the model is loaded if needed."""
        try:
            model = await self.pool.find_or_discover(name)
            self.keys.require(owner).check_use(name if name in model.names else model.name)
            if model.loaded is None and self.settings.while_loading != "refuse":
                self.check_may_load(model)
                await self.pool.load(model)
        except DragomanError:
            # Reading the request reports the error.
            return False
        return model.loaded is not None and "image" in model.loaded.card.modalities

    def view(self, loaded: LoadedModel) -> "ModelServing":
        serving: ModelServing | None = loaded.view
        if serving is None:
            serving = loaded.view = ModelServing(self, loaded)
        return serving

    async def _loaded(self, model: PooledModel, exchange: Exchange, *, streams: bool) -> LoadedModel:
        self.check_may_load(model)
        if self.settings.while_loading == "refuse" and not exchange.waits:
            loading = asyncio.ensure_future(self.pool.load(model))
            loading.add_done_callback(lambda done: done.cancelled() or done.exception())
            # An error that is already known is reported instead.
            await asyncio.sleep(0)
            if loading.done():
                loading.result()
            raise model.loading_error()
        holding = asyncio.ensure_future(self.pool.acquire(model))
        try:
            await cancel_on_disconnect(exchange, self._told(model, holding, exchange, streams=streams))
            return holding.result()
        except BaseException:
            if not holding.cancel() and holding.exception() is None:
                self.pool.release(model)
            raise

    async def _told(
        self, model: PooledModel, holding: "asyncio.Future[LoadedModel]", exchange: Exchange, *, streams: bool
    ) -> None:
        """Wait until the model is loaded; a stream reports the progress."""
        pause = min(FIRST_COMMENT_S, self.settings.keep_alive)
        while not (await asyncio.wait({holding}, timeout=pause if streams else None))[0]:
            await exchange.start_stream(b": loading %d%%\n\n" % (100 * model.progress))

    def check_may_load(self, model: PooledModel) -> None:
        """Raise if requests may not load models, unless the model is only asleep."""
        if (
            model.loaded is None
            and model.state in ("unloaded", "failed")
            and not self.settings.models_autoload
        ):
            raise Forbidden(
                f"The model '{model.name}' is not loaded, and requests do not load models on this server; "
                "an admin key can load it with POST /models/load.",
                code="model_not_loaded",
            )

    # Start and stop of the server.

    async def start(self) -> None:
        await asyncio.to_thread(self.budgets.load)
        await self.responses.start()
        await self.files.start()
        await self.batches.start()
        await self.pool.start()
        await self.responses.watch()

    def _serves(self, model: str) -> bool:
        try:
            self.pool.check(model)
        except DragomanError:
            return False
        return True

    async def _ask_again(self, owner: str, body: bytes) -> int:
        return (await self.answer_line(owner, LineRequest("", "/v1/responses", body))).status

    async def stop(self) -> None:
        """Stop everything in order: active requests, then what stores, calls other servers and computes."""
        await self.admission.cancel_all()
        for close in (
            self.batches.stop,
            self.budgets.close,
            self.responses.stop,
            self.files.close,
            self.documents.close,
            self.mcp.close,
            self.workers.close,
        ):
            try:
                await close()
            except Exception:
                logger.exception("Cleanup at shutdown failed")
        await self.pool.stop()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)

    async def check(self) -> None:
        """Raise Unavailable unless all loaded engines make progress."""
        for model in self.pool.served:
            if model.loaded is not None:
                await model.loaded.check()

    def tell_upstreams(self, headers: Mapping[bytes, bytes]) -> dict[str, Any]:
        """Describe the upstreams of remote models. Only administrators see their addresses."""
        engines = [model.loaded.engine for model in self.pool.served if model.loaded is not None]
        upstreams = [each for engine in engines for each in getattr(engine, "describe_upstreams", list)()]
        key = self.keys.authenticate(headers) if self.keys.accepts(headers) else None
        if key is None or (self.keys.key_required and not key.admin):
            upstreams = [{name: each[name] for name in each if name != "url"} for each in upstreams]
        return {"upstreams": upstreams} if upstreams else {}

    async def check_alive(self) -> None:
        """Raise if only a restart of the process can help: an engine is dead for good."""
        for model in self.pool.served:
            if model.loaded is not None:
                await model.loaded.check_alive()


class ModelServing:
    """A host with one of its models, for the requests to that model."""

    def __init__(self, host: AppState, loaded: LoadedModel) -> None:
        self.settings, self.limits = host.settings, host.limits
        self.pump, self.workers, self.mcp, self.desk = (
            host.flush_scheduler,
            host.workers,
            host.mcp,
            host.responses,
        )
        self.journal, self.charge = host.recorder, host.charge
        self.loaded = loaded
        self.model, self.engine, self.card = loaded.model, loaded.engine, loaded.card
        self.pause_control, self.adapters = loaded.pause_control, loaded.adapters

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the model and its adapters; it changes whenever answers may."""
        return "-".join(filter(None, (self.loaded.fingerprint, self.model.planner.adapters.fingerprint)))

    async def run_on_engine(self, owner: str, work: Callable[[], Awaitable[R]]) -> R:
        """Run engine work that is not a turn; it waits in the queue like one."""
        return await self.loaded.run_on_engine(owner, work)


# The router.


Handler: TypeAlias = Callable[[AppState, Exchange], Awaitable[None]]
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})


class Endpoint:
    """A handler as an ASGI app, which Starlette routes call without wrapping the request."""

    def __init__(self, host: AppState, path: str, handler: Handler, kind: RequestKind | None) -> None:
        """Create an endpoint; without a kind, its requests are always admitted."""
        self.path = path
        self._host = host
        self._handler = handler
        self._kind = kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope["dragoman.exchange"]
        exchange.low_priority = self._kind != "asks"
        if self._kind is None:
            await self._handler(self._host, exchange)
            return
        self._host.pool.check_started()
        exchange.head |= self._host.admission.rate_limit_headers(exchange.owner, self._kind)
        if self._host.keys.limited and self._kind == "asks" and exchange.key.is_limited:
            exchange.head |= self._host.budgets.rates(exchange.key)
            self._host.budgets.check(exchange.key)
        with self._host.admission.admit(exchange.owner, self._kind) as exchange.active:
            await self._handler(self._host, exchange)


class Routes:
    """Finds routes; of several that match, the first in order is used."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._all = routes
        self.paths = [route.path for route in routes]
        self._plain = dict(self._list_plain())
        """Routes without path parameters by method and path; they are requested most."""

    def _list_plain(self) -> Iterator[tuple[tuple[str, str], Route]]:
        for path in self.paths:
            for method in METHODS if "{" not in path else ():
                route, _ = self._search({"type": "http", "method": method, "path": path})
                if route is not None and route.path == path:
                    yield (method, path), route

    def at(self, scope: Scope) -> tuple[Route | None, set[str]]:
        """Return the route with exactly this path, or the methods of the routes that have it."""
        plain = self._plain.get((scope["method"], scope["path"]))
        if plain is None or scope.get("root_path"):
            return self._search(scope)
        scope["endpoint"], scope["path_params"] = plain.endpoint, {}
        return plain, set()

    def _search(self, scope: Scope) -> tuple[Route | None, set[str]]:
        methods: set[str] = set()
        for route in self._all:
            match, fields = route.matches(scope)
            if match == Match.FULL:
                scope.update(fields)
                return route, methods
            if match == Match.PARTIAL:
                methods |= route.methods or set()
        return None, methods

    def name(self, scope: Scope) -> str:
        """Return the declared path of a request, never the path that a client sent."""
        if isinstance(value := scope.get("endpoint"), Endpoint):
            return value.path
        # The request was rejected before routing.
        partly = []
        for route in self._all:
            match, _ = route.matches(scope)
            if match == Match.FULL:
                return route.path
            if match == Match.PARTIAL:
                # The path matches with another method; a later route may match fully.
                partly.append(route.path)
        return partly[0] if partly else "other"
