"""What all routes share: the engine and everything derived from it once."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from dragoman._version import __version__
from dragoman.api.batches import OpenAILines
from dragoman.api.chat.known_bodies import KnownBodies
from dragoman.api.messages.batches import MessageLines
from dragoman.api.shared_fields import read_presets
from dragoman.batches.desk import AnswerLine, BatchDesk
from dragoman.engines.asked import Brake, ask_engine, close_engine
from dragoman.engines.protocol import Engine, LivingEngine
from dragoman.engines.sound import as_engine
from dragoman.errors import DragomanError, EngineFailed, Unavailable
from dragoman.http.admission import PLACES_PER_SLOT, Admission, Budget, Journal, LiveModel, Replies
from dragoman.http.connection.limiter import ConnectionLimiter, room
from dragoman.http.connection.upgrade import Turnstile
from dragoman.http.documents import Documents
from dragoman.http.keys import Keys
from dragoman.http.run_turn import Pump
from dragoman.http.token_budgets import TokenBudgets
from dragoman.mcp.config import servers_of
from dragoman.responses.desk import Desk
from dragoman.settings import Settings
from dragoman.store import kept_folder, shelf_of
from dragoman.tracing import open_tracing
from dragoman.turns.adapters import AdapterChanges
from dragoman.turns.queue import EngineQueue, Workers
from dragoman.turns.turn import ServedModel

logger = logging.getLogger("dragoman.http")

CHECK_TIMEOUT_S = 5.0
STOP_TIMEOUT_S = 30.0
ALIVE_TIMEOUT_S = 0.5
"""A dead engine says so at once; one that is busy is alive."""

R = TypeVar("R")
WAITING_LINES = 8
"""Lines of batches that are ready when a place comes free."""
MOST_LINES = 256
"""That are at work at the same time, however many answers an engine takes."""


def check_model(model: ServedModel, name: str) -> None:
    """Raises if there is no model of this name."""
    model.planner.adapter(name)


class Host:
    def __init__(self, engine: Engine, settings: Settings, template: str | None = None) -> None:
        self.engine = engine = as_engine(engine)
        self.settings = settings
        self.limits = settings.limits
        self.card = engine.card
        self.pump = Pump()
        self.tracing = open_tracing(settings)
        self.journal = Journal(self.tracing)
        self.workers = Workers()
        self.keys = Keys(settings)
        self.keys.on_change = self._take_keys
        self.budgets = TokenBudgets(self.keys.get, kept_folder(settings))
        card, metrics = self.card, self.journal.metrics
        keys = len(self.keys)
        self.admission = Admission(
            settings, card.slots, metrics, self.workers, keys=keys, makes_way=card.makes_way
        )
        self._set_meter()
        presets = read_presets(settings)
        self.model = ServedModel(engine, settings, self.workers, self.admission.queue, presets, template)
        self.connections = ConnectionLimiter(room(self.limits.connections), keys)
        self.bodies = Budget(self.limits.bodies_bytes, keys, "The bodies of requests")
        self.known_bodies = KnownBodies()
        self.replies = Replies(self.limits.replies_bytes, keys)
        self.turnstile = Turnstile()
        self.looking_at_template = asyncio.Semaphore(1)
        self.files = shelf_of(settings)
        self.documents = Documents(self.files, self.limits)
        self.answer_line: AnswerLine
        """Answers a line of a batch, as a request of its owner; the app's to say."""
        self.batches = BatchDesk(
            self.files,
            {"openai": OpenAILines(), "anthropic": MessageLines()},
            lambda owner, asked: self.answer_line(owner, asked),
            self.most_lines,
            self.limits,
            lambda name: check_model(self.model, name),
        )
        places = PLACES_PER_SLOT * (self.card.embeds_at_once or 0)
        self._vectors = EngineQueue(places, 2 * places) if places else self.admission.queue
        self.mcp = servers_of(settings)
        self.desk = Desk.of(settings, self.model, self.mcp)
        self.brake = Brake(engine)
        planner = self.model.planner
        metrics.live[card.name] = LiveModel(self.admission.queue, engine, planner.adapters)
        self.adapters = AdapterChanges(engine, planner.adapters, settings, planner.names)
        self._checking: asyncio.Future[None] | None = None
        self.fingerprint = "-".join(filter(None, ("dragoman", __version__, self.card.numerics)))

    def _take_keys(self) -> None:
        """There are more keys now, or fewer: of several each has a share, and one has all."""
        for each in (self.admission, self.connections, self.bodies, self.replies):
            each.share_between(len(self.keys))
        self._set_meter()
        self.budgets.forget(self.keys.get)

    def _set_meter(self) -> None:
        """Where no key has a budget, nothing is counted."""
        self.admission.queue.meter = self.budgets.reserve if self.keys.limited else None

    def charge(self, owner: str, tokens: int) -> None:
        """Takes tokens of a key's budget for what is no turn. Raises where it has not so many left."""
        if self.keys.limited and (settle := self.budgets.reserve(owner, tokens, 0)) is not None:
            settle(tokens)

    def most_lines(self) -> int:
        """Of batches, that are at work at the same time."""
        return min(self.admission.queue.places + WAITING_LINES, MOST_LINES)

    async def computed(self, owner: str, work: Callable[[], Awaitable[R]]) -> R:
        """What the engine makes of something that is no turn; it waits for its place like one."""
        async with self._vectors.place(owner):
            return await work()

    async def start(self) -> None:
        await asyncio.to_thread(self.budgets.load)
        await self.desk.start()
        await self.files.start()
        await self.batches.start()
        if isinstance(self.engine, LivingEngine):
            await ask_engine(self.engine, "start")
        if self.card.constrains:
            # Now, because it would hold up the answers of others later.
            await asyncio.to_thread(self.model.planner.warm_up)

    async def stop(self) -> None:
        """In this order, and all of it: nobody inside, what they stored, whom they called, who computed."""
        await self.admission.end_all()
        for close in (
            self.batches.stop,
            self.budgets.close,
            self.desk.stop,
            self.files.close,
            self.mcp.close,
            self.workers.close,
        ):
            try:
                await close()
            except Exception:
                logger.exception("Something could not be closed")
        await close_engine(self.engine, stuck=False, seconds=STOP_TIMEOUT_S)
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)

    async def check(self, most: float = CHECK_TIMEOUT_S) -> None:
        """Whether the engine moves; raises Unavailable when there is no answer within the time."""
        if not isinstance(self.engine, LivingEngine):
            return
        if self._checking is None or self._checking.done():
            self._checking = asyncio.ensure_future(ask_engine(self.engine, "check"))
        checking = self._checking
        await asyncio.wait({checking}, timeout=most)
        if not checking.done():
            # One that does not even end when it is cancelled is waited for by all who ask after it.
            checking.cancel()
        try:
            if not checking.done() or checking.cancelled():
                raise Unavailable(f"The engine has not moved for {most:.0f} seconds.")
            checking.result()
        except EngineFailed as error:
            # The question was answered well: the answer is no, which probes know as 503.
            raise Unavailable(error.message, code=error.code) from error

    async def cause(self, error: EngineFailed) -> DragomanError:
        """Why an answer failed that had not begun: a dead engine fails all of them, which is a 503."""
        try:
            await self.check_alive()
        except Unavailable as dead:
            return dead
        return error

    async def check_alive(self) -> None:
        """Raises when nothing but another process will help: the engine is dead, and will stay so."""
        try:
            await self.check(ALIVE_TIMEOUT_S)
        except Unavailable as error:
            if error.code == EngineFailed.code:
                raise
