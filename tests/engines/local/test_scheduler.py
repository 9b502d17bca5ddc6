"""The scheduler, step by step, over a runner whose answers depend on every id it was given."""

import pytest

from dragoman.errors import BadRequest, EngineFailed
from dragoman.types import Adapters
from tests.engines.local.scripted import END, expected, following
from tests.engines.local.support import Desk

LONG = list(range(1, 41))


def test_one_job() -> None:
    desk = Desk()
    group = desk.ask([1, 2, 3], 5)
    desk.run()
    assert desk.ids(group) == expected([1, 2, 3], 5)
    assert desk.finish(group) == "length"


def test_each_step_brings_one_id_to_everyone() -> None:
    desk = Desk()
    groups = [desk.ask([n, 2, 3], 5) for n in range(4)]
    desk.run()
    assert len(desk.runner.steps) == 5
    for n, group in enumerate(groups):
        assert desk.ids(group) == expected([n, 2, 3], 5)


def test_a_job_joins_while_another_runs() -> None:
    desk = Desk()
    first = desk.ask([1], 8)
    desk.step()
    second = desk.ask([2], 3)
    desk.step()
    assert desk.runner.steps[-1].slots == [0, 1]
    desk.run()
    assert desk.ids(first) == expected([1], 8)
    assert desk.ids(second) == expected([2], 3)


def test_a_long_prompt_is_read_in_pieces_while_others_decode() -> None:
    desk = Desk(chunk=8)
    short = desk.ask([1], 10)
    desk.step()
    long = desk.ask(LONG, 2)
    desk.step()
    assert len(desk.runner.steps[-1]) == 1 + 8
    assert len(desk.ids(short)) == 2
    desk.run()
    assert desk.ids(long) == expected(LONG, 2)
    assert desk.ids(short) == expected([1], 10)


def test_alone_a_prompt_takes_the_whole_batch() -> None:
    desk = Desk(batch=32, chunk=8)
    desk.ask(LONG, 2)
    desk.step()
    assert len(desk.runner.steps[-1]) == 32


def test_rows_are_in_the_order_of_slots() -> None:
    desk = Desk(slots=4)
    for n in range(4):
        desk.ask([n, 9, 9], 3 + n, priority=-n)
    desk.run()
    for rows in desk.runner.steps:
        assert rows.slots == sorted(rows.slots)


def test_lower_priority_number_goes_first() -> None:
    desk = Desk(slots=1)
    desk.ask([1], 2)
    desk.step()
    late = desk.ask([2], 2, priority=5)
    soon = desk.ask([3], 2, priority=-5)
    desk.run()
    order = [group for group, step in desk.said if step.finish]
    assert order[1:] == [soon, late]


def test_first_come_first_served_within_a_priority() -> None:
    desk = Desk(slots=1)
    groups = [desk.ask([n], 2) for n in range(4)]
    desk.run()
    assert [group for group, step in desk.said if step.finish] == groups


def test_the_models_end() -> None:
    desk = Desk()
    group = desk.ask([1], 5, logit_bias={END: 1e6})
    desk.run()
    last = desk.steps_of(group)[-1]
    assert (last.ids, last.finish, last.stop_id) == ([END], "stop", None)


def test_the_models_end_can_be_ignored() -> None:
    desk = Desk()
    group = desk.ask([1], 5, logit_bias={END: 1e6}, ignore_eos=True)
    desk.run()
    assert desk.ids(group) == [END] * 5
    assert desk.finish(group) == "length"


def test_a_stop_id_is_told_and_included() -> None:
    desk = Desk()
    third = expected([1], 3)[2]
    group = desk.ask([1], 9, stop_token_ids=frozenset({third}))
    desk.run()
    assert desk.ids(group) == expected([1], 3)
    last = desk.steps_of(group)[-1]
    assert (last.finish, last.stop_id) == ("stop", third)


def test_min_tokens_puts_off_the_end() -> None:
    desk = Desk()
    group = desk.ask([1], 9, logit_bias={END: 1e6}, min_tokens=3)
    desk.run()
    assert desk.ids(group)[3] == END
    assert END not in desk.ids(group)[:3]


def test_the_end_of_the_context() -> None:
    desk = Desk(context=16)
    group = desk.ask(range(10), 50)
    desk.run()
    assert len(desk.ids(group)) == 6
    assert desk.finish(group) == "length"


def test_no_tokens_wanted() -> None:
    desk = Desk()
    group = desk.ask([1, 2, 3], 0, prompt_logprobs=0)
    desk.run()
    (step,) = desk.steps_of(group)
    assert (step.ids, step.finish) == ([], "length")
    assert step.prompt_logprobs is not None and len(step.prompt_logprobs) == 3


def test_nothing_left_to_choose_is_an_error_of_that_job_only() -> None:
    desk = Desk()
    other = desk.ask([2], 3)
    group = desk.ask([1], 3, allowed_token_ids=(5,), bad_words=((5,),))
    desk.run()
    assert isinstance(desk.steps_of(group)[-1].error, BadRequest)
    assert desk.finish(other) == "length"


def test_choices_share_one_reading_of_the_prompt() -> None:
    desk = Desk(slots=4, batch=64)
    group = desk.ask(LONG, 3, n=3)
    desk.run()
    rows = sum(len(step) for step in desk.runner.steps)
    assert rows < 2 * len(LONG)
    for index in range(3):
        assert desk.ids(group, index) == expected(LONG, 3)


def test_more_choices_than_slots() -> None:
    desk = Desk(slots=2)
    group = desk.ask(LONG[:20], 3, n=7)
    desk.run()
    for index in range(7):
        assert desk.ids(group, index) == expected(LONG[:20], 3)
        assert desk.finish(group, index) == "length"


def test_cached_tokens_and_prompt_logprobs_come_once() -> None:
    desk = Desk()
    group = desk.ask(LONG, 3, n=3, prompt_logprobs=2)
    desk.run()
    steps = [step for owner, step in desk.said if owner is group]
    assert steps[0].cached_tokens == 0
    assert steps[0].prompt_logprobs is not None
    assert all(step.cached_tokens is None and step.prompt_logprobs is None for step in steps[1:])


def test_prompt_logprobs_are_complete_and_in_order() -> None:
    desk = Desk(extra=5)
    desk.ask(LONG, 1)
    desk.run()
    group = desk.ask(LONG, 1, prompt_logprobs=1)
    desk.run()
    found = desk.steps_of(group)[0].prompt_logprobs
    assert found is not None and found[0] is None
    assert [entry.id for entry in found if entry] == LONG[1:]
    assert [entry.top[0][0] for entry in found if entry] == [following(LONG[:n]) for n in range(1, 40)]
    assert desk.cached(group) == 0


def test_logprobs_of_each_id() -> None:
    desk = Desk()
    group = desk.ask([1], 3, logprobs=2)
    desk.run()
    for step in desk.steps_of(group):
        assert step.logprobs is not None
        (entry,) = step.logprobs
        assert entry.id == step.ids[0] == entry.top[0][0]
        assert entry.logprob == entry.top[0][1] <= 0
        assert len(entry.top) == 2


def test_cancel_frees_the_slot_at_once() -> None:
    desk = Desk(slots=1)
    first = desk.ask([1], 50)
    second = desk.ask([2], 2)
    desk.step()
    desk.cancel(first)
    assert desk.finish(first) == "abort"
    desk.run()
    assert desk.ids(second) == expected([2], 2)


def test_cancel_of_one_that_waits() -> None:
    desk = Desk(slots=1)
    desk.ask([1], 3)
    waiting = desk.ask([2], 3)
    desk.step()
    desk.cancel(waiting)
    assert desk.finish(waiting) == "abort"
    desk.run()
    assert desk.ids(waiting) == []


def test_cancel_of_one_choice() -> None:
    desk = Desk()
    group = desk.ask([1, 2], 6, n=2)
    desk.step()
    desk.step()
    desk.cancel(group, 1)
    desk.run()
    assert desk.finish(group, 1) == "abort"
    assert desk.ids(group, 0) == expected([1, 2], 6)


def test_cancel_of_the_choice_that_reads_the_prompt() -> None:
    desk = Desk(batch=8)
    group = desk.ask(LONG, 3, n=2)
    desk.step()
    desk.cancel(group, 0)
    desk.run()
    assert desk.ids(group, 1) == expected(LONG, 3)


def test_cancel_is_idempotent() -> None:
    desk = Desk()
    group = desk.ask([1], 3)
    desk.step()
    desk.cancel(group)
    desk.cancel(group)
    assert [step.finish for step in desk.steps_of(group)] == [None, "abort"]


def test_an_interrupted_step_is_done_again() -> None:
    desk = Desk()
    group = desk.ask([1, 2, 3], 3)
    desk.runner.before_step = desk.runner.interrupt
    desk.step()
    assert desk.said == []
    desk.runner.before_step = lambda: None
    desk.run()
    assert desk.ids(group) == expected([1, 2, 3], 3)


def test_a_failed_step_ends_its_jobs_and_nothing_else() -> None:
    desk = Desk(slots=1)
    failed = desk.ask([1, 2, 3], 3)
    waiting = desk.ask([1, 2, 3], 3)
    desk.runner.failing = True
    desk.step()
    desk.runner.failing = False
    assert desk.finish(failed) == "error"
    assert isinstance(desk.steps_of(failed)[-1].error, EngineFailed)
    desk.run()
    assert desk.ids(waiting) == expected([1, 2, 3], 3)
    assert desk.cached(waiting) == 0


def test_end_all() -> None:
    desk = Desk(slots=1)
    groups = [desk.ask([n], 9) for n in range(3)]
    desk.step()
    desk.scheduler.end_all("abort")
    desk.said += desk.scheduler.take()
    assert [desk.finish(group) for group in groups] == ["abort"] * 3
    assert not desk.scheduler.busy


def test_adapters_are_never_mixed_in_a_step_and_take_turns() -> None:
    desk = Desk(slots=5)
    red, blue, both = ("red", 1.0), ("blue", 1.0), (("blue", 0.5), ("red", 1.0))
    kinds: list[Adapters] = [(), (red,), (blue,), (red,), both]
    groups = [desk.ask([7, 8], 4, adapters=kind) for kind in kinds]
    desk.run()
    for kind, group in zip(kinds, groups, strict=True):
        assert desk.ids(group) == expected([7, 8], 4, kind)
    first_half = desk.runner.step_adapters[:8]
    assert [first_half.count(kind) for kind in ((), (red,), (blue,), both)] == [2, 2, 2, 2]


@pytest.mark.parametrize("rewinds", [True, False])
def test_many_jobs_one_after_the_other(rewinds: bool) -> None:
    desk = Desk(slots=3, rewinds=rewinds)
    prompts = [[*LONG[: 5 + 3 * n], n] for n in range(8)]
    groups = [desk.ask(prompt, 4, n=1 + n % 3) for n, prompt in enumerate(prompts)]
    desk.run()
    for prompt, group in zip(prompts, groups, strict=True):
        for index in range(group.job.n):
            assert desk.ids(group, index) == expected(prompt, 4)
