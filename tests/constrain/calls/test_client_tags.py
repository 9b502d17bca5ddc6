"""Structural tags that clients send."""

import json
from typing import Any

import pytest

from dragoman.constrain.calls.structural_tag import read_tags
from dragoman.errors import BadRequest
from dragoman.limits import Limits

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
OLDER: dict[str, Any] = {
    "triggers": ["<function="],
    "structures": [
        {"begin": "<function=weather>", "schema": SCHEMA, "end": "</function>"},
        {"begin": "<function=time>", "schema": {"type": "integer"}, "end": "</function>"},
    ],
}
CALL = '<function=weather>{"city": "Rome"}</function>'


def tag(begin: str, content: dict[str, Any], end: str) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def accepts(asked: dict[str, Any] | str, text: str) -> bool:
    return read_tags(asked, "response_format", Limits()).accepts(text)


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("no call at all", True),
        (CALL, True),
        (f"Let me see. {CALL} and {CALL}", True),
        ("At <function=time>12</function>.", True),
        ("<function=weather>{}</function>", False),
        ("<function=weather>not JSON</function>", False),
        ("<function=other>{}</function>", False),
        ("<function", True),
        ("<function=", False),
    ],
)
def test_what_begins_with_a_trigger_is_a_tag(text: str, fits: bool) -> None:
    assert accepts(OLDER, text) is fits
    assert accepts(json.dumps(OLDER), text) is fits


TAGS = {"type": "triggered_tags", "triggers": ["<f>"], "tags": [tag("<f>", {"type": "any_text"}, "</f>")]}


@pytest.mark.parametrize(
    ("asked", "fitting", "unfitting"),
    [
        ({"type": "const_string", "value": "yes"}, "yes", "no"),
        ({"type": "regex", "pattern": "[ab]+"}, "abba", "abc"),
        ({"type": "grammar", "grammar": 'root ::= "a" | "b"'}, "b", "c"),
        ({"type": "json_schema", "json_schema": SCHEMA}, '{"city": "Rome"}', "{}"),
        ({"type": "or", "elements": [{"type": "const_string", "value": one} for one in "ab"]}, "b", "c"),
        (
            {"type": "sequence", "elements": [{"type": "const_string", "value": ">"}, {"type": "any_text"}]},
            "> anything",
            "anything",
        ),
        (tag("<think>", {"type": "any_text"}, "</think>"), "<think>so < so</think>", "<think>so"),
        (TAGS, "a <f>b</f> c", "a <f>b"),
        ({**TAGS, "at_least_one": True}, "a <f>b</f> c", "a"),
        ({**TAGS, "at_least_one": True, "stop_after_first": True}, "a <f>b</f>", "<f>b</f> c"),
        (
            {
                "type": "tags_with_separator",
                "tags": [tag("[", SCHEMA | {"type": "any_text"}, "]")],
                "separator": ",",
            },
            "[a],[b]",
            "[a][b]",
        ),
    ],
)
def test_newer_formats(asked: dict[str, Any], fitting: str, unfitting: str) -> None:
    assert accepts({"format": asked}, fitting)
    assert not accepts({"format": asked}, unfitting)


@pytest.mark.parametrize(
    ("asked", "place"),
    [
        ({}, "response_format.structures"),
        ({**OLDER, "triggers": []}, "response_format.triggers"),
        ({**OLDER, "triggers": ["<other"]}, "response_format.structures[0].begin"),
        ({"format": {"type": "sort_of"}}, "response_format.format.type"),
        (
            {"format": tag("<", {"type": "regex", "pattern": "("}, ">")},
            "response_format.format.content.pattern",
        ),
        (
            {"format": {"type": "sequence", "elements": [{"type": "any_text"}, {"type": "any_text"}]}},
            "response_format.format.elements[0]",
        ),
        ("[]", "response_format"),
        ("{", "response_format"),
    ],
)
def test_what_is_wrong_is_named(asked: dict[str, Any] | str, place: str) -> None:
    with pytest.raises(BadRequest, match=r"'.*'") as caught:
        read_tags(asked, "response_format", Limits())
    assert caught.value.param == place


def test_markers_that_are_special_tokens() -> None:
    tags = read_tags({"format": TAGS}, "response_format", Limits(), {"<f>": 300})
    assert "<[300]>" in tags.grammar


def nested(depth: int) -> dict[str, Any]:
    return {"type": "or", "elements": [nested(depth - 1)]} if depth else {"type": "any_text"}


@pytest.mark.parametrize(
    "asked",
    [
        {"format": nested(40)},
        {**OLDER, "structures": OLDER["structures"] * 300},
        {**OLDER, "triggers": ["<" * 70_000]},
    ],
    ids=["deep", "many", "long"],
)
def test_limits(asked: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as caught:
        read_tags(asked, "response_format", Limits())
    assert caught.value.code == "limit_exceeded"
