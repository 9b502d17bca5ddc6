import json
from typing import Any

import pytest

from dragoman.api import completions as completions_request
from dragoman.api.chat import request as chat_request
from dragoman.errors import BadRequest
from dragoman.limits import Limits
from dragoman.turns.spec import OutputConstraint

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
GBNF = 'root ::= "a" | "b"'
LARK = 'start: "a" | "b"'


def wanted(**fields: Any) -> OutputConstraint | None:
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    return chat_request.spec(chat_request.read(json.dumps(body).encode(), Limits())).output_constraint


def refused(**fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        wanted(**fields)
    return caught.value


CASES: list[tuple[str, Any, str, Any, str]] = [
    ("response_format", {"type": "json_object"}, "json_object", None, ""),
    ("response_format", {"type": "json_object", "schema": SCHEMA}, "json_schema", SCHEMA, ".schema"),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": True}},
     "json_schema", SCHEMA, ".json_schema.schema"),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": False}},
     "json_schema", False, ".json_schema.schema"),
    ("guided_json", SCHEMA, "json_schema", SCHEMA, ""),
    ("guided_json", json.dumps(SCHEMA), "json_schema", json.dumps(SCHEMA), ""),
    ("json_schema", SCHEMA, "json_schema", SCHEMA, ""),
    ("guided_regex", "a+", "regex", "a+", ""),
    ("regex", "a+", "regex", "a+", ""),
    ("regex_pattern", "a+", "regex", "a+", ""),
    ("guided_choice", ["a", "b"], "choice", ["a", "b"], ""),
    ("guided_grammar", GBNF, "gbnf", GBNF, ""),
    ("guided_grammar", LARK, "lark", LARK, ""),
    ("ebnf", GBNF, "gbnf", GBNF, ""),
    ("grammar", GBNF, "gbnf", GBNF, ""),
    ("grammar", LARK, "lark", LARK, ""),
    ("grammar_string", GBNF, "gbnf", GBNF, ""),
    ("structured_outputs", {"json": SCHEMA}, "json_schema", SCHEMA, ".json"),
    ("structured_outputs", {"regex": "a"}, "regex", "a", ".regex"),
    ("structured_outputs", {"choice": ["a"]}, "choice", ["a"], ".choice"),
    ("structured_outputs", {"grammar": LARK}, "lark", LARK, ".grammar"),
    ("structured_outputs", {"json_object": True}, "json_object", None, ".json_object"),
]  # fmt: skip


@pytest.mark.parametrize(("field", "given", "syntax", "value", "place"), CASES)
def test_every_name_leads_to_the_same_thing(
    field: str, given: Any, syntax: str, value: Any, place: str
) -> None:
    constraint = wanted(**{field: given})
    assert constraint is not None
    assert (constraint.syntax, constraint.value, constraint.param) == (syntax, value, field + place)


def test_tags_older_and_newer() -> None:
    tags = {"format": {"type": "any_text"}, "structures": None, "triggers": None}
    constraint = wanted(response_format={"type": "structural_tag", "format": {"type": "any_text"}})
    assert constraint == OutputConstraint(syntax="structural_tag", value=tags, param="response_format")
    param = "structured_outputs.structural_tag"
    constraint = wanted(structured_outputs={"structural_tag": "{}"})
    assert constraint == OutputConstraint(syntax="structural_tag", value="{}", param=param)


def test_the_first_line_may_say_that_a_grammar_is_lark() -> None:
    constraint = wanted(grammar='%llguidance {}\nstart: "::="')
    assert constraint == OutputConstraint(syntax="lark", value='start: "::="', param="grammar")


def test_the_same_by_two_names_is_one() -> None:
    constraint = wanted(guided_grammar=GBNF, structured_outputs={"grammar": GBNF})
    assert constraint == OutputConstraint(syntax="gbnf", value=GBNF, param="structured_outputs.grammar")


def test_completions_know_them_too() -> None:
    body = json.dumps({"prompt": "hi", "guided_regex": "a"}).encode()
    constraint = completions_request.spec(completions_request.read(body, Limits())).output_constraint
    assert constraint == OutputConstraint(syntax="regex", value="a", param="guided_regex")


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"guided_json": None}])
def test_nothing_is_wanted(fields: dict[str, Any]) -> None:
    assert wanted(**fields) is None


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"guided_regex": "a", "guided_json": {}}, "guided_regex", "invalid_value"),
        ({"response_format": {"type": "json_object"}, "grammar": GBNF}, "grammar", "invalid_value"),
        (
            {"structured_outputs": {"json": {}, "regex": "a"}},
            "structured_outputs.regex",
            "invalid_value",
        ),
        ({"structured_outputs": {}}, "structured_outputs", "invalid_value"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs", "invalid_value"),
        ({"structured_outputs": {"xml": 1}}, "structured_outputs.xml", "unknown_field"),
        (
            {"response_format": {"type": "structural_tag", "format": []}},
            "response_format.format",
            "invalid_value",
        ),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema.schema",
            "missing_field",
        ),
        (
            {"response_format": {"type": "text", "json_schema": {"schema": {}}}},
            "response_format.type",
            "invalid_value",
        ),
        ({"guided_choice": [1]}, "guided_choice[0]", "invalid_value"),
        ({"guided_json": 1}, "guided_json", "invalid_value"),
        ({"guided_whitespace_pattern": "x"}, "guided_whitespace_pattern", "unsupported_field"),
    ],
)
def test_what_cannot_be_meant(fields: dict[str, Any], param: str, code: str) -> None:
    error = refused(**fields)
    assert (error.param, error.code) == (param, code)
