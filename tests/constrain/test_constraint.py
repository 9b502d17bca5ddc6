"""What each way to declare a constraint accepts, and what it says when it cannot be compiled."""

import json

import pytest

import dragoman
from dragoman.errors import BadRequest

Constraint = dragoman.Constraint


def refused(kind: str, source: object) -> BadRequest:
    with pytest.raises(BadRequest) as error:
        getattr(Constraint, kind)(source, "here")
    return error.value


def test_expressions_match_from_end_to_end() -> None:
    constraint = Constraint.from_regex(r"^\d{3}-[a-z/]+$")
    assert (
        constraint.accepts("123-a/b")
        and not constraint.accepts("x123-a")
        and not constraint.accepts("123-a\n")
    )


def test_choices() -> None:
    constraint = Constraint.from_choice(["yes", 'n"o\n', "no", "é"])
    assert all(constraint.accepts(text) for text in ["yes", 'n"o\n', "no", "é"])
    assert not constraint.accepts("n") and not constraint.accepts("yesno")


def test_lark() -> None:
    constraint = Constraint.from_lark('start: "<" %json {"type": "integer"} ">"')
    assert constraint.accepts("<12>") and not constraint.accepts("<>") and not constraint.accepts("<12")


def test_a_grammar_does_not_choose_how_it_is_run() -> None:
    constraint = Constraint.from_lark('%llguidance {"no_forcing": false}\nstart: "ab" | "abc"')
    assert constraint.accepts("ab") and constraint.accepts("abc")


def test_json_objects() -> None:
    constraint = Constraint.from_json_object()
    assert constraint.accepts('{"a": [1, {"b": null}]}') and constraint.accepts("{}")
    assert (
        not constraint.accepts("[]")
        and not constraint.accepts('{"a": }')
        and not constraint.accepts('{"a": 1}{')
    )


def test_properties_come_in_the_order_of_the_schema() -> None:
    constraint = Constraint.from_json_schema({"properties": {"b": {}, "a": {}}})
    assert constraint.accepts('{"b": 1, "a": 2, "c": 3}') and not constraint.accepts('{"a": 2, "b": 1}')


def test_indented_json_is_accepted_and_endless_space_is_not() -> None:
    constraint = Constraint.from_json_schema({"type": "object"})
    assert constraint.accepts(json.dumps({"a": [1, {"b": [2, 3]}]}, indent=4))
    assert (
        not constraint.accepts('{"a":  1}')
        and not constraint.accepts('{\n\n"a": 1}')
        and not constraint.accepts(" {}")
    )


def test_a_schema_may_be_text_or_true() -> None:
    assert Constraint.from_json_schema('{"type": "null"}').accepts("null")
    assert Constraint.from_json_schema(True).accepts("[1]")


@pytest.mark.parametrize(
    ("kind", "source", "word"),
    [
        ("from_regex", "(?=a)", "has a lookaround"),
        ("from_regex", 5, "string"),
        ("from_lark", "start: nothing", "line 1"),
        ("from_lark", "start: 'a'\nb: (((", "Lark"),
        ("from_lark", 'start: %json {"not": {}}', "#/not"),
        ("from_lark", 'start: %json {"x-guidance": {"lenient": true}, "uniqueItems": true}', "x-guidance"),
        ("from_lark", 'start: %json {"uniqueItems": true, "items": {"type": "string"}}', "uniqueItems"),
        ("from_lark", 'start: %json {"multipleOf": 123456789}', "multipleOf"),
        ("from_lark", "start: %json nothing", "%json"),
        ("from_gbnf", "a ::= b", "root"),
        ("from_gbnf", 'root ::= "a', "line 1"),
        ("from_choice", [], "at least one"),
        ("from_choice", ["a", 5], "string"),
        ("from_json_schema", "{", "JSON"),
        ("from_json_schema", {"not": {}}, "#/not"),
        ("from_json_schema", {"const": object()}, "JSON"),
    ],
)
def test_what_is_wrong_is_named(kind: str, source: object, word: str) -> None:
    error = refused(kind, source)
    assert word in error.message and (error.param or "").startswith("here") and error.status == 400
