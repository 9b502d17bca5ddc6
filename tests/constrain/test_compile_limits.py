"""Nothing that a client sends takes long: it is compiled quickly or refused."""

import json
import time
from typing import Any

import pytest

from dragoman.constrain.constraint import Constraint
from dragoman.errors import BadRequest
from dragoman.limits import Limits

MOST_SECONDS = 2.0
"""Of processor time; a tenth of it is usual for the worst."""


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        schema = {"properties": {"a": schema}}
    return schema


def holding_itself() -> dict[str, Any]:
    schema: dict[str, Any] = {}
    schema["properties"] = {"a": schema}
    return schema


def chain(length: int, *, through_lists: bool = False) -> dict[str, Any]:
    links: dict[str, Any] = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(length)}
    if through_lists:
        links = {name: {"items": {"properties": {"a": {"items": link}}}} for name, link in links.items()}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{length}": {"type": "null"}}}


def alike(width: int, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        schema = {"anyOf": [schema] * width}
    return {"oneOf": [schema, schema]}


PARENTHESES = "(" * 30_000 + "a" + ")" * 30_000
DOUBLING = "\n".join(f"r{n} ::= r{n + 1} r{n + 1}" for n in range(60))
MANY = [{"anyOf": [{"minimum": n}, {"maximum": n}]} for n in range(40)]
BOMBS: dict[str, tuple[str, Any]] = {
    "deep schema": ("from_json_schema", nested(500)),
    "schema that holds itself": ("from_json_schema", holding_itself()),
    "deep text": ("from_json_schema", '{"a":' * 30_000 + "1" + "}" * 30_000),
    "brackets": ("from_json_schema", "[" * 100_000),
    "long schema": ("from_json_schema", {"enum": ["x" * 100 + str(n) for n in range(1000)]}),
    "many properties": ("from_json_schema", {"properties": {f"p{n}": {"minLength": 1} for n in range(2000)}}),
    "fewer properties": ("from_json_schema", {"properties": {f"p{n}": {"minLength": 1} for n in range(500)}}),
    "chain of references": ("from_json_schema", chain(3000)),
    "shorter chain of references": ("from_json_schema", chain(900)),
    "chain through lists": ("from_json_schema", chain(900, through_lists=True)),
    "loop of references": ("from_json_schema", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#"}}}),
    "options that are alike": ("from_json_schema", alike(8, 6)),
    "many demands": ("from_json_schema", {"allOf": MANY}),
    "multiples": ("from_json_schema", {"multipleOf": 123456789}),
    "pattern of parentheses": ("from_json_schema", {"pattern": PARENTHESES}),
    "repeated repetition": ("from_json_schema", {"pattern": "(((a{1,99}){1,99}){1,99}){1,99}"}),
    "letters": ("from_json_schema", {"pattern": "^(\\p{L}{1,500}|\\p{N}{1,500}){1,500}$"}),
    "long strings": ("from_json_schema", {"minLength": 10**6, "maxLength": 10**7}),
    "long lists": ("from_json_schema", {"minItems": 10**6, "items": {"maxItems": 10**6}}),
    "parentheses": ("from_regex", PARENTHESES),
    "bomb": ("from_regex", "(a*)*(a|aa)*(.*a){30}.{1000}b"),
    "lookback bomb": ("from_regex", "(.*a.{25}){3}"),
    "GBNF parentheses": ("from_gbnf", "root ::= " + PARENTHESES),
    "GBNF doubling": ("from_gbnf", f"root ::= r0\n{DOUBLING}\nr60 ::= [a]"),
    "GBNF ambiguity": ("from_gbnf", 'root ::= root root root | "a" | ""'),
    "Lark parentheses": ("from_lark", "start: " + PARENTHESES),
    "Lark schema": ("from_lark", "start: %json " + '{"a":' * 10_000),
    "Lark options": ("from_lark", "start: " + "a? " * 5000 + '\na: "a"'),
    "choices": ("from_choice", [str(n) * 10 for n in range(4000)]),
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_compiled_or_refused_in_time(name: str) -> None:
    kind, source = BOMBS[name]
    began = time.process_time()
    try:
        constraint = getattr(Constraint, kind)(source)
        text = "a" * 200 if kind != "from_json_schema" else json.dumps("a" * 200)
        constraint.accepts(text)
    except BadRequest:
        pass
    except Exception as error:
        assert type(error).__name__ == "ConstraintFailed", error
    assert time.process_time() - began < MOST_SECONDS


def test_limits_are_those_of_the_server() -> None:
    small = Limits(schema_bytes=50, schema_depth=3, pattern_chars=5, grammar_chars=10, grammar_choices=2)
    wrong: list[tuple[str, Any]] = [
        ("from_json_schema", {"title": "x" * 60}),
        ("from_json_schema", {"a": {"b": {"c": {}}}}),
        ("from_regex", "a" * 6),
        ("from_gbnf", 'root ::= "a"'),
        ("from_lark", 'start: "aaaaa"'),
        ("from_choice", ["a", "b", "c"]),
    ]
    for kind, source in wrong:
        with pytest.raises(BadRequest) as error:
            getattr(Constraint, kind)(source, "here", small)
        assert error.value.code == "limit_exceeded"


def test_brackets_in_strings_are_not_deep() -> None:
    assert Constraint.from_json_schema({"const": "[" * 500 + '\\"' + "{" * 500}).accepts(
        json.dumps("[" * 500 + '\\"' + "{" * 500)
    )
