"""Answers written in a dialect. What is hostile or broken is written as it can be, without raising."""

import json

import pytest

from dragoman.dialects.parser import parse
from dragoman.dialects.registry import list_dialects
from dragoman.dialects.render import render
from dragoman.types import Answer
from tests.support.dialects import call

BROKEN = [
    "",
    "not json",
    "null",
    '{"a":}',
    '{"a": "cut o',
    "{1: 2}",
    '{"a" 1}',
    '{"a": 1}}',
    '{"a": ' + "[" * 5000 + "]" * 5000 + "}",
]
every_dialect = pytest.mark.parametrize("dialect", list_dialects())


@every_dialect
@pytest.mark.parametrize("arguments", BROKEN, ids=[text[:12] for text in BROKEN])
def test_arguments_that_are_no_json_object_are_written_as_they_are(dialect: str, arguments: str) -> None:
    render(dialect, Answer(calls=[call("f", arguments)]))


@every_dialect
def test_half_a_surrogate_pair_can_be_encoded(dialect: str) -> None:
    render(dialect, Answer(calls=[call("f", '{"a": "x\\ud800y"}')])).encode()


@pytest.mark.parametrize(
    "dialect", ["hermes", "harmony", "muse_glimmer", "functionary_v32", "olmo3", "glm45"]
)
def test_words_in_braces_are_not_filled_in(dialect: str) -> None:
    answer = Answer(calls=[call("f", '{"a": "{body} {name} {arguments} {0}"}')])
    assert json.loads(parse(render(dialect, answer), dialect).calls[0].arguments) == {
        "a": "{body} {name} {arguments} {0}"
    }


def test_a_key_that_is_no_word_is_quoted_in_braces() -> None:
    written = render("gemma4", Answer(calls=[call("f", '{"a b": 1}')]))
    assert written == '<|tool_call>call:f{<|"|>a b<|"|>:1}<tool_call|>'
