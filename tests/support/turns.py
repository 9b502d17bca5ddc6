"""Running turns without HTTP."""

import asyncio
from collections.abc import Sequence

from dragoman.dialects.declarations import Dialect
from dragoman.engines.protocol import Engine
from dragoman.turns.choice_reader import ModelDialect
from dragoman.turns.plan import TurnPlan
from dragoman.turns.spec import TurnSpec
from dragoman.turns.turn import Turn
from dragoman.types import Answer, Event, IdsPrompt, Job, Sampling


def spec(**fields: object) -> TurnSpec:
    sampling = fields.pop("sampling", Sampling(max_tokens=1000))
    return TurnSpec(model=None, prompts=(IdsPrompt((1,)),), sampling=sampling, **fields)  # type: ignore[arg-type]


def jobs(spec: TurnSpec) -> list[Job]:
    return [
        Job(id=str(number), prompt=prompt.ids, sampling=spec.sampling, n=spec.n)
        for number, prompt in enumerate(spec.prompts)
        if isinstance(prompt, IdsPrompt)
    ]


PLAIN = Dialect(name="plain", models="")


def turn_of(engine: Engine, spec: TurnSpec, dialect: Dialect = PLAIN, *, in_reasoning: bool = False) -> Turn:
    asked = jobs(spec)
    plan = TurnPlan(asked, [in_reasoning] * len(asked), dialect, spec.stop)
    return Turn(engine, plan, spec, ModelDialect(dialect, engine.tokenizer))


def events_of(engine: Engine, spec: TurnSpec, dialect: Dialect = PLAIN) -> list[Event]:
    async def run() -> list[Event]:
        seen: list[Event] = []
        async with turn_of(engine, spec, dialect) as turn:
            while not turn.is_over:
                seen += await turn.next()
        return seen

    return asyncio.run(run())


def answers_of(
    engine: Engine, spec: TurnSpec, dialect: Dialect = PLAIN, *, in_reasoning: bool = False
) -> list[Answer]:
    async def run() -> list[Answer]:
        async with turn_of(engine, spec, dialect, in_reasoning=in_reasoning) as turn:
            return await turn.answers()

    return asyncio.run(run())


def cut(data: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """`cut([1, 2, 3], [2])` gives `[[1, 2], [3]]`: pieces of the given sizes, then the rest."""
    pieces, start = [], 0
    for size in sizes:
        pieces.append(list(data[start : start + size]))
        start += size
    return [piece for piece in [*pieces, list(data[start:])] if piece]
