"""What all routes share: the engine and everything derived from it once."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from os import urandom
from typing import TypeVar

from msgspec.structs import replace

from dragoman._version import __version__
from dragoman.api.reply import Head
from dragoman.dialects.declare import Dialect
from dragoman.dialects.registry import with_calls
from dragoman.engines.asked import asked
from dragoman.engines.brake import Brake
from dragoman.engines.protocol import Engine, LivingEngine
from dragoman.engines.sound import check_engine
from dragoman.engines.supervised.opening import closed
from dragoman.errors import DragomanError, EngineFailed, Unavailable
from dragoman.http.admission import PLACES_PER_SLOT, Admission
from dragoman.http.connection.budget import Budget, Replies
from dragoman.http.connection.places import Places, room
from dragoman.http.connection.upgrade import Turnstile
from dragoman.http.journal import Journal
from dragoman.http.keys import keys_of
from dragoman.http.responses.desk import Desk
from dragoman.http.stream import Pump
from dragoman.mcp.config import servers_of
from dragoman.prompt import Prompter
from dragoman.settings import Settings
from dragoman.turns.choose import choose_dialect
from dragoman.turns.defaults import defaults_of
from dragoman.turns.language import Language
from dragoman.turns.line import Line
from dragoman.turns.plan import Planner
from dragoman.turns.spec import TurnSpec
from dragoman.turns.turn import Turn
from dragoman.turns.workers import Workers

logger = logging.getLogger("dragoman.http")

CHECK_TIMEOUT_S = 5.0
STOP_TIMEOUT_S = 30.0
ALIVE_TIMEOUT_S = 0.5
"""A dead engine says so at once; one that is busy is alive."""

R = TypeVar("R")


class Host:
    def __init__(self, engine: Engine, settings: Settings, template: str | None = None) -> None:
        check_engine(engine)
        self.engine = engine
        self.settings = settings
        self.limits = settings.limits
        self.card = engine.card
        tokenizer = engine.tokenizer
        self.found = choose_dialect(settings, self.card, tokenizer, template)
        logger.info("Answers are read as %s: %s", self.found.dialect.name, self.found.how)
        self.language = Language(self.found.dialect, tokenizer)
        self.pieces = self.language.plain
        self.prompter = Prompter(
            self.card,
            tokenizer,
            template=template,
            limits=self.limits,
            dialect=with_calls(self.found.dialect),
        )
        self.planner = Planner(
            self.card,
            tokenizer,
            self.prompter,
            self.found.dialect,
            settings.model_alias,
            self.limits,
            defaults_of(self.card, settings.sampling, exact=settings.trajectories),
        )
        self.pump = Pump()
        self.journal = Journal()
        self.workers = Workers()
        self.admission = Admission(settings, self.card.slots, self.journal.metrics, self.workers)
        keys = len(keys_of(settings))
        self.places = Places(room(self.limits.connections), keys)
        self.bodies = Budget(self.limits.bodies_bytes, keys, "The bodies of requests")
        self.replies = Replies(self.limits.replies_bytes, keys)
        self.turnstile = Turnstile()
        places = PLACES_PER_SLOT * (self.card.embeds_at_once or 0)
        self._vectors = Line(places, 2 * places) if places else self.admission.line
        self.desk = Desk.of(settings, self.workers)
        self.mcp = servers_of(settings)
        self.brake = Brake(engine)
        self._checking: asyncio.Future[None] | None = None
        self._forced: dict[str, Language] = {}
        self._fingerprint = "-".join(filter(None, ("dragoman", __version__, self.card.numerics)))

    async def turn(self, spec: TurnSpec, owner: str, body_bytes: int, source: str = "") -> Turn:
        """A turn that is ready to start; what is wrong with the request has been said by then.

        `owner` is whose key it is, `source` the id of the answer that it is for.
        """
        if self.settings.trajectories and spec.sampling.logprobs is None:
            spec = replace(spec, sampling=replace(spec.sampling, logprobs=0))
        if owner:
            spec = replace(spec, owner=owner)
        # A grammar may take its whole budget to compile.
        plan = await self.workers.run(
            owner, body_bytes, partial(self.planner.plan, spec), slow=spec.constrained
        )
        remember = partial(self.planner.trails.add, owner=owner, planned=True)
        language, line = self._language(plan.dialect), self.admission.line
        return Turn(self.engine, plan, spec, language, remember, source, line, owner)

    async def computed(self, owner: str, work: Callable[[], Awaitable[R]]) -> R:
        """What the engine makes of something that is no turn; it waits for its place like one."""
        async with self._vectors.place(owner):
            return await work()

    def _language(self, dialect: Dialect) -> Language:
        """The model's own, or that in which it was made to write."""
        if dialect is self.language.dialect:
            return self.language
        if dialect.name not in self._forced:
            self._forced[dialect.name] = Language(dialect, self.engine.tokenizer)
        return self._forced[dialect.name]

    def head(self, prefix: str, model: str | None) -> Head:
        return Head(prefix + urandom(16).hex(), int(time.time()), model or self.card.name, self._fingerprint)

    async def start(self) -> None:
        await self.desk.start()
        if isinstance(self.engine, LivingEngine):
            await asked(self.engine, "start")
        if self.card.constrains:
            # Now, because it would hold up the answers of others later.
            await asyncio.to_thread(self.planner.warm_up)

    async def stop(self) -> None:
        """In this order, and all of it: nobody inside, what they stored, whom they called, who computed."""
        await self.admission.end_all()
        for close in (self.desk.stop, self.mcp.close, self.workers.close):
            try:
                await close()
            except Exception:
                logger.exception("Something could not be closed")
        await closed(self.engine, stuck=False, seconds=STOP_TIMEOUT_S)

    async def check(self, most: float = CHECK_TIMEOUT_S) -> None:
        """Whether the engine moves; raises Unavailable when there is no answer within the time."""
        if not isinstance(self.engine, LivingEngine):
            return
        if self._checking is None or self._checking.done():
            self._checking = asyncio.ensure_future(asked(self.engine, "check"))
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
