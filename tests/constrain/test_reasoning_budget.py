"""Reasoning is closed in the model's own way when its ids are used up."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.constrain.calls.answer_grammar import answer_constraint
from dragoman.constrain.grammar.lark_builder import LarkBuilder
from dragoman.constrain.reasoning_budget import BudgetedConstraint, ReasoningBudget
from dragoman.constrain.vocabulary import Vocabulary
from dragoman.dialects.parser import Parser, parse
from dragoman.dialects.registry import get_dialect, list_dialects
from dragoman.dialects.render import render
from dragoman.types import Answer, Matcher, ToolCall, fold
from tests.support.laws import examples, tried
from tests.support.walks import Walker, special_tokens

NAMES = [
    name
    for name, one in list_dialects().items()
    if one.reasoning or (one.channels and one.channels.written[0])
]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
by_id = pytest.mark.parametrize("by_id", [False, True], ids=["text", "ids"])


class Model:
    """A tokenizer of bytes and special tokens, and a model that never ends by itself what it has begun."""

    def __init__(self, name: str, by_id: bool) -> None:
        self.dialect = get_dialect(name)
        self.walker = Walker(self.dialect, special_tokens(self.dialect) if by_id else ())
        self.pieces = [*self.walker.pieces, b""]
        self.special_ids = self.walker.special

    @property
    def vocabulary(self) -> Vocabulary:
        return self.walker.vocabulary

    @property
    def preface(self) -> int:
        """Bytes of reasoning that the prompt wrote."""
        return len(self.dialect.reasoning.preface) if self.dialect.reasoning else 0

    def opening(self) -> list[int]:
        """The header of a block of reasoning."""
        assert self.dialect.channels is not None
        header = self.dialect.channels.written[0].partition("{body}")[0]
        pieces = LarkBuilder(self.special_ids).pieces(header)
        return [
            id_ for piece in pieces for id_ in ([piece] if isinstance(piece, int) else self.encode(piece))
        ]

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def answer(self, matcher: Matcher, chance: random.Random, most: int) -> list[tuple[int, str]]:
        ids: list[int] = []
        while len(ids) < most and not matcher.is_complete:
            row = np.zeros(len(self.pieces), dtype=np.float32)
            matcher.mask(row)
            allowed = [int(id_) for id_ in np.flatnonzero(np.isfinite(row))]
            # Now and then the budget is used up within a character.
            letters = [id_ for id_ in allowed if id_ in ((0xA9,) if ids[-1:] == [0xC3] else (*b"abc", 0xC3))]
            ids.append(chance.choice(letters or allowed))
            if ids[-1] == self.walker.end:
                ids.pop()
                break
            matcher.accept(ids[-1])
        return self.walker._spelled(ids)

    def read(self, tokens: list[tuple[int, str]], starts: bool) -> Answer:
        parser = Parser(
            self.dialect, [TOOL], starts, special_tokens={id_: text for text, id_ in self.special_ids.items()}
        )
        fed = parser.feed(tokens if self.special_ids else "".join(text for _, text in tokens))
        return fold(fed + parser.finish())


@pytest.mark.parametrize("name", [name for name in NAMES if get_dialect(name).has_calls])
@by_id
def test_a_budget_ends_reasoning_before_a_forced_call(name: str, by_id: bool) -> None:
    model, chance = Model(name, by_id), random.Random(name)
    starts = model.dialect.reasoning is not None
    grammar = answer_constraint(
        model.dialect, [TOOL], special=model.special_ids, starts_in_reasoning=starts, parallel=False
    )
    budget = ReasoningBudget(model.dialect, 20, model, starts_in_reasoning=starts)
    matcher = BudgetedConstraint(budget, lambda: grammar.start(model.vocabulary)).new_matcher()
    opening = [] if starts else model.opening()
    for id_ in opening:
        matcher.accept(id_)
    tokens = [(id_, model.pieces[id_].decode()) for id_ in opening]
    answer = model.read(tokens + model.answer(matcher, chance, 600), starts)
    assert [call.name for call in answer.calls] == ["f"]
    assert 15 <= len(answer.reasoning.encode()) - model.preface <= 26


@pytest.mark.parametrize("name", [name for name in NAMES if get_dialect(name).reasoning])
@by_id
def test_a_budget_without_a_grammar(name: str, by_id: bool) -> None:
    model, chance = Model(name, by_id), random.Random(name)
    matcher = ReasoningBudget(model.dialect, 20, model, starts_in_reasoning=True).start()
    answer = model.read(model.answer(matcher, chance, 100), True)
    assert 15 <= len(answer.reasoning.encode()) - model.preface <= 26
    assert len(answer.text.encode()) > 30


def test_nothing_is_spent_where_there_is_no_reasoning() -> None:
    model = Model("hermes", False)
    matcher = ReasoningBudget(model.dialect, 0, model).start()
    answer = model.read(model.answer(matcher, random.Random(0), 50), False)
    assert not answer.reasoning
    assert len(answer.text) > 20


def test_a_block_that_the_model_opens_itself_is_counted() -> None:
    model = Model("hermes", True)
    matcher = ReasoningBudget(model.dialect, 5, model).start()
    opening = [model.special_ids["<think>"], *b"\nab"]
    for id_ in opening:
        matcher.accept(id_)
    tokens = [(id_, model.pieces[id_].decode()) for id_ in opening]
    answer = model.read(tokens + model.answer(matcher, random.Random(0), 60), False)
    assert 4 <= len(answer.reasoning.encode()) <= 8
    assert len(answer.text) > 20


def test_a_budget_of_nothing_closes_at_once() -> None:
    model = Model("qwen3", True)
    matcher = ReasoningBudget(model.dialect, 0, model, starts_in_reasoning=True).start()
    answer = model.read(model.answer(matcher, random.Random(0), 40), True)
    assert not answer.reasoning
    assert answer.text


ENDED_BY_CALL = [
    name for name in NAMES if (one := get_dialect(name).reasoning) is not None and one.ended_by_call
]
AROUND = ["{}", " {}", ". {}", " `{}`", ' "{}"', "\n```\n{}\n```\n", "\n{}", " {} and so on", "`{}` or\n"]


@pytest.mark.parametrize("name", ENDED_BY_CALL)
@examples(15)
@given(data=st.data())
def test_whoever_counts_and_whoever_reads_have_one_rule_for_calls(name: str, data: st.DataObject) -> None:
    """A call that reasoning only mentions does not end it."""
    model = Model(name, False)
    assert model.dialect.reasoning is not None
    call = render(model.dialect, Answer(calls=[ToolCall(id="1", name="f", arguments="{}")]))
    calls = st.sampled_from(AROUND).map(lambda around: around.format(call))
    words = st.sampled_from(["Hm", " so", ".", "\n", ", é"])
    thought = "".join(data.draw(st.lists(words | calls, min_size=1, max_size=6)))
    matcher = ReasoningBudget(model.dialect, 1, model, starts_in_reasoning=True).start()
    for id_ in model.encode(thought):
        matcher.accept(id_)
    row = np.zeros(len(model.pieces), dtype=np.float32)
    matcher.mask(row)
    is_forced = np.flatnonzero(np.isfinite(row)).size == 1
    tried(call.strip() in thought)
    read = parse(thought + model.dialect.reasoning.close[0] + "Z", model.dialect, [TOOL], True)
    assert is_forced == (not read.calls), read
