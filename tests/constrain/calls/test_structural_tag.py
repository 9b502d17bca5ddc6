"""Structural tags say what the dialects say: whatever is written by one is read by the other."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from dragoman.constrain.calls.structural_tag import Format, after_reasoning, calls_format
from dragoman.constrain.calls.tool_schemas import read_tools
from dragoman.dialects.parser import parse
from dragoman.dialects.registry import get_dialect, list_dialects

DECLARED = [{"function": {"name": name, "parameters": {"type": "object"}}} for name in ("get_weather", "add")]
TOOLS = read_tools(DECLARED, None, None)
ARGUMENTS = '{"n": [1, "}"]}'


def samples(format_: Format) -> Iterator[str]:
    """Texts that the format allows, with every tag in them."""
    match format_["type"]:
        case "const_string":
            yield format_["value"]
        case "json_schema":
            yield ARGUMENTS
        case "any_text":
            yield "Hm."
        case "or":
            for element in format_["elements"]:
                yield from samples(element)
        case "sequence":
            yield from map("".join, product(*map(samples, format_["elements"])))
        case "tag":
            for inside in samples(format_["content"]):
                yield format_["begin"] + inside + format_["end"]
        case "tags_with_separator":
            tags = [text for tag in format_["tags"] for text in samples(tag)]
            yield from tags
            if not format_["stop_after_first"]:
                yield format_["separator"].join([*tags, *tags])
        case "triggered_tags":
            for tag in format_["tags"]:
                assert tag["begin"].startswith(tuple(format_["triggers"]))
                yield from ("Well.\n" + text for text in samples(tag))


def formats(**how: Any) -> list[tuple[str, Format]]:
    fields = {
        name: calls_format(dialect, TOOLS, **how)
        for name, dialect in list_dialects().items()
        if dialect.has_calls and dialect.response_template is None
    }
    return [(name, format_) for name, format_ in fields.items() if format_ is not None]


@pytest.mark.parametrize(("name", "format_"), formats(required=True, parallel=True))
def test_calls_are_read_as_they_are_written(name: str, format_: Format) -> None:
    for text in samples(format_):
        answer = parse(text, name, DECLARED)
        assert {call.arguments for call in answer.calls} == {ARGUMENTS}
        assert {call.name for call in answer.calls} <= {"get_weather", "add"}
        assert answer.text.strip() == ""


@pytest.mark.parametrize(("name", "format_"), formats(required=False, parallel=True))
def test_calls_in_text_are_read_as_they_are_written(name: str, format_: Format) -> None:
    for text in samples(format_):
        answer = parse(text, name, DECLARED)
        assert {call.arguments for call in answer.calls} == {ARGUMENTS}
        assert answer.text.strip() == "Well."


@pytest.mark.parametrize("required", [True, False])
def test_one_call_is_one_call(required: bool) -> None:
    for name, format_ in formats(required=required, parallel=False):
        assert {len(parse(text, name, DECLARED).calls) for text in samples(format_)} == {1}


@pytest.mark.parametrize("begun", [True, False])
def test_reasoning_before_calls_is_read(begun: bool) -> None:
    dialect = get_dialect("hermes")
    calls = calls_format(dialect, TOOLS, required=True, parallel=False)
    assert calls is not None
    answers = [
        parse(text, dialect, DECLARED, begun)
        for text in samples(after_reasoning(dialect, calls, begun=begun))
    ]
    assert {answer.reasoning for answer in answers} == ({"Hm."} if begun else {"Hm.", ""})
    assert {len(answer.calls) for answer in answers} == {1}


def test_numbered_calls_come_alone() -> None:
    """Their numbers would have to grow, and no tag can count."""
    calls = calls_format(get_dialect("kimi_k2"), TOOLS, required=True, parallel=True)
    assert calls is not None
    assert calls["stop_after_first"] is True


@pytest.mark.parametrize("name", ["glm45", "pythonic", "qwen3_coder", "harmony"])
def test_arguments_that_are_not_json_have_no_tags(name: str) -> None:
    assert calls_format(get_dialect(name), TOOLS, required=True, parallel=True) is None
