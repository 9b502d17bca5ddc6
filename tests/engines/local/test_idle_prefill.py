"""Answers are read again while nobody waits, and for nobody longer than that."""

import asyncio
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dragoman.engines.local import LocalEngine, LocalOptions
from dragoman.engines.local.kv_cache import WORTH_SHARING
from dragoman.engines.local.options import RunnerName
from dragoman.engines.local.sequence import SequenceGroup
from dragoman.types import Step
from tests.engines.local.paged import FlyingDesk, PagedDesk
from tests.engines.local.scripted import engine_over, expected
from tests.engines.local.support import Desk, FakeRunner, job
from tests.support.wait import becomes_async

SYSTEM = [*range(30)]
SAID = expected(SYSTEM, 20)
LONGER = [*SYSTEM, *SAID, 1, 2, 3]


def make(kind: type[Desk], **sizes: Any) -> Desk:
    desk = kind(**sizes)
    desk.runner.decode_kv_differs = True
    return desk


def say(desk: Desk, **kinds: Any) -> SequenceGroup:
    group = desk.ask(SYSTEM, 40, stop_token_ids=frozenset({SAID[-1]}), **kinds)
    desk.run()
    return group


def goes_on(desk: Desk) -> int | None:
    """How much is known to who goes on from the answer, which is as it would be anywhere."""
    group = desk.ask(LONGER, 2)
    desk.run()
    assert desk.ids(group) == expected(LONGER, 2)
    return desk.cached(group)


@pytest.mark.parametrize("kind", [Desk, PagedDesk])
def test_an_answer_is_read_again_when_there_is_nothing_else_to_do(kind: type[Desk]) -> None:
    desk = make(kind)
    group = say(desk)
    assert (desk.ids(group), desk.finish(group)) == (SAID, "stop")
    count = len(desk.said)
    desk.scheduler.start_idle_prefill()
    desk.run()
    assert len(desk.said) == count
    assert goes_on(desk) == len(SYSTEM) + len(SAID)


@pytest.mark.parametrize("kind", [Desk, PagedDesk])
def test_what_comes_breaks_it_off_and_has_what_was_read_by_then(kind: type[Desk]) -> None:
    desk = make(kind, chunk=8)
    say(desk)
    desk.scheduler.start_idle_prefill()
    desk.step()
    assert goes_on(desk) == len(SYSTEM) + 8
    # What was broken off is read when there is time again.
    assert desk.scheduler.rereading


@pytest.mark.parametrize("kind", [Desk, PagedDesk])
@pytest.mark.parametrize(
    "kinds",
    [
        {"n": 2},
        {"reuse_prefix": False},
        {"adapters": (("red", 1.0),)},
    ],
    ids=["several answers", "private", "adapters"],
)
def test_what_nobody_goes_on_from_is_not_read_again(kind: type[Desk], kinds: dict[str, Any]) -> None:
    desk = make(kind)
    say(desk, **kinds)
    assert not desk.scheduler.rereading


def test_nor_is_what_was_cut_off_or_is_short() -> None:
    desk = make(Desk)
    desk.ask(SYSTEM, 20)
    desk.run()
    desk.ask(SYSTEM, 20, stop_token_ids=frozenset({SAID[WORTH_SHARING - 2]}))
    desk.run()
    assert not desk.scheduler.rereading


def test_nor_where_an_answer_is_kept_as_it_was_computed() -> None:
    desk = Desk()
    say(desk)
    assert not desk.scheduler.rereading


def test_nor_where_reading_takes_no_time() -> None:
    desk = make(FlyingDesk)
    say(desk)
    assert not desk.scheduler.rereading


def test_no_more_than_a_few_answers_wait_for_it() -> None:
    desk = make(Desk)
    for _ in range(20):
        say(desk)
    count = 0
    while desk.scheduler.rereading:
        desk.scheduler.start_idle_prefill()
        desk.run()
        count += 1
    assert count == 8


def test_new_weights_make_it_useless() -> None:
    desk = make(Desk)
    say(desk)
    desk.scheduler.start_idle_prefill()
    desk.scheduler.discard_cache()
    assert not desk.scheduler.rereading
    assert not desk.scheduler.busy


def test_the_thread_begins_by_itself_and_a_request_does_not_wait_for_the_step() -> None:
    async def main() -> None:
        runner = FakeRunner(rereads=True)
        engine = engine_over(runner)
        reading, go_on = threading.Event(), threading.Event()
        seen: list[bool] = []

        def hold() -> None:
            if len(runner.steps) >= len(SAID):
                reading.set()
                go_on.wait(10)
                seen.append(runner.interrupted)

        runner.before_step = hold
        result = [
            step async for step in engine.generate(job(SYSTEM, 40, stop_token_ids=frozenset({SAID[-1]})))
        ]
        assert [id_ for step in result for id_ in step.ids] == SAID
        await asyncio.to_thread(reading.wait, 10)
        steps: list[Step] = []
        engine.submit(job(LONGER, 2), steps.append)
        go_on.set()
        await becomes_async(lambda: bool(steps and steps[-1].finish))
        assert seen[0]
        assert [id_ for step in steps for id_ in step.ids] == expected(LONGER, 2)
        await engine.stop()

    asyncio.run(main())


@pytest.mark.parametrize("runner", ["openvino", "llamacpp"])
def test_with_a_real_model_the_next_turn_finds_the_answer(weights: Path, runner: RunnerName) -> None:
    options = LocalOptions(runner=runner, readers=1, threads=1, slots=2, context=256, guesses=0)

    async def main(engine: LocalEngine) -> None:
        prompt = engine.tokenizer.encode("Three colours are red,")
        free = [id_ async for step in engine.generate(job(prompt, 60)) for id_ in step.ids]
        end = next(id_ for at, id_ in enumerate(free) if at >= 20 and id_ not in free[:at])
        stopped = job(prompt, 60, stop_token_ids=frozenset({end}))
        numbers = [id_ async for step in engine.generate(stopped) for id_ in step.ids]
        await becomes_async(lambda: not (engine._scheduler.rereading or engine._scheduler.busy))
        longer = [*prompt, *numbers, *prompt]
        steps = [step async for step in engine.generate(job(longer, 12))]
        assert steps[0].cached_tokens == len(prompt) + len(numbers)
        fresh = [step async for step in engine.generate(job(longer, 12, reuse_prefix=False))]
        assert fresh[0].cached_tokens == 0
        assert [step.ids for step in steps] == [step.ids for step in fresh]

    with closing(LocalEngine.open(weights, options)) as engine:
        asyncio.run(main(engine))
