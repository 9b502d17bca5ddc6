"""Real constraints on the answers of a real model."""

import asyncio
import json
import re
from typing import Any

import pytest

from dragoman.constrain.constraint import Constraint
from dragoman.constrain.vocabulary import GrammarMatcher, Vocabulary
from dragoman.engines.local import LocalEngine
from dragoman.turns.constraints import CompiledConstraint
from dragoman.types import Job, Sampling, Step

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def vocabulary(local_engine: LocalEngine) -> Vocabulary:
    tokenizer = local_engine.tokenizer
    return Vocabulary(tokenizer.pieces, tokenizer.special_ids, tokenizer.end_ids)


def ready(constraint: Constraint, vocabulary: Vocabulary) -> CompiledConstraint:
    return CompiledConstraint(constraint.start(vocabulary))


def said(
    engine: LocalEngine, constraint: CompiledConstraint, n: int = 1, **sampling: Any
) -> list[tuple[str, str | None]]:
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
    skipped = set(engine.tokenizer.special_ids.values())
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
    assert isinstance(constraint.new_matcher(), GrammarMatcher)
