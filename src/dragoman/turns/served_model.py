"""A served model: the engine with everything that is built once to run turns on it."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

from msgspec.structs import replace

from dragoman.dialects.declarations import Dialect
from dragoman.dialects.registry import with_calls
from dragoman.engines.lifecycle import validated_media_ids
from dragoman.engines.protocol import Engine
from dragoman.prompt import PromptBuilder
from dragoman.prompt.builtin_templates import choose_template
from dragoman.prompt.find import choose_dialect
from dragoman.settings import Settings
from dragoman.tracing import current, session
from dragoman.turns.choice_reader import ModelDialect
from dragoman.turns.plan import Planner, TurnPlan
from dragoman.turns.queue import EngineQueue, WorkerPool, background_cancel
from dragoman.turns.spans import follow_turn
from dragoman.turns.spec import PresetPair, TurnSpec, defaults_by_name
from dragoman.turns.turn import Turn
from dragoman.turns.validation import checked_turn

logger = logging.getLogger("dragoman.turns")

T = TypeVar("T", bound=Turn)


class ServedModel:
    """A model that runs turns: they are planned in threads of `workers` and wait in `queue`."""

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        workers: WorkerPool,
        queue: EngineQueue,
        presets: tuple[PresetPair, Mapping[str, PresetPair]],
        template: str | None = None,
    ) -> None:
        """`presets`: those of all requests, and those for single names of the model."""
        self.engine = engine
        self.limits = settings.limits
        self.card = engine.card.named(settings.model_name)
        self.workers = workers
        tokenizer = engine.tokenizer
        named = settings.chat_template if template is None else template
        chosen = choose_template(named, self.card, tokenizer)
        level = logging.WARNING if chosen.guessed else logging.INFO
        logger.log(level, "Chat template: %s", chosen.how)
        self.detected_dialect = choose_dialect(settings, self.card, tokenizer, chosen.source)
        dialect = self.detected_dialect.dialect
        logger.info("Dialect %s: %s", dialect.name, self.detected_dialect.how)
        make = partial(PromptBuilder, self.card, tokenizer, limits=self.limits, dialect=with_calls(dialect))
        self.prompter = make(template=chosen.source, placer=partial(validated_media_ids, engine))
        self.language = ModelDialect(dialect, tokenizer)
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
        self._forced: dict[str, ModelDialect] = {}

    async def check(self, spec: TurnSpec, owner: str, body_bytes: int) -> None:
        """Check a turn without rendering its prompt; raises if it is not valid."""
        await self.workers.run(
            owner, body_bytes, partial(self.planner.check, spec), always_offload=spec.constrained
        )

    async def create_turn(self, spec: TurnSpec, owner: str, body_bytes: int, source: str = "") -> Turn:
        """Plan a turn, ready to start. Raises for everything that is wrong with the request.

        `owner` is the hashed API key, `source` the id of the answer that the turn belongs to.
        """
        if self._keeps_logprobs and spec.sampling.logprobs is None:
            spec = replace(spec, sampling=replace(spec.sampling, logprobs=0))
        spec = replace(spec, owner=owner or spec.owner, hints=(source, session.get(), *spec.hints))
        # Requests that arrive together are first all decoded, then all planned, then all submitted: the data
        # of each stage stays in the CPU's caches.
        await asyncio.sleep(0)
        plan = await self.plan(spec, body_bytes)
        await asyncio.sleep(0)
        if not plan.unenforced and self.queue.meter is None:
            return self.make_turn(Turn, plan, spec, source)
        return checked_turn(self, plan, spec, source)

    async def plan(self, spec: TurnSpec, body_bytes: int) -> TurnPlan:
        # Compiling a grammar or measuring an image may take long.
        slow = spec.constrained or any(getattr(prompt, "media", None) for prompt in spec.prompts)
        trace, planning = current.get(), partial(self.planner.plan, spec)
        planned: Callable[[], TurnPlan] = trace.timing(planning) if trace else planning
        return await self.workers.run(spec.owner, body_bytes, planned, always_offload=slow)

    def make_turn(self, kind: type[T], plan: TurnPlan, spec: TurnSpec, source: str) -> T:
        remember = None if background_cancel.get() else partial(self.planner.remember, plan, spec)
        rest = remember, source, self.queue, spec.owner
        turn = kind(self.engine, plan, spec, self._language(plan.dialect), *rest, self.planner.adapters)
        turn.overridden = self.planner.defaults(spec.model).list_overridden(spec)
        if (trace := current.get()) is not None:
            follow_turn(trace, turn, plan, spec, source, self.card)
        return turn

    def _language(self, dialect: Dialect) -> ModelDialect:
        """Return the compiled dialect of the model, or the one that this turn uses instead."""
        if dialect is self.language.dialect:
            return self.language
        if dialect.name not in self._forced:
            self._forced[dialect.name] = ModelDialect(dialect, self.engine.tokenizer)
        return self._forced[dialect.name]
