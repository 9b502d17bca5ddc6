"""Engines that only iterate: the smallest thing that can be served."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from dragoman.engines.protocol import ModelCard
from dragoman.engines.scripted import ByteTokenizer
from dragoman.engines.steps import seed_of
from dragoman.errors import BadRequest, EngineFailed
from dragoman.types import Job, Sampling, Step
from tests.support.turns import answers_of, events_of, spec, turn_of


class IteratingEngine:
    card = ModelCard(name="small", max_model_len=100)
    tokenizer = ByteTokenizer()

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.closed = 0

    async def generate(self, job: Job) -> AsyncIterator[Step]:
        self.jobs.append(job)
        try:
            for byte in b"abc":
                await asyncio.sleep(0)
                yield Step([byte], cached_tokens=1 if byte == ord("a") else None)
            yield Step([], finish="stop")
        finally:
            self.closed += 1


class FailingEngine(IteratingEngine):
    def __init__(self, error: Exception | None) -> None:
        super().__init__()
        self._error = error

    async def generate(self, job: Job) -> AsyncIterator[Step]:
        yield Step([97])
        if self._error is not None:
            raise self._error


def test_steps_become_an_answer() -> None:
    [answer] = answers_of(IteratingEngine(), spec())
    assert (answer.text, answer.finish) == ("abc", "stop")


def test_several_continuations_are_jobs_of_their_own_with_seeds_of_their_own() -> None:
    engine = IteratingEngine()
    answers = answers_of(engine, spec(n=2, sampling=Sampling(max_tokens=9, seed=5)))
    assert [answer.text for answer in answers] == ["abc", "abc"]
    assert sorted((job.n, job.sampling.seed) for job in engine.jobs) == [(1, 5), (1, seed_of(5, 1))]


def test_cached_tokens_of_a_prompt_count_once() -> None:
    async def run() -> int:
        async with turn_of(IteratingEngine(), spec(n=3)) as turn:
            await turn.answers()
            return turn.usage.cached_tokens

    assert asyncio.run(run()) == 1


def test_a_stop_string_closes_the_iterator() -> None:
    engine = IteratingEngine()
    events_of(engine, spec(stop=("b",)))
    assert engine.closed == 1


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (BadRequest("no top_k here"), BadRequest),
        (ValueError("secret"), EngineFailed),
        (None, EngineFailed),
    ],
)
def test_what_goes_wrong_is_told_safely(raised: Exception | None, told: type[Exception]) -> None:
    events = events_of(FailingEngine(raised), spec())
    assert events[0].text == "a"
    assert isinstance(events[-1].error, told)
    assert "secret" not in str(events[-1].error)
