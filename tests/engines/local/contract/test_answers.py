"""What a caller gets: every id once and in order, one end to each continuation, whoever else is computed."""

import asyncio

import pytest

from dragoman.engines.protocol import CallbackEngine, EmbeddingEngine, LifecycleEngine, Tokenizer
from dragoman.types import Step
from tests.engines.local.contract.subject import Gate, Subject, ends, ids


def test_it_is_every_kind_of_engine(subject: Subject) -> None:
    assert isinstance(subject.engine, CallbackEngine)
    assert isinstance(subject.engine, LifecycleEngine)
    assert isinstance(subject.engine, EmbeddingEngine)
    assert isinstance(subject.engine.tokenizer, Tokenizer)


def test_what_is_known_of_an_answer_is_worth_comparing(subject: Subject) -> None:
    """The other tests compare with it, and nothing would be shown by a prompt of which nobody is sure."""
    assert len(subject.known(subject.prompt)) >= 4


def test_an_answer_ends_at_its_length(subject: Subject) -> None:
    known = subject.known(subject.prompt)
    steps = subject.run(subject.prompt, 6)
    assert ids(steps)[: len(known)] == known
    assert len(ids(steps)) == 6
    assert (ends(steps), steps[-1].finish) == (["length"], "length")


def test_each_continuation_is_told_once_and_has_one_end(subject: Subject) -> None:
    known = subject.known(subject.prompt)
    [steps] = subject.together(subject.job(subject.prompt, 6, n=3))
    assert ends(steps) == ["length"] * 3
    for index in range(3):
        ours = [step for step in steps if step.index == index]
        assert ours[-1].finish == "length"
        assert len(ids(ours, index)) == 6
        assert ids(ours, index)[: len(known)] == known


def test_there_may_be_more_continuations_than_places(subject: Subject) -> None:
    known = subject.known(subject.prompt, 3)
    steps = subject.run(subject.prompt, 3, n=7)
    assert ends(steps) == ["length"] * 7
    for index in range(7):
        assert ids(steps, index)[: len(known)] == known


def test_an_answer_is_the_same_alone_and_in_company(subject: Subject) -> None:
    prompts = [subject.prompt, subject.prompt[3:], subject.prompt[:9], subject.prompt[1:]]
    known = [subject.known(prompt) for prompt in prompts]
    items = subject.together(*(subject.job(prompt) for prompt in prompts))
    for steps, begins in zip(items, known, strict=True):
        assert ids(steps)[: len(begins)] == begins
        assert len(ids(steps)) == 6


def test_a_prompt_that_arrives_while_others_answer(subject: Subject) -> None:
    """It is read in pieces between their tokens."""
    long = subject.long_prompt
    known = subject.known(long), subject.known(subject.prompt, 12)

    async def main() -> tuple[list[int], list[int]]:
        running = subject.engine.generate(subject.job(subject.prompt, 12, ignore_eos=True))
        first = await anext(running)
        late = asyncio.create_task(subject.collect(long))
        rest = [step async for step in running]
        return ids(await late), ids([first, *rest])

    for numbers, begins in zip(asyncio.run(main()), known, strict=True):
        assert numbers[: len(begins)] == begins


def test_the_end_of_the_context(subject: Subject) -> None:
    room = 4
    prompt = (subject.prompt * 20)[: subject.runner.context - room]
    steps = subject.run(prompt, 50, ignore_eos=True)
    assert (len(ids(steps)), ends(steps)) == (room, ["length"])


def test_no_tokens_wanted(subject: Subject) -> None:
    [step] = subject.run(subject.prompt, 0, prompt_logprobs=0)
    assert (step.ids, step.finish) == ([], "length")
    assert step.prompt_logprobs is not None
    assert len(step.prompt_logprobs) == len(subject.prompt)


def test_an_event_loop_that_is_gone_hurts_nobody(subject: Subject) -> None:
    async def walk_away() -> None:
        subject.engine.submit(subject.job(subject.prompt, 100, ignore_eos=True), lambda step: None)

    with Gate(subject.runner) as gate:
        gate.shut()
        asyncio.run(walk_away())
        gate.open()
        assert len(ids(subject.run(subject.prompt))) == 6


def test_a_sink_that_raises_loses_only_its_own_job(
    subject: Subject, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> list[Step]:
        def broken(step: Step) -> None:
            raise ValueError("my fault")

        subject.engine.submit(subject.job(subject.prompt[1:], 60, ignore_eos=True), broken)
        return await subject.collect(subject.prompt)

    assert len(ids(asyncio.run(main()))) == 6
    assert "my fault" in caplog.text
