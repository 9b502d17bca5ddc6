"""Constrained answers of the real model, and what the scheduler does with a matcher."""

import asyncio
import json
import re
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dragoman.constrain.constraint import Constraint
from dragoman.constrain.vocabulary import Matcher, Vocabulary
from dragoman.engines.local import LocalEngine
from dragoman.errors import BadRequest, ConstraintFailed
from dragoman.turns.constrain import Ready
from dragoman.types import Job, Sampling, Step
from tests.engines.local.scripted import END
from tests.engines.local.support import Desk

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


class Path:
    """Allows given ids, one after the other; what comes after them is free or nothing."""

    def __init__(self, *ids: int, accepting: bool = False, broken: bool = False) -> None:
        self.left = list(ids)
        self._accepting = accepting
        self._broken = broken

    def start(self) -> "Path":
        return Path(*self.left, accepting=self._accepting, broken=self._broken)

    def mask(self, row: NDArray[np.float32]) -> None:
        if self._broken:
            raise ConstraintFailed("The grammar is broken.")
        kept = row[self.left[0]]
        row[:] = -np.inf
        row[self.left[0]] = kept

    def accept(self, id_: int) -> None:
        assert id_ == self.left.pop(0)

    @property
    def accepting(self) -> bool:
        return self.over or self._accepting

    @property
    def over(self) -> bool:
        return not self.left


def test_an_answer_ends_where_its_constraint_does() -> None:
    desk = Desk()
    group = desk.ask([1, 2], 9, constraint=Path(7, 8, 9))
    desk.run()
    assert (desk.ids(group), desk.finish(group)) == ([7, 8, 9], "stop")


def test_the_end_beats_the_length() -> None:
    desk = Desk()
    group = desk.ask([1, 2], 3, constraint=Path(7, 8, 9))
    short = desk.ask([1, 2], 2, constraint=Path(7, 8, 9))
    desk.run()
    assert (desk.finish(group), desk.finish(short)) == ("stop", "length")


@pytest.mark.parametrize("accepting", [True, False])
def test_an_end_id_that_is_a_marker_does_not_end_an_answer_in_its_middle(accepting: bool) -> None:
    desk = Desk()
    group = desk.ask([1, 2], 9, constraint=Path(7, END, 9, accepting=accepting))
    desk.run()
    assert desk.ids(group) == ([7, END] if accepting else [7, END, 9])


def test_a_minimum_does_not_outlast_the_constraint() -> None:
    desk = Desk()
    group = desk.ask([1, 2], 9, min_tokens=5, constraint=Path(7, 8))
    desk.run()
    assert (desk.ids(group), desk.finish(group)) == ([7, 8], "stop")


@pytest.mark.parametrize("kinds", [{"bad_words": ((8,),)}, {"allowed_token_ids": (7,)}])
def test_what_leaves_no_token_is_the_clients_error(kinds: dict[str, Any]) -> None:
    desk = Desk()
    group = desk.ask([1, 2], 9, constraint=Path(7, 8), **kinds)
    desk.run()
    last = desk.steps_of(group)[-1]
    assert (desk.ids(group), last.finish) == ([7], "error")
    assert isinstance(last.error, BadRequest)
    assert last.error.code == "no_token_left"


def test_a_constraint_that_fails_ends_its_answer_and_no_other() -> None:
    desk = Desk()
    group, other = desk.ask([1, 2], 4, constraint=Path(7, broken=True)), desk.ask([3, 4], 4)
    desk.run()
    assert isinstance(desk.steps_of(group)[-1].error, ConstraintFailed)
    assert (len(desk.ids(other)), desk.finish(other)) == (4, "length")


@pytest.fixture(scope="module")
def vocabulary(local_engine: LocalEngine) -> Vocabulary:
    tokenizer = local_engine.tokenizer
    return Vocabulary(tokenizer.pieces, tokenizer.special, tokenizer.end_ids)


def ready(constraint: Constraint, vocabulary: Vocabulary) -> Ready:
    return Ready(constraint.start(vocabulary))


def said(engine: LocalEngine, constraint: Ready, n: int = 1, **sampling: Any) -> list[tuple[str, str | None]]:
    """The texts of all continuations, and how they ended."""
    prompt = tuple(engine.tokenizer.encode("A person:"))
    chosen = Sampling(**{"max_tokens": 200, "seed": 5, **sampling})
    job = Job(id="1", prompt=prompt, sampling=chosen, n=n, constraint=constraint)
    ids: list[list[int]] = [[] for _ in range(n)]
    finish: list[str | None] = [None] * n

    async def run() -> None:
        async for step in engine.generate(job):
            ids[step.index] += step.ids
            finish[step.index] = step.finish

    asyncio.run(run())
    skipped = set(engine.tokenizer.special.values())
    pieces = engine.tokenizer.pieces
    texts = [b"".join(pieces[id_] for id_ in one if id_ not in skipped).decode() for one in ids]
    return list(zip(texts, finish, strict=True))


def test_a_schema(local_engine: LocalEngine, vocabulary: Vocabulary) -> None:
    constraint = ready(Constraint.from_json_schema(SCHEMA), vocabulary)
    for text, finish in said(local_engine, constraint, n=2):
        assert finish == "stop"
        assert list(json.loads(text)) == ["name", "age"]


def test_continuations_have_matchers_of_their_own(local_engine: LocalEngine, vocabulary: Vocabulary) -> None:
    constraint = ready(Constraint.from_regex("[a-z]{3,8}-[0-9]{4}"), vocabulary)
    texts = [text for text, _ in said(local_engine, constraint, n=4)]
    assert all(re.fullmatch("[a-z]{3,8}-[0-9]{4}", text) for text in texts)
    assert len(set(texts)) > 1


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.1}, {"min_p": 0.5}])
def test_filters_choose_among_what_is_allowed(
    local_engine: LocalEngine, vocabulary: Vocabulary, sampling: dict[str, Any]
) -> None:
    constraint = ready(Constraint.from_choice(["zebra", "quagga"]), vocabulary)
    [(text, finish)] = said(local_engine, constraint, **sampling)
    assert (text in ("zebra", "quagga"), finish) == (True, "stop")


def test_a_bias_chooses_among_what_is_allowed(local_engine: LocalEngine, vocabulary: Vocabulary) -> None:
    constraint = ready(Constraint.from_regex("[ab]{8}"), vocabulary)
    [b] = local_engine.tokenizer.encode("b")
    [(text, _)] = said(local_engine, constraint, logit_bias={b: 100.0})
    assert text == "b" * 8


def test_an_answer_that_may_end_goes_on_if_told_so(local_engine: LocalEngine, vocabulary: Vocabulary) -> None:
    constraint = ready(Constraint.from_regex("(ha )*"), vocabulary)
    [(text, finish)] = said(local_engine, constraint, ignore_eos=True, max_tokens=12)
    assert (finish, text[:4]) == ("length", "ha h")
    [(text, _)] = said(local_engine, constraint, min_tokens=6, max_tokens=12)
    assert len(text) >= 6


def test_log_probabilities_are_the_models_own(local_engine: LocalEngine, vocabulary: Vocabulary) -> None:
    constraint = ready(Constraint.from_choice(["zebra"]), vocabulary)
    prompt = tuple(local_engine.tokenizer.encode("The capital of France is"))
    sampling = Sampling(max_tokens=9, logprobs=1)

    async def run() -> list[Step]:
        job = Job(id="1", prompt=prompt, sampling=sampling, constraint=constraint)
        return [step async for step in local_engine.generate(job)]

    first = asyncio.run(run())[0].logprobs
    assert first is not None
    assert first[0].logprob < first[0].top[0][1]
    assert local_engine.tokenizer.pieces[first[0].top[0][0]] == b" Paris"


def test_a_client_that_leaves(local_engine: LocalEngine, vocabulary: Vocabulary) -> None:
    constraint = ready(Constraint.from_regex("[a-z ]{400}"), vocabulary)
    prompt = tuple(local_engine.tokenizer.encode("So:"))
    sampling = Sampling(max_tokens=300)

    async def run() -> list[Step]:
        steps: list[Step] = []
        over = asyncio.Event()

        def sink(step: Step) -> None:
            steps.append(step)
            if len(steps) == 4:
                handle.cancel()
            if sum(step.finish is not None for step in steps) == 2:
                over.set()

        handle = local_engine.submit(
            Job(id="1", prompt=prompt, sampling=sampling, n=2, constraint=constraint), sink
        )
        await asyncio.wait_for(over.wait(), 60)
        return steps

    steps = asyncio.run(run())
    assert [step.finish for step in steps if step.finish] == ["abort", "abort"]
    assert len(steps) < 12
    assert isinstance(constraint.start(), Matcher)
