"""The default weights behind the engine over transformers.

Greedy answers must be those of the library's own `generate`, while others are sampled, held to a pattern, and
left at random places; afterwards nothing may be left running. Needs torch (`make torch`).
"""

import asyncio
import json
import re
import tempfile
from pathlib import Path
from random import Random

from dragoman.constrain.constraint import Constraint
from dragoman.constrain.vocabulary import Vocabulary
from dragoman.engines.default_weights import default_model
from dragoman.engines.transformers import TransformersEngine, TransformersOptions
from dragoman.turns.constraints import CompiledConstraint
from dragoman.types import Job, Sampling
from tests.engines.vllm.models import GOLDEN_TOKENS, make
from tests.torture.page import Row, progress, scaled

ROUNDS = 20
PATTERN = "(yes|no), [0-9]{3}"
COMPANY = 12


class Storm:
    def __init__(self, engine: TransformersEngine, golden: dict[str, list[int]], chance: Random) -> None:
        self._engine = engine
        self._golden = golden
        self._chance = chance
        tokenizer = engine.tokenizer
        self._vocabulary = Vocabulary(tokenizer.pieces, tokenizer.special_ids, tokenizer.end_ids)
        self.wrong = 0

    async def round(self, number: int) -> None:
        kinds = [self._greedy, self._greedy, self._held, self._left]
        await asyncio.gather(*(self._chance.choice(kinds)(f"{number}-{offset}") for offset in range(COMPANY)))

    async def _greedy(self, id: str) -> None:
        prompt, expected = self._chance.choice(list(self._golden.items()))
        ids = await self._say(id, prompt, Sampling(max_tokens=GOLDEN_TOKENS, temperature=0))
        self.wrong += ids != expected

    async def _held(self, id: str) -> None:
        constraint = CompiledConstraint(Constraint.from_regex(PATTERN).start(self._vocabulary))
        ids = await self._say(id, "Answer: ", Sampling(max_tokens=40), constraint)
        ends = self._engine.tokenizer.end_ids
        text = b"".join(self._engine.tokenizer.pieces[id_] for id_ in ids if id_ not in ends).decode()
        self.wrong += re.fullmatch(PATTERN, text) is None

    async def _left(self, id: str) -> None:
        sampling = Sampling(max_tokens=200, top_p=0.9, ignore_eos=True)
        steps = self._engine.generate(Job(id=id, prompt=(1, 2, 3), sampling=sampling))
        for _ in range(self._chance.randrange(6)):
            await anext(steps)
        await steps.aclose()

    async def _say(
        self, id: str, prompt: str, sampling: Sampling, constraint: CompiledConstraint | None = None
    ) -> list[int]:
        ids = tuple(self._engine.tokenizer.encode(prompt))
        job = Job(id=id, prompt=ids, sampling=sampling, constraint=constraint)
        return [id_ async for step in self._engine.generate(job) for id_ in step.ids]


async def storm(
    engine: TransformersEngine, golden: dict[str, list[int]], rounds: int, seed: int
) -> tuple[int, int]:
    """The answers that are wrong, and those that are still computed when all is over."""
    tried = Storm(engine, golden, Random(seed))
    for number in range(rounds):
        await tried.round(number)
        progress(number + 1, rounds, "rounds")
    left = engine.live
    await engine.stop()
    return tried.wrong, left


def run(scale: float = 1.0, seed: int = 1) -> list[Row]:
    rounds = scaled(ROUNDS, scale)
    with tempfile.TemporaryDirectory() as param:
        make(default_model(), Path(param))
        folder = Path(param) / "smollm2"
        golden = json.loads((folder / "golden.json").read_text())
        engine = TransformersEngine.open(str(folder), TransformersOptions(context=512, slots=8, threads=1))
        wrong, left = asyncio.run(storm(engine, golden, rounds, seed))
    what = f"{rounds * COMPANY:,} answers over transformers, some of them left"
    return [
        Row(f"{what}: wrong", f"{wrong}", "0", not wrong),
        Row(f"{what}: computed on", f"{left}", "0", not left),
    ]
