"""The model that is served: an engine, and all that is made from it once to run turns on it."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

from msgspec.structs import replace

from dragoman.dialects.declare import Dialect
from dragoman.dialects.registry import with_calls
from dragoman.engines.asked import place_media
from dragoman.engines.protocol import Engine
from dragoman.prompt import Prompter
from dragoman.prompt.find import choose_dialect
from dragoman.prompt.frames import choose_template
from dragoman.settings import Settings
from dragoman.tracing import current, session
from dragoman.turns.checked import checked_turn
from dragoman.turns.plan import Planner, TurnPlan
from dragoman.turns.queue import EngineQueue, Workers, behind
from dragoman.turns.reading import Language
from dragoman.turns.spec import PresetPair, TurnSpec, defaults_by_name
from dragoman.turns.traced import follow_turn
from dragoman.turns.turn import Turn

logger = logging.getLogger("dragoman.turns")

T = TypeVar("T", bound=Turn)


class ServedModel:
    """Plans turns in threads of `workers`, and has them wait in `queue`."""

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        workers: Workers,
        queue: EngineQueue,
        presets: tuple[PresetPair, Mapping[str, PresetPair]],
        template: str | None = None,
    ) -> None:
        """`presets`: those of all requests, and further ones by the name that a request has for the model."""
        self.engine = engine
        self.limits = settings.limits
        self.card = engine.card.named(settings.model_name)
        self.workers = workers
        tokenizer = engine.tokenizer
        named = settings.chat_template if template is None else template
        chosen = choose_template(named, self.card, tokenizer)
        level = logging.WARNING if chosen.guessed else logging.INFO
        logger.log(level, "Conversations are written by %s", chosen.how)
        self.found = choose_dialect(settings, self.card, tokenizer, chosen.source)
        dialect = self.found.dialect
        logger.info("Answers are read as %s: %s", dialect.name, self.found.how)
        make = partial(Prompter, self.card, tokenizer, limits=self.limits, dialect=with_calls(dialect))
        self.prompter = make(template=chosen.source, place=partial(place_media, engine))
        self.language = Language(dialect, tokenizer)
        self.pieces = self.language.plain
        self.planner = Planner(
            self.card,
            tokenizer,
            self.prompter,
            dialect,
            settings.model_alias,
            self.limits,
            defaults_by_name(self.card, settings, *presets),
            any_name=settings.any_model,
            checks=settings.unconstrained == "check",
        )
        self.queue, self._keeps_logprobs = queue, settings.trajectories
        self._forced: dict[str, Language] = {}

    async def check(self, spec: TurnSpec, owner: str, body_bytes: int) -> None:
        """Raises for all that is wrong with a turn, whatever its prompt will be."""
        await self.workers.run(owner, body_bytes, partial(self.planner.check, spec), slow=spec.constrained)

    async def turn(self, spec: TurnSpec, owner: str, body_bytes: int, source: str = "") -> Turn:
        """A turn that is ready to start; what is wrong with the request has been said by then.

        `owner` is whose key it is, `source` the id of the answer that it is for.
        """
        if self._keeps_logprobs and spec.sampling.logprobs is None:
            spec = replace(spec, sampling=replace(spec.sampling, logprobs=0))
        spec = replace(spec, owner=owner or spec.owner, hints=(source, session.get(), *spec.hints))
        # Of those who have come together all are read, then all planned, then all given to the engine: what
        # each of these takes stays in the processor's caches that way.
        await asyncio.sleep(0)
        plan = await self.planned(spec, body_bytes)
        await asyncio.sleep(0)
        if not plan.unenforced and self.queue.meter is None:
            return self.made(Turn, plan, spec, source)
        return checked_turn(self, plan, spec, source)

    async def planned(self, spec: TurnSpec, body_bytes: int) -> TurnPlan:
        # A grammar may take its whole budget to compile, and an engine its time to measure a picture.
        slow = spec.constrained or any(getattr(prompt, "media", None) for prompt in spec.prompts)
        trace, planning = current.get(), partial(self.planner.plan, spec)
        planned: Callable[[], TurnPlan] = trace.timing(planning) if trace else planning
        return await self.workers.run(spec.owner, body_bytes, planned, slow=slow)

    def made(self, kind: type[T], plan: TurnPlan, spec: TurnSpec, source: str) -> T:
        remember = None if behind.get() else partial(self.planner.remember, plan, spec)
        rest = remember, source, self.queue, spec.owner
        turn = kind(self.engine, plan, spec, self._language(plan.dialect), *rest, self.planner.adapters)
        turn.overridden = self.planner.defaults(spec.model).overruled(spec)
        if (trace := current.get()) is not None:
            follow_turn(trace, turn, plan, spec, source, self.card)
        return turn

    def _language(self, dialect: Dialect) -> Language:
        """The model's own, or that in which it was made to write."""
        if dialect is self.language.dialect:
            return self.language
        if dialect.name not in self._forced:
            self._forced[dialect.name] = Language(dialect, self.engine.tokenizer)
        return self._forced[dialect.name]
