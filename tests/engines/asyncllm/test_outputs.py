"""What engines yield, as steps."""

from http import HTTPStatus
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.engines.steps import OutputReader
from dragoman.errors import BadRequest, EngineFailed, Overloaded, Unavailable
from dragoman.types import Job, Sampling, Step
from tests.support.turns import cut


def job(**sampling: Any) -> Job:
    return Job(id="1", prompt=(7, 8, 9), sampling=Sampling(max_tokens=100, **sampling))


def read(*outputs: dict[str, Any], **sampling: Any) -> list[Step]:
    reader = OutputReader(job(**sampling))
    return [reader.step(output) for output in outputs]


def output(ids: list[int], finish: Any = None, **meta: Any) -> dict[str, Any]:
    return {"text": "", "output_ids": ids, "meta_info": {"finish_reason": finish, **meta}}


@given(
    ids=st.lists(st.integers(0, 3), max_size=40),
    sizes=st.lists(st.integers(0, 5), max_size=20),
    whole=st.lists(st.one_of(st.none(), st.integers(0, 3)), min_size=1),
)
def test_the_ids_of_the_steps_are_those_of_the_engine(
    ids: list[int], sizes: list[int], whole: list[int | None]
) -> None:
    """However they are cut, and whether an output has what is new, or all, or what is not counted yet."""
    reader = OutputReader(job())
    numbers: list[int] = []
    got: list[int] = []
    for number, piece in enumerate([*cut(ids, sizes), []]):
        numbers += piece
        ahead = whole[number % len(whole)]
        shown = piece if ahead is None else ids[: len(numbers) + ahead]
        got += reader.step(output(shown, completion_tokens=len(numbers))).ids
    assert got == ids


def test_without_a_count_ids_are_new_ones() -> None:
    steps = read(output([1]), output([1]), output([1, 1], "stop"))
    assert [step.ids for step in steps] == [[1], [1], [1, 1]]


@pytest.mark.parametrize(
    ("reason", "finish"),
    [
        (None, None),
        ({"type": "stop", "matched": 5}, "stop"),
        ({"type": "stop", "matched": "\n\n"}, "stop"),
        ("stop", "stop"),
        ({"type": "length", "length": 3}, "length"),
        ({"type": "abort", "message": None, "status_code": None, "err_type": None}, "abort"),
        ("abort", "abort"),
    ],
)
def test_every_finish_reason_is_its_own(reason: Any, finish: str | None) -> None:
    [step] = read(output([5], reason))
    assert (step.finish, step.error) == (finish, None)


def test_why_the_engine_gave_up_is_told() -> None:
    [step] = read(output([5], {"type": "abort", "message": "Preempted\nfor good. " + 900 * "x"}))
    assert isinstance(step.error, Unavailable)
    assert step.error.message.startswith("Preempted for good. x")
    assert len(step.error.message) == 500


def test_a_finish_reason_may_be_an_object() -> None:
    class FinishLength:
        def to_json(self) -> dict[str, Any]:
            return {"type": "length", "length": 1}

    assert read(output([5], FinishLength()))[0].finish == "length"


@pytest.mark.parametrize("reason", [{"type": "content_filter"}, "tool_calls", {}, {"type": None}, 17])
def test_no_unknown_finish_reason_is_a_stop(reason: Any) -> None:
    [step] = read(output([5], reason))
    assert step.finish == "error"
    assert isinstance(step.error, EngineFailed)


@pytest.mark.parametrize(
    ("status", "error", "message"),
    [
        (HTTPStatus.BAD_REQUEST, BadRequest, "The input is too long."),
        (413, BadRequest, "The input is too long."),
        (429, Overloaded, "The input is too long."),
        (HTTPStatus.SERVICE_UNAVAILABLE, Unavailable, "The engine cannot take this request now; retry."),
        (500, EngineFailed, "The engine failed during the answer."),
    ],
)
def test_an_abort_with_a_status_is_an_error_of_that_kind(status: int, error: type, message: str) -> None:
    reason = {"type": "abort", "message": "The input is too long.", "status_code": status}
    [step] = read(output([5], reason))
    assert (step.ids, step.finish, type(step.error)) == ([5], "error", error)
    assert str(step.error) == message


def test_a_stop_id_is_told_where_the_client_asked_for_it() -> None:
    asked = read(output([1, 5], {"type": "stop", "matched": 5}), stop_token_ids=frozenset({5}))
    own = read(output([1, 5], {"type": "stop", "matched": 5}))
    assert (asked[0].stop_id, own[0].stop_id) == (5, None)


def entries(*ids: int) -> list[tuple[float, int, None]]:
    return [(-float(id_), id_, None) for id_ in ids]


@pytest.mark.parametrize("whole", [True, False])
def test_logprobs_belong_to_the_ids_beside_them(whole: bool) -> None:
    """Whether the engine repeats those of earlier outputs or not."""
    second = entries(1, 2, 3, 4) if whole else entries(3, 4)
    steps = read(
        output([1, 2], completion_tokens=2, output_token_logprobs=entries(1, 2)),
        output([3, 4], "stop", completion_tokens=4, output_token_logprobs=second),
        logprobs=0,
    )
    items = [(entry.id, entry.logprob) for step in steps for entry in step.logprobs or []]
    assert items == [(1, -1.0), (2, -2.0), (3, -3.0), (4, -4.0)]


def test_alternatives_are_as_many_as_were_asked_for() -> None:
    tops = [[(-1.0, 1, None), (-2.0, 9, None), (-3.0, 8, None)]]
    [step] = read(output([1], output_token_logprobs=entries(1), output_top_logprobs=tops), logprobs=2)
    assert step.logprobs is not None
    assert step.logprobs[0].top == ((1, -1.0), (9, -2.0))


@pytest.mark.parametrize(
    "meta",
    [
        {},
        {"output_token_logprobs": []},
        {"output_token_logprobs": entries(2)},
        {"output_token_logprobs": [(float("nan"), 1, None)]},
        {"output_token_logprobs": [(None, 1, None)]},
        {"output_token_logprobs": entries(1), "output_top_logprobs": []},
    ],
)
def test_logprobs_that_cannot_be_told_end_the_answer(meta: dict[str, Any]) -> None:
    """Rather than be left out, or be those of another id."""
    with pytest.raises(EngineFailed):
        read(output([1], **meta), logprobs=1)


def test_logprobs_of_the_prompt_come_with_the_first_step() -> None:
    items = [(None, 7, None), *entries(8, 9)]
    first, second = read(
        output([1], output_token_logprobs=entries(1), input_token_logprobs=items),
        output([2], output_token_logprobs=entries(2)),
        logprobs=0,
        prompt_logprobs=0,
    )
    assert first.prompt_logprobs is not None
    assert [entry and (entry.id, entry.logprob) for entry in first.prompt_logprobs] == [
        None,
        (8, -8.0),
        (9, -9.0),
    ]
    assert second.prompt_logprobs is None


def test_the_cache_is_told_of_once_and_the_weights_at_every_step() -> None:
    steps = read(*(output([id_], cached_tokens=2, weight_version="v1") for id_ in (1, 2)))
    assert [step.cached_tokens for step in steps] == [2, None]
    assert [step.weight_version for step in steps] == ["v1", "v1"]
