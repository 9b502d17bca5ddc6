"""Conversations over several upstreams: what is found again there, beside what one server would find."""

from collections.abc import Sequence
from itertools import takewhile

from dragoman.engines.protocol import Handle
from dragoman.engines.remote import RemoteEngine
from dragoman.engines.scripted import ScriptedEngine, say
from dragoman.types import Job, Sink, Step
from tests.engines.remote.support import ids_of, job_of, run, serving, steps_of

SESSIONS, TURNS, NEW = 16, 4, 200


def count_alike(one: Sequence[int], other: Sequence[int]) -> int:
    """How many ids from the beginning on are the same."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


class Remembering(ScriptedEngine):
    """It says how much of each prompt it has had before, as an engine with a prefix cache does."""

    def __init__(self) -> None:
        super().__init__(say("an answer of some length"))
        self._seen: list[tuple[int, ...]] = []

    def submit(self, job: Job, sink: Sink) -> Handle:
        cached = max((count_alike(job.prompt, one) for one in self._seen), default=0)
        self._seen.append(job.prompt)

        def tell(step: Step) -> None:
            step.cached_tokens = cached if step.cached_tokens is not None else None
            sink(step)

        return super().submit(job, tell)


def hits(upstreams: int) -> int:
    async def work(engine: RemoteEngine) -> int:
        found, prompts = 0, [[9] * 100 for _ in range(SESSIONS)]
        for turn in range(TURNS):
            for number, prompt in enumerate(prompts):
                prompt += [(number * 31 + turn * 7 + place) % 250 for place in range(NEW)]
                steps = await steps_of(engine, job_of(prompt))
                found += sum(step.cached_tokens or 0 for step in steps)
                prompt += ids_of(steps)
        return found

    engines: Sequence[Remembering] = [Remembering() for _ in range(upstreams)]
    with serving(*engines) as urls:
        return run(urls, work)


def test_four_upstreams_find_what_one_would() -> None:
    assert hits(4) >= 0.95 * hits(1)
