"""What is sent is what arrives; and a constraint that is made again allows the same."""

import asyncio
from contextlib import suppress
from copy import deepcopy
from typing import Any, Literal, cast

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.constrain.constraint import Constraint
from dragoman.constrain.reasoning_budget import BudgetedConstraint, ConstraintSpec, ReasoningBudget
from dragoman.constrain.vocabulary import Vocabulary
from dragoman.dialects.registry import get_dialect
from dragoman.engines.isolated import wire
from dragoman.engines.isolated.wire import ConstraintFactory, SourceConstraint, constraint_spec
from dragoman.engines.protocol import ModelCard
from dragoman.engines.scripted import ByteTokenizer
from dragoman.errors import BadRequest, DragomanError, EngineFailed, ParamKey, RecordNotFound
from dragoman.turns.constraints import CompiledConstraint
from dragoman.types import ConstraintSource, Job, Matcher, Sampling, Step, TokenLogprob

ids = st.integers(0, 2**31 - 1)
logprobs = st.builds(
    TokenLogprob, ids, st.floats(-100, 0), st.lists(st.tuples(ids, st.floats(-100, 0))).map(tuple)
)
finishes: st.SearchStrategy[Literal["stop", "length", "abort"] | None] = st.sampled_from(
    [None, "stop", "length", "abort"]
)
steps = st.builds(
    Step,
    ids=st.lists(ids),
    index=st.integers(0, 100),
    logprobs=st.none() | st.lists(logprobs),
    finish=finishes,
    stop_id=st.none() | ids,
    cached_tokens=st.none() | ids,
    prompt_logprobs=st.none() | st.lists(st.none() | logprobs),
    weight_version=st.none() | st.text(),
)
samplings = st.builds(
    Sampling,
    max_tokens=ids,
    temperature=st.floats(0, 2),
    logit_bias=st.dictionaries(ids, st.floats(-100, 100)),
    bad_words=st.lists(st.lists(ids).map(tuple)).map(tuple),
    allowed_token_ids=st.none() | st.lists(ids).map(tuple),
    stop_token_ids=st.frozensets(ids),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
)
jobs = st.builds(
    Job,
    id=st.text(),
    prompt=st.lists(ids).map(tuple),
    sampling=samplings,
    n=st.integers(1, 128),
    constraint=st.none(),
    adapters=st.lists(st.tuples(st.text(), st.floats(-2, 2))).map(tuple),
    priority=st.integers(-(2**31), 2**31),
    cache_salt=st.text(),
)


def body(message: Any) -> bytes:
    return wire.frame(message)[4:]


@settings(max_examples=30)
@given(st.lists(st.tuples(ids, steps), max_size=4))
def test_steps_arrive_as_they_were(said: list[tuple[int, Step]]) -> None:
    assert wire.news.decode(body(wire.StepReport(said))) == wire.StepReport(said)


class Pieces:
    """A stream of which so much comes at a time."""

    def __init__(self, data: bytes, size: int) -> None:
        self._left, self._size = data, size

    async def read(self, n: int = -1) -> bytes:
        part, self._left = self._left[: self._size], self._left[self._size :]
        return part


@given(st.lists(st.binary(max_size=9), max_size=9), st.integers(1, 40))
def test_frames_arrive_whole_however_they_are_cut(messages: list[bytes], size: int) -> None:
    stream = Pieces(b"".join(wire.frame(message) for message in messages), size)

    async def read() -> list[bytes]:
        frames, chunks = wire.FrameReader(cast(asyncio.StreamReader, stream)), []
        with suppress(EOFError):
            while True:
                chunks += await frames.read()
        return chunks

    assert [msgspec.msgpack.decode(frame) for frame in asyncio.run(read())] == messages


def known(news: list[wire.Report]) -> dict[tuple[int, int, str | None], list[Any]]:
    """What is told of each continuation, under each version of weights, in order."""
    mapping: dict[tuple[int, int, str | None], list[Any]] = {}
    for one in news:
        for id_, step in one.steps if isinstance(one, wire.StepReport) else ():
            items = mapping.setdefault((id_, step.index, step.weight_version), [])
            items += step.ids
            items += [each for each in (step.finish, step.cached_tokens) if each is not None]
    return mapping


few = st.builds(
    Step,
    ids=st.lists(ids, max_size=3),
    index=st.integers(0, 1),
    finish=st.sampled_from([None, None, None, "stop"]),
    cached_tokens=st.sampled_from([None, None, None, 7]),
    weight_version=st.sampled_from([None, None, "2"]),
)


@given(st.lists(st.lists(st.tuples(st.integers(0, 1), few), max_size=4) | st.just(None), max_size=6))
def test_steps_that_have_waited_are_told_as_one(told: list[list[tuple[int, Step]] | None]) -> None:
    def news() -> list[wire.Report]:
        return [wire.Pong(3) if one is None else wire.StepReport(deepcopy(one)) for one in told]

    joined = list(wire.merge_step_reports(news()))
    assert known(joined) == known(news())
    assert [one for one in joined if not isinstance(one, wire.StepReport)] == [wire.Pong(3)] * told.count(
        None
    )


def test_steps_of_many_messages_are_one_message() -> None:
    items: list[wire.Report] = [
        wire.StepReport([(job, Step([10 * number + job])) for job in range(2)]) for number in range(3)
    ]
    assert list(wire.merge_step_reports(items)) == [
        wire.StepReport([(0, Step([0, 10, 20])), (1, Step([1, 11, 21]))])
    ]


@settings(max_examples=30)
@given(jobs)
def test_jobs_arrive_as_they_were(job: Job) -> None:
    order = wire.JobSubmission(1, job, ConstraintSpec(Constraint("start: /a/")))
    assert wire.orders.decode(body(order)) == order


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (BadRequest("No.", param="n", code="c"), BadRequest, "No."),
        (RecordNotFound("r1"), RecordNotFound, RecordNotFound("r1").message),
        (ZeroDivisionError("a secret"), EngineFailed, "The engine failed in this call."),
    ],
)
def test_errors_arrive_without_foreign_words(
    error: Exception, kind: type[DragomanError], message: str
) -> None:
    item = wire.news.decode(body(wire.StepReport([(1, Step([], finish="error", error=error))])))
    assert isinstance(item, wire.StepReport)
    result = item.steps[0][1].error
    assert type(result) is kind
    assert result.message == message


@pytest.mark.parametrize("param", [None, "input[3]", ParamKey("prompt")])
def test_what_is_wrong_arrives_as_the_part_that_it_was(param: str | None) -> None:
    error = wire.WireError.of(BadRequest("no", param=param)).error()
    assert (error.param, type(error.param)) == (param, type(param))


@pytest.mark.parametrize("kind", ["SystemExit", "ClassVar", "annotations", "EngineFailed.__init__", ""])
def test_a_kind_of_error_that_is_none_of_ours_is_not_looked_up(kind: str) -> None:
    assert type(wire.WireError(kind, "x").error()) is EngineFailed


def test_a_card_arrives_as_it_was() -> None:
    card = ModelCard(
        name="m",
        max_model_len=7,
        adapters=["a"],
        constraint_formats=["lark"],
        unsupported=frozenset({"seed"}),
    )
    item = wire.news.decode(body(wire.EngineReady(card, ["embed"], b"digest")))
    assert isinstance(item, wire.EngineReady)
    assert item.card == card


TOKENIZER = ByteTokenizer()
VOCABULARY = Vocabulary(TOKENIZER.pieces, TOKENIZER.special_ids, TOKENIZER.end_ids)
UNIQUE = {"type": "array", "items": {"type": "string"}, "uniqueItems": True, "maxItems": 3}


def ready(constraint: Constraint) -> CompiledConstraint:
    return CompiledConstraint(constraint.start(VOCABULARY), ConstraintSpec(constraint))


def budgeted(tokens: int, inner: Constraint | None) -> BudgetedConstraint:
    budget = ReasoningBudget(get_dialect("hermes"), tokens, TOKENIZER, starts_in_reasoning=True)
    if inner is None:
        return BudgetedConstraint(budget)
    return BudgetedConstraint(budget, lambda: inner.start(VOCABULARY), ConstraintSpec(inner))


CONSTRAINTS = [
    ready(Constraint.from_regex("(yes|no), [0-9]{3}")),
    ready(Constraint.from_json_schema(UNIQUE)),
    budgeted(3, None),
    budgeted(2, Constraint.from_regex("[a-z]{1,5}(</think>)?[a-z \n]*")),
]


def allowed(matcher: Matcher) -> np.ndarray[Any, Any]:
    row = np.zeros(len(TOKENIZER.pieces), np.float32)
    matcher.mask(row)
    return row


@given(st.sampled_from(CONSTRAINTS), st.lists(st.integers(0, 2**31), max_size=24))
def test_a_constraint_that_is_made_again_allows_the_same(constraint: Any, walk: list[int]) -> None:
    recipe = constraint_spec(constraint)
    assert recipe is not None
    sent = wire.orders.decode(
        body(wire.JobSubmission(1, Job(id="", prompt=(), sampling=Sampling(max_tokens=1)), recipe))
    )
    assert isinstance(sent, wire.JobSubmission) and sent.recipe is not None
    first, second = constraint.new_matcher(), ConstraintFactory(TOKENIZER).make(sent.recipe).new_matcher()
    for number in walk:
        row = allowed(first)
        assert (row == allowed(second)).all()
        assert (first.is_accepting, first.is_complete) == (second.is_accepting, second.is_complete)
        possible = np.flatnonzero(row > -np.inf)
        if first.is_complete or not possible.size:
            return
        first.accept(int(possible[number % possible.size]))
        second.accept(int(possible[number % possible.size]))


def test_a_source_needs_no_recipe_and_what_has_neither_is_refused() -> None:
    class OwnConstraint:
        source = None

        def new_matcher(self) -> Matcher:
            raise AssertionError

    assert constraint_spec(SourceConstraint(ConstraintSource("regex", "a"))) is None
    with pytest.raises(BadRequest):
        constraint_spec(OwnConstraint())
