"""Calls that reasoning is about, and calls that end it."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.dialects.declarations import prompt_opened_reasoning
from dragoman.dialects.parser import parse, parse_reasoning_complete
from dragoman.dialects.registry import get_dialect
from dragoman.dialects.render import render
from dragoman.engines.scripted import Script, ScriptedEngine
from dragoman.turns.spec import ParseOptions
from dragoman.types import Answer
from tests.support.dialects import NAMES, TOOLS, call, cut, read, soup
from tests.support.laws import examples
from tests.support.turns import answers_of, spec

ENDED_BY_CALL = [
    name for name in NAMES if (marks := get_dialect(name).reasoning) is not None and marks.ended_by_call
]
REASONS = [name for name in NAMES if get_dialect(name).reasoning and not get_dialect(name).channels]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize(
    "thought",
    [
        "Use `<tool_call>` tags.",
        f"Shall I say `{CALL}`?",
        f'It says "{CALL}" there.',
        f"I could write {CALL} but no.",
        f"Like so:\n```\n{CALL}\n```\nBut no.",
        "The marker (<tool_call>) opens it.",
        "\n<tool_call> opens it, I think.",
    ],
)
@pytest.mark.parametrize("calls", [True, False])
def test_a_call_that_is_mentioned_ends_nothing(thought: str, calls: bool) -> None:
    answer = parse(f"<think>{thought}</think>Yes.", "qwen3", calls=calls)
    assert (answer.reasoning, answer.text, answer.calls) == (thought.lstrip("\n"), "Yes.", [])


@pytest.mark.parametrize("before", ["", "Hm.\n\n", "Hm.", "thinking", "Hm. ", "I call it: ", "`f` it is.\n"])
def test_a_call_ends_reasoning(before: str) -> None:
    answer = parse(f"<think>{before}{CALL}", "qwen3")
    assert (answer.reasoning.strip(), answer.text) == (before.strip(), "")
    assert [(tool_call.name, tool_call.arguments) for tool_call in answer.calls] == [("f", '{"a": 1}')]
    left = parse(f"<think>{before}{CALL}", "qwen3", calls=False)
    assert (left.reasoning, left.text.strip()) == (answer.reasoning, CALL)


@pytest.mark.parametrize("end", ["", "</think>Yes."])
def test_what_only_looks_like_a_call_ends_reasoning_that_is_never_closed(end: str) -> None:
    answer = parse(f"<think>Hm.\n<tool_call>f or g?{end}", "qwen3")
    thought = "Hm." if not end else "Hm.\n<tool_call>f or g?"
    assert (answer.reasoning, answer.text.strip()) == (thought, "<tool_call>f or g?" if not end else "Yes.")


@pytest.mark.parametrize("name", ENDED_BY_CALL)
def test_every_dialect_tells_mentions_from_calls(name: str) -> None:
    dialect = get_dialect(name)
    assert dialect.reasoning is not None
    written = render(dialect, Answer(calls=[call("f", '{"a": 1}')])).strip()
    opened, closed = dialect.reasoning.open[0], dialect.reasoning.close[0]
    mentioned = read(dialect, list(f"{opened}I could write {written} but no.{closed}Yes."))
    assert (len(mentioned.calls), mentioned.text.strip()) == (0, "Yes.")
    answer = read(dialect, list(f"{opened}Hm.\n{written}"))
    assert ([one.name for one in answer.calls], answer.reasoning.strip()) == (["f"], "Hm.")


def thoughts(name: str, chance: Random) -> str:
    """Reasoning with calls in all places, closed or not."""
    dialect = get_dialect(name)
    assert dialect.reasoning is not None
    marker = dialect.calls[0].open[:1] if dialect.calls else ()
    written = render(dialect, Answer(calls=[call("f", '{"a": 1}')])) if dialect.calls else "f()"
    pieces = [
        "Hm",
        " so",
        ".",
        " ",
        "\n",
        "`",
        '"',
        "```",
        "{",
        written,
        written.strip(),
        *marker,
        written[:9],
    ]
    body = "".join(chance.choice(pieces) for _ in range(chance.randint(1, 12)))
    opened = chance.choice(("", dialect.reasoning.open[0]))
    return opened + body + chance.choice(("", dialect.reasoning.close[0] + "Yes."))


@pytest.mark.parametrize("name", REASONS)
@examples(8)
@given(seed=st.integers(0, 2**32))
def test_parse_reasoning_complete_and_the_server_agree(name: str, seed: int) -> None:
    dialect, text = get_dialect(name), thoughts(name, Random(seed))
    inside = prompt_opened_reasoning(dialect, text)
    whole = parse_reasoning_complete(text, name)
    engine = ScriptedEngine(Script(list(text.encode()), burst=5))
    for calls in (True, False):
        reading = ParseOptions(calls=calls, tools=tuple(TOOLS) if calls else ())
        (answer,) = answers_of(engine, spec(parsing=reading), dialect, in_reasoning=inside)
        assert answer.reasoning == whole["reasoning_text"], calls
        assert calls or answer.text == whole["normal_text"]


@pytest.mark.parametrize("name", REASONS)
@examples(8)
@given(seed=st.integers(0, 2**32))
def test_cuts_change_nothing_where_calls_are_mentioned(name: str, seed: int) -> None:
    chance, dialect = Random(seed), get_dialect(name)
    text = thoughts(name, chance) + soup(dialect, chance, 3)
    for calls in (True, False):
        one, other = (read(dialect, pieces, calls=calls) for pieces in ([text], cut(text, chance)))
        assert (one.text, one.reasoning) == (other.text, other.reasoning)


@pytest.mark.parametrize("name", ["deepseek_r1", "qwen3_thinking"])
def test_models_that_always_reason_need_no_marker(name: str) -> None:
    assert parse_reasoning_complete("Hm.", name) == {"normal_text": "", "reasoning_text": "Hm."}
    assert parse_reasoning_complete("Hm.", "qwen3") == {"normal_text": "Hm.", "reasoning_text": ""}
