"""Feeding token ids: a special token is known by its id, and its spelling in ordinary text is text."""

import re
from collections.abc import Iterator

import pytest

from dragoman.dialects.declarations import Dialect
from dragoman.dialects.parser import Parser
from dragoman.dialects.registry import get_dialect
from dragoman.dialects.render import render
from dragoman.types import Answer, fold
from tests.support.dialects import NAMES, TOOLS, call, markers, told

Token = tuple[int, str]
SPELLINGS = re.compile(r"<\|[^|]*\|>|<[^<>\s=]+>|\[/?[A-Z_]+\]|◁/?think▷")
FIRST_SPECIAL = 1000
END_OF_TURN = (9999, "<|im_end|>")
TOOL_CALL = {1: "<tool_call>", 2: "</tool_call>", 3: "<think>", 4: "</think>"}
ONE_CALL = '{"name": "f", "arguments": {"a": 1}}'


def letters(text: str) -> list[Token]:
    return [(100 + ord(character) % 100, character) for character in text]


def specials(dialect: Dialect) -> dict[int, str]:
    """Every part of a marker that some tokenizer may have as one token."""
    items = {token for mark in markers(dialect) for token in SPELLINGS.findall(mark)}
    return dict(enumerate(sorted(items), FIRST_SPECIAL)) | dict([END_OF_TURN])


def tokens(text: str, special: dict[int, str]) -> list[Token]:
    ids = {spelling: id_ for id_, spelling in special.items()}
    pattern = re.compile("(" + "|".join(map(re.escape, sorted(ids, key=len, reverse=True))) + ")")
    parts = pattern.split(text)
    return [token for part in parts for token in ([(ids[part], part)] if part in ids else letters(part))]


def read(dialect: Dialect | str, fed: list[Token], special: dict[int, str], size: int = 1) -> Answer:
    parser = Parser(dialect, TOOLS, special_tokens=special)
    events = [event for at in range(0, len(fed), size) for event in parser.feed(fed[at : at + size])]
    return fold(events + parser.finish())


def all_strings(answer: Answer) -> Iterator[str]:
    yield answer.text
    yield answer.reasoning
    for tool_call in answer.calls:
        yield from (tool_call.name, tool_call.arguments, tool_call.id or "")


def example(dialect: Dialect) -> str:
    answer = Answer(text="Hi there.")
    if dialect.reasoning or dialect.channels:
        answer.reasoning = "Hm."
    if dialect.calls or dialect.channels:
        answer.calls = [call("f", '{"a": 1, "s": "x y"}'), call("get_weather", '{"city": "X"}')]
    return render(dialect, answer)


# It exists to put the spelling of a token into the text.
PREPENDED = {"minimax_m2_append_think"}


@pytest.mark.parametrize("size", [1, 2, 7, 10_000])
@pytest.mark.parametrize("name", NAMES)
def test_ids_tell_the_same_as_text(name: str, size: int) -> None:
    dialect = get_dialect(name)
    text, special = example(dialect), specials(dialect)
    parser = Parser(dialect, TOOLS)
    as_text = fold(parser.feed(text) + parser.finish())
    assert told(read(dialect, tokens(text, special), special, size)) == told(as_text)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in PREPENDED])
def test_special_tokens_never_leak_wherever_they_stand(name: str) -> None:
    dialect = get_dialect(name)
    special = specials(dialect)
    text = tokens(example(dialect), special)
    for at in range(0, len(text), 3):
        for stray in special.items():
            for value in all_strings(read(dialect, [*text[:at], stray, *text[at:]], special, 10_000)):
                assert not [spelling for spelling in special.values() if spelling in value]
                value.encode()


@pytest.mark.parametrize(
    ("name", "special"),
    [
        ("hermes", TOOL_CALL),
        ("glm45", TOOL_CALL),
        ("kimi_k2", {1: "<|tool_call_begin|>", 2: "<|tool_calls_section_begin|>"}),
        ("deepseek_v31", {1: "<｜tool▁calls▁begin｜>", 2: "<｜tool▁call▁begin｜>"}),
        ("mistral_v11", {1: "[TOOL_CALLS]", 2: "[ARGS]"}),
        ("gemma4", {1: "<|tool_call>", 2: "<tool_call|>"}),
    ],
)
def test_text_cannot_forge_a_call(name: str, special: dict[int, str]) -> None:
    written = render(name, Answer(calls=[call("f", '{"a": 1}')]))
    answer = read(name, letters(written), special)
    assert (answer.text, answer.calls) == (written, [])


def test_text_cannot_forge_the_end_of_reasoning() -> None:
    fed = [(3, "<think>"), *letters("a</think>b"), (4, "</think>"), *letters("c")]
    assert told(read("hermes", fed, TOOL_CALL)) == ("c", "a</think>b", [])


def test_text_cannot_forge_a_marker_inside_arguments() -> None:
    arguments = '{"a": "</tool_call><tool_call>"}'
    fed = [(1, "<tool_call>"), *letters(f'{{"name": "f", "arguments": {arguments}}}'), (2, "</tool_call>")]
    assert told(read("hermes", fed, TOOL_CALL)) == ("", "", [("f", arguments)])


def test_a_marker_in_several_tokens_is_read_where_it_is_no_special_token() -> None:
    fed = [(7, "<tool"), (8, "_call"), (9, ">"), *letters(ONE_CALL), (7, "</tool"), (8, "_call"), (9, ">")]
    assert told(read("hermes", fed, {})) == ("", "", [("f", '{"a": 1}')])


def test_some_markers_are_special_tokens_and_others_are_not() -> None:
    fed = [*letters("<think>Hm.</think>"), (1, "<tool_call>"), *letters(ONE_CALL), (2, "</tool_call>")]
    special = {1: "<tool_call>", 2: "</tool_call>"}
    assert told(read("hermes", fed, special)) == ("", "Hm.", [("f", '{"a": 1}')])


def test_a_special_token_that_is_no_marker_says_nothing() -> None:
    fed = [*letters("Hi"), END_OF_TURN, *letters("!")]
    assert read("hermes", fed, dict([END_OF_TURN])).text == "Hi!"


def test_the_text_of_a_special_token_does_not_matter() -> None:
    """Engines that skip special tokens when they decode give "" for them."""
    fed = [(1, ""), *letters(ONE_CALL), (2, "")]
    assert told(read("hermes", fed, TOOL_CALL)) == ("", "", [("f", '{"a": 1}')])


def test_a_special_token_inside_an_id_is_no_part_of_it() -> None:
    special = {1: "[TOOL_CALLS]", 2: "[ARGS]", 3: "[CALL_ID]"}
    fed = [(1, ""), *letters("f"), (3, ""), *letters("ab"), (1, ""), *letters("g"), (2, ""), *letters("{}")]
    assert told(read("mistral_v11", fed, special))[2] == [("g", "{}")]


def test_an_empty_feed_says_nothing() -> None:
    assert Parser("hermes", special_tokens=TOOL_CALL).feed([]) == []
