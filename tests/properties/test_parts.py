"""Each token is on the part that it belongs to: what a mask over the tokens of one part relies on.

With one token for each character, what a part says must be among its own tokens, and its markers too: those
that open it and those that close it. What stands in a call and is no part of it is told as text behind the
call; its tokens stay with the call, for tokens are never told out of their order.
"""

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.dialects.declarations import Dialect
from dragoman.dialects.parser import Parser
from dragoman.dialects.registry import get_dialect
from dragoman.dialects.render import render
from dragoman.engines.scripted import Script, ScriptedEngine
from dragoman.turns.spec import ParseOptions
from dragoman.types import Answer, Event
from tests.support.dialects import NAMES, TOOLS, call, soup
from tests.support.laws import examples, tried
from tests.support.turns import events_of, spec

THOUGHT, SAID, FIRST, SECOND = "Hmmm", "Wordy", "Xavier", "Yvonne"
Leaf = tuple[str, str, list[int]]
"""What kind of part it is, its text, and the ids that are on it."""


def leaves(events: list[Event]) -> list[Leaf]:
    """The parts as a client puts them together."""
    items: list[Leaf] = []
    for event in events:
        kind = "call" if event.kind.startswith("call_") else event.kind
        beside = kind in ("unseen", "finish")
        if not items or event.kind == "call_open" or not (beside or items[-1][0] == kind):
            items.append((kind, "", []))
        before = items[-1]
        items[-1] = before[0], before[1] + event.text, before[2] + event.ids
    return items


def read(dialect: Dialect, text: str, size: int = 1) -> list[Leaf]:
    """The parts of a text whose characters are tokens, each with its place for an id."""
    parser = Parser(dialect, TOOLS)
    tokens = list(enumerate(text))
    events = [event for at in range(0, len(text), size) for event in parser.feed(tokens[at : at + size])]
    return leaves(events + parser.finish())


def example(dialect: Dialect) -> str:
    answer = Answer(text=SAID)
    if dialect.reasoning or dialect.channels:
        answer.reasoning = THOUGHT
    if dialect.calls or dialect.channels:
        answer.calls = [call("f", f'{{"s": "{FIRST}"}}'), call("get_weather", f'{{"city": "{SECOND}"}}')]
    return render(dialect, answer)


def marks(dialect: Dialect, *, opening: bool) -> list[str]:
    """What opens a part, or closes one, as it is written."""
    texts: list[str] = [dialect.text_open if opening else dialect.text_close]
    if dialect.reasoning is not None:
        texts.append((dialect.reasoning.open if opening else dialect.reasoning.close)[0])
    for shape in dialect.calls[:1]:
        texts += (shape.open if opening else shape.close)[:1]
        if shape.section is not None:
            texts += (shape.section.open if opening else shape.section.close)[:1]
    if dialect.channels is not None:
        texts += dialect.channels.start if opening else dialect.channels.ends
    return [mark.strip() for mark in texts if mark.strip()]


def places(text: str, marks: list[str], start: int, end: int) -> set[int]:
    """All places of these markers between two others."""
    return {
        offset
        for mark in marks
        for at in range(start, end - len(mark) + 1)
        if text.startswith(mark, at)
        for offset in range(at, at + len(mark))
    }


@pytest.mark.parametrize("name", NAMES)
def test_markers_are_on_the_parts_that_they_open_and_close(name: str) -> None:
    dialect = get_dialect(name)
    text = example(dialect)
    items = read(dialect, text)
    assert [id_ for leaf in items for id_ in leaf[2]] == list(range(len(text)))
    leaf_of = {id_: number for number, leaf in enumerate(items) for id_ in leaf[2]}
    words = sorted(text.find(word) for word in (THOUGHT, SAID, FIRST, SECOND) if word in text)
    assert len({leaf_of[at] for at in words}) == len(words), items
    for before, after in zip([None, *words], [*words, None], strict=True):
        start, end = before or 0, len(text) if after is None else after
        opening = places(text, marks(dialect, opening=True), start, end)
        closing = places(text, marks(dialect, opening=False), start, end) - opening
        if after is not None:
            assert {leaf_of[offset] for offset in opening} <= {leaf_of[after]}, items
        if before is not None:
            assert {leaf_of[position] for position in closing} <= {leaf_of[before]}, items


def is_in(text: str, tokens: str) -> bool:
    """Whether the characters of a text come among those of the tokens, in this order."""
    rest = iter(tokens)
    return all(character in rest for character in text)


@pytest.mark.parametrize("name", NAMES)
@examples(10)
@given(seed=st.integers(0, 2**32))
def test_what_a_part_says_is_in_its_own_tokens(name: str, seed: int) -> None:
    chance, dialect = Random(seed), get_dialect(name)
    text = soup(dialect, chance)
    items = read(dialect, text)
    tried(len(items) > 1 or len(text) < 100)
    assert [id_ for leaf in items for id_ in leaf[2]] == list(range(len(text)))
    in_call: list[int] = []
    for kind, value, ids in items:
        if kind in ("text", "reasoning") and not (dialect.prepends or dialect.replaced):
            tokens = "".join(text[id_] for id_ in [*in_call, *ids])
            # Pieces of a header that is not understood are lines, and may come behind the body.
            words = "".join(value.split())
            is_there = Counter(words) <= Counter(tokens) if dialect.channels else is_in(words, tokens)
            assert is_there, items
        in_call = ids if kind == "call" else []
    assert read(dialect, text, chance.randint(2, 40)) == items


@pytest.mark.parametrize("name", NAMES)
def test_the_server_shares_ids_out_alike(name: str) -> None:
    """Bytes are its ids here, and a stop string that never comes holds texts back."""
    dialect = get_dialect(name)
    text = example(dialect)
    reading = ParseOptions(tools=tuple(TOOLS))
    script = Script(list(text.encode()), burst=7)
    for stop in ((), ("Hmmm, no",)):
        events = events_of(ScriptedEngine(script), spec(parsing=reading, stop=stop), dialect)
        shared = [(kind, bytes(ids).decode()) for kind, _, ids in leaves(events)]
        assert shared == [(kind, "".join(text[id_] for id_ in ids)) for kind, _, ids in read(dialect, text)]
