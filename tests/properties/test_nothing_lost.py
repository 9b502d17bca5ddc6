"""Nothing that a model wrote vanishes, and nothing of its structure is text where an answer is cut off.

The first law counts. Letters of an alphabet that no marker has in it stand everywhere: in prose, names, keys,
values and headers, between markers in any order, whole and broken. However wrong the structure is, each of
them must be told: in the text, the reasoning, a name, an id or the arguments, and none of them twice.
"""

import json
import random
import re
from collections.abc import Iterator
from functools import cache
from itertools import accumulate

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dragoman.dialects.declarations import Dialect
from dragoman.dialects.marker_tables import SPECIAL, compile_dialect
from dragoman.dialects.registry import get_dialect
from dragoman.dialects.render import render
from dragoman.types import Answer
from tests.dialects.test_tokens import read as read_tokens
from tests.dialects.test_tokens import specials, tokens
from tests.support.dialects import NAMES, call, markers, pieces, read, tool
from tests.support.laws import examples

every_dialect = pytest.mark.parametrize("name", NAMES)

# What is counted

LETTERS = "αβγδεζηθικλμνξοπρστυφχψω"
COUNTED = re.compile(f"[{LETTERS}]")
WORDS = [*LETTERS, "αβ", "γ δ", "ε\n", " ζ ", "η.", "θ:0", "ι(", "κ=", "λ<μ", '"ν"', "ξ>"]
FRAMES = [
    *"{}[],:;()=<>\"' \n|",
    *("</", "```", "null", "f", "function", "to=", "functions.", "index=", "item", "<a>", "</a>", "{a:"),
    *(
        "f(a=",
        'type="',
        '"}}',
        '"name"',
        '"arguments"',
        '"id"',
        '{"name": "',
        '", "arguments": {',
        '{"a": "',
        "all\n",
        "```json\n",
    ),
]
MEMBERS = """
    "name": "f" | "name": "α" | "name": "β" | "name": "" | "name": 1 | "function": "γ" | "tool_name": "f"
    "arguments": {} | "arguments": {"δ": "ε"} | "parameters": {"a": "ζ"} | "args": {"a": [1, "η"]}
    "arguments": null | "arguments": "θ" | "arguments": {ι} | "id": "123" | "id": "κ" | "type": "function"
    "λ": 1 | "μ": {"a": "ν"} | "tool_call_id": "ξ" | "f": {"a": "ο"} | 'name': 'f' | 'arguments': {'a': 'π'}
    "tool_name": "directly-answer" | 'ρ': 2 | "arguments": {"a": σ
"""
TOOLS = [tool("f", a={"type": "string"}, α={"type": "string"}), tool("g", β={"type": "string"})]
TEXTS = 10
"""Of each example: most of the time goes into the choice of an example, not into reading it."""


def write(dialect: Dialect, chance: random.Random) -> str:
    """A text in which little is in its place."""
    marks = [*markers(dialect), *(mark.strip() for mark in markers(dialect))] or ["<think>"]
    halves = [mark[: chance.randint(1, len(mark))] for mark in marks]
    objects = [_write_object(chance) for _ in range(3)]
    kinds = [WORDS, WORDS, marks, marks, FRAMES, halves, objects, _write_calls(dialect) or WORDS]
    text = "".join(chance.choice(chance.choice(kinds)) for _ in range(chance.randint(1, 20)))
    if chance.random() < 0.5 and dialect.calls and dialect.calls[0].open:
        # What follows is taken for a call for longer.
        text = chance.choice(dialect.calls[0].open) + chance.choice(("", *objects)) + text
    return text[: chance.randint(1, len(text))] if chance.random() < 0.3 else text


def _write_object(chance: random.Random) -> str:
    """Something like a call in JSON, with members that belong there and others."""
    members = [member.strip() for member in re.split(r"\||\n", MEMBERS.strip())]
    chosen = chance.choices(members, k=chance.randint(0, 4))
    return "{" + ", ".join(chosen) + chance.choice(("}", "}", "}}", "", "]"))


@cache
def _write_calls(dialect: Dialect) -> list[str]:
    """Whole calls and parts of them, with counted letters for names and values."""
    return [
        re.sub("get_weather|city|X|Par|is", lambda match: LETTERS[len(match.group()) % 24], piece)
        for piece in pieces(dialect)
        if "f" in piece and len(piece) > 8
    ]


def told(answer: Answer, *, ids: bool) -> str:
    calls = [
        tool_call.name + _unescape(tool_call.arguments) + ((tool_call.id or "") if ids else "")
        for tool_call in answer.calls
    ]
    return "".join([answer.text, answer.reasoning, *calls])


def _unescape(arguments: str) -> str:
    return re.sub(r"\\u[0-9a-fA-F]{4}", lambda match: str(json.loads(f'"{match.group()}"')), arguments)


def count(text: str) -> int:
    return len(COUNTED.findall(text))


def count_once(text: str) -> int:
    """Without the closing tags of a tree, which repeat what the opening ones say."""
    return count(re.sub(r"\[>\[</[^<>]*>", "", text))


def check(text: str, answer: Answer) -> None:
    assert count(told(answer, ids=True)) >= count_once(text), text
    assert count(told(answer, ids=False)) <= count(text), text


@every_dialect
@examples(6)
@given(seed=st.integers(0, 2**32), starts=st.booleans())
@example(seed=0, starts=False)
def test_every_letter_is_told_once(name: str, seed: int, starts: bool) -> None:
    dialect, chance = get_dialect(name), random.Random(seed)
    for _ in range(TEXTS):
        text = write(dialect, chance)
        check(text, read(dialect, [text], tools=TOOLS, starts_in_reasoning=starts))


@every_dialect
@examples(3)
@given(seed=st.integers(0, 2**32))
def test_every_letter_is_told_once_where_markers_are_special_tokens(name: str, seed: int) -> None:
    dialect, chance, special = get_dialect(name), random.Random(seed), specials(get_dialect(name))
    for _ in range(TEXTS):
        text = write(dialect, chance)
        check(text, read_tokens(dialect, tokens(text, special), special, size=1000))


MARKED = [name for name in NAMES if all(shape.open or shape.section for shape in get_dialect(name).calls)]


@pytest.mark.parametrize("name", [name for name in MARKED if not get_dialect(name).prepends])
@examples(4)
@given(seed=st.integers(0, 2**32))
def test_what_has_no_whole_marker_in_it_is_text(name: str, seed: int) -> None:
    """To the last character, but for a marker that is cut off behind a special token."""
    dialect, chance = get_dialect(name), random.Random(seed)
    channels = dialect.channels
    whole = [*compile_dialect(dialect).text.meanings, *(one for one, _ in dialect.replaced)]
    whole += (*channels.start, *channels.ends, *channels.header, channels.body) if channels else ()
    for _ in range(TEXTS):
        halves = [mark[: chance.randint(1, len(mark))] for mark in markers(dialect)] or ["<"]
        parts = [chance.choice(chance.choice([WORDS, FRAMES, halves])) for _ in range(chance.randint(1, 12))]
        text = "".join(parts)
        if not any(mark in text for mark in whole):
            value = read(dialect, [text]).text
            assert text.startswith(value)
            assert SPECIAL.match(text, len(value)) or text == value, text


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("muse_glimmer", "to=α<β is false", "to=α<β is false"),
        ("harmony", "<|channel|>commentary to=assistant<|channel|>final<|message|>αβγ", "αβγ"),
        ("harmony", "<|channel|>α<|message|>β<|end|>", "α\nβ"),
        ("functionary_v32", "\nαβ", "\nαβ"),
    ],
)
def test_an_answer_that_once_vanished(name: str, text: str, says: str) -> None:
    answer = read(get_dialect(name), [text])
    check(text, answer)
    assert answer.text == says


# What is cut off

TOKEN = r"<[|｜][^<>]*?[|｜]?>|<[^<>]*[|｜]>"
TOKENS = re.compile(rf"({TOKEN}|\[/?[A-Z_]+\]|◁/?think▷|<[^<>\s]+>)")
WORDY = {"apriel", "functionary_v32"}
"""Their markers are words, the beginnings of which are text."""


def answer_of(dialect: Dialect, *, calls: bool) -> Answer:
    channels = dialect.channels
    thinks = dialect.reasoning is not None or (channels is not None and channels.written[0])
    tool_calls = [call("f", '{"a": "b c"}'), call("g", "{}")] if calls and dialect.has_calls else []
    return Answer(text="Yes, no.", reasoning="Hm, so." if thinks else "", calls=tool_calls)


def cut_off(text: str) -> Iterator[str]:
    """The text, ended in all places but within a special token: nobody can write half of one."""
    parts = [part for part in TOKENS.split(text) if part]
    return accumulate(token for part in parts for token in ([part] if TOKENS.fullmatch(part) else part))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in WORDY])
@pytest.mark.parametrize("by_id", [True, False], ids=["ids", "text"])
def test_an_answer_that_is_cut_off_is_the_beginning_of_the_whole(name: str, by_id: bool) -> None:
    dialect = get_dialect(name)
    answer, special = answer_of(dialect, calls=False), specials(dialect)
    for text in cut_off(render(dialect, answer)):
        result = read_tokens(dialect, tokens(text, special), special) if by_id else read(dialect, [text])
        assert answer.reasoning.startswith(result.reasoning.strip()), text
        assert answer.text.startswith(result.text.removeprefix(dialect.prepends).strip()), text


@every_dialect
def test_no_special_token_is_text_where_a_call_is_cut_off(name: str) -> None:
    dialect = get_dialect(name)
    for text in cut_off(render(dialect, answer_of(dialect, calls=True))):
        answer = read(dialect, [text], tools=TOOLS)
        assert not re.search(TOKEN, answer.text + answer.reasoning), text
