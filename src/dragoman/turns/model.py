"""A model that is served: an engine, and all that is made from it once to run turns on it."""

import logging
from functools import partial

from msgspec.structs import replace

from dragoman.dialects.declare import Dialect
from dragoman.dialects.registry import with_calls
from dragoman.engines.protocol import Engine
from dragoman.prompt import Prompter
from dragoman.settings import Settings
from dragoman.turns.choose import choose_dialect
from dragoman.turns.language import Language
from dragoman.turns.line import Line
from dragoman.turns.plan import Planner
from dragoman.turns.sampling import defaults_of
from dragoman.turns.spec import TurnSpec
from dragoman.turns.turn import Turn
from dragoman.turns.workers import Workers

logger = logging.getLogger("dragoman.turns")


class ServedModel:
    """Plans turns in threads of `workers`, and has them wait in `line`."""

    def __init__(
        self, engine: Engine, settings: Settings, workers: Workers, line: Line, template: str | None = None
    ) -> None:
        self.engine = engine
        self.limits = settings.limits
        self.card = engine.card
        self.workers = workers
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
        self._line = line
        self._keeps_logprobs = settings.trajectories
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
        if owner:
            spec = replace(spec, owner=owner)
        # A grammar may take its whole budget to compile.
        plan = await self.workers.run(
            owner, body_bytes, partial(self.planner.plan, spec), slow=spec.constrained
        )
        remember = partial(self.planner.trails.add, owner=owner, planned=True)
        language = self._language(plan.dialect)
        return Turn(self.engine, plan, spec, language, remember, source, self._line, owner)

    def _language(self, dialect: Dialect) -> Language:
        """The model's own, or that in which it was made to write."""
        if dialect is self.language.dialect:
            return self.language
        if dialect.name not in self._forced:
            self._forced[dialect.name] = Language(dialect, self.engine.tokenizer)
        return self._forced[dialect.name]
