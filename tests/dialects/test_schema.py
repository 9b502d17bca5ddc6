"""Values that come as text get their type from the tool's schema; what fits none stays text."""

import json
from typing import Any

import pytest

from dragoman.dialects.parser import parse
from dragoman.dialects.schema import ArgumentSchema, ToolDeclarations

STRING = {"type": "string"}
INTEGER = {"type": "integer"}
NUMBER = {"type": "number"}
BOOLEAN = {"type": "boolean"}
OBJECT = {"type": "object"}
ARRAY = {"type": "array"}
NULL = {"type": "null"}

# text, schema, JSON
TABLE: list[tuple[str, dict[str, Any], str]] = [
    # A string stays as it is, whatever it looks like.
    ("plain", STRING, '"plain"'),
    ("42", STRING, '"42"'),
    ("null", STRING, '"null"'),
    ("nil", STRING, '"nil"'),
    ("none", STRING, '"none"'),
    ("true", STRING, '"true"'),
    ('{"a": 1}', STRING, '"{\\"a\\": 1}"'),
    ('"quoted"', STRING, '"\\"quoted\\""'),
    ("  spaces  ", STRING, '"  spaces  "'),
    ("a\nb\t\\", STRING, '"a\\nb\\t\\\\"'),
    ("", STRING, '""'),
    ("🦜é", STRING, '"🦜é"'),
    ("\x00", STRING, '"\\u0000"'),
    # Numbers keep their spelling.
    ("42", INTEGER, "42"),
    ("-0", INTEGER, "-0"),
    (" 42\n", INTEGER, "42"),
    ("42.0", INTEGER, "42.0"),
    ("42.5", INTEGER, '"42.5"'),
    ("1e3", INTEGER, "1e3"),
    ("forty", INTEGER, '"forty"'),
    ("007", INTEGER, '"007"'),
    ("0x10", INTEGER, '"0x10"'),
    ("", INTEGER, '""'),
    ("٣", INTEGER, '"٣"'),
    ("1٣", INTEGER, '"1٣"'),
    ("9" * 400, INTEGER, "9" * 400),
    ("1e400", INTEGER, '"1e400"'),
    ("1.50", NUMBER, "1.50"),
    ("-1.5e3", NUMBER, "-1.5e3"),
    ("1e999", NUMBER, "1e999"),
    ("1,5", NUMBER, '"1,5"'),
    ("NaN", NUMBER, '"NaN"'),
    ("Infinity", NUMBER, '"Infinity"'),
    ("3", NUMBER, "3"),
    # Words, as JSON and as Python write them.
    ("true", BOOLEAN, "true"),
    ("False", BOOLEAN, "false"),
    ("yes", BOOLEAN, '"yes"'),
    ("1", BOOLEAN, '"1"'),
    ("null", NULL, "null"),
    ("None", NULL, "null"),
    ("nil", NULL, '"nil"'),
    # Objects and lists: JSON to the byte, else literals of Python.
    ('{ "a":1.0 }', OBJECT, '{ "a":1.0 }'),
    ("{'a': True, 'b': (1, None)}", OBJECT, '{"a": true, "b": [1, null]}'),
    ("{'a': 1", OBJECT, "\"{'a': 1\""),
    ("{}", OBJECT, "{}"),
    ("[1]", OBJECT, '"[1]"'),
    ('["a", {"b": null}]', ARRAY, '["a", {"b": null}]'),
    ("['it\\'s']", ARRAY, '["it\'s"]'),
    ("[1 2]", ARRAY, '"[1 2]"'),
    ("[NaN]", ARRAY, '"[NaN]"'),
    ("[red, green]", ARRAY, '"[red, green]"'),
    ("a, b", ARRAY, '"a, b"'),
    ("{}", ARRAY, '"{}"'),
    # Unions: what is no string is tried first.
    ("7", {"type": ["integer", "string"]}, "7"),
    ("seven", {"type": ["integer", "string"]}, '"seven"'),
    ("null", {"type": ["string", "null"]}, "null"),
    ("None", {"type": ["string", "null"]}, "null"),
    ("7", {"type": ["string", "null"]}, '"7"'),
    ("7", {"anyOf": [STRING, INTEGER]}, "7"),
    ("[7]", {"oneOf": [ARRAY, NULL]}, "[7]"),
    ("7", {"oneOf": [ARRAY, NULL]}, '"7"'),
    ("true", {"anyOf": [{"anyOf": [BOOLEAN]}, STRING]}, "true"),
    ("null", {"type": "integer", "nullable": True}, "null"),
    ("null", {"type": "integer", "nullable": False}, '"null"'),
    ("5", {"allOf": [STRING, {"minLength": 1}]}, '"5"'),
    # A schema that only implies its type.
    ("5", {"enum": ["5", "6"]}, '"5"'),
    ("5", {"enum": [5, 6]}, "5"),
    ("null", {"enum": ["a", None]}, "null"),
    ("5", {"const": "5"}, '"5"'),
    ('{"a": 1}', {"properties": {"a": INTEGER}}, '{"a": 1}'),
    # Other words for types.
    ("5", {"type": "int"}, "5"),
    ("5", {"type": "str"}, '"5"'),
    ("5", {"type": "STRING"}, '"5"'),
    ("1.5", {"type": "float"}, "1.5"),
    ("true", {"type": "bool"}, "true"),
    ("{}", {"type": "dict"}, "{}"),
    ("[]", {"type": "list"}, "[]"),
    # Nothing is said of the type: a literal if it is one, else text.
    ("5", {}, "5"),
    ("true", {}, "true"),
    ("None", {}, "null"),
    ("{'a': 1}", {}, '{"a": 1}'),
    ("five", {}, '"five"'),
    ("5 apples", {"description": "how many"}, '"5 apples"'),
]


@pytest.mark.parametrize(("text", "schema", "expected"), TABLE)
def test_value(text: str, schema: dict[str, Any], expected: str) -> None:
    assert ArgumentSchema(schema, schema).json(text) == expected


@pytest.mark.parametrize(("text", "schema"), [(text, schema) for text, schema, _ in TABLE])
def test_every_value_is_json(text: str, schema: dict[str, Any]) -> None:
    json.loads(ArgumentSchema(schema, schema).json(text), parse_int=str)


@pytest.mark.parametrize("text", ["5", "null", "{}"])
def test_without_a_schema_text_stays_text_where_the_dialect_says_so(text: str) -> None:
    assert ArgumentSchema({}, {}).json(text, "text") == json.dumps(text)


def test_a_reference_is_followed() -> None:
    root = {"properties": {"a": {"$ref": "#/$defs/x~1y"}}, "$defs": {"x/y": STRING}}
    assert ArgumentSchema(root, root).member("a").json("5") == '"5"'


def test_a_reference_through_a_union_is_followed() -> None:
    root = {"properties": {"a": {"anyOf": [{"$ref": "#/$defs/n"}, NULL]}}, "$defs": {"n": INTEGER}}
    assert ArgumentSchema(root, root).member("a").types == {"integer", "null"}


def test_members_of_members_and_items_have_places() -> None:
    schema = {"properties": {"a": {"items": {"properties": {"b": STRING}}}}}
    assert ArgumentSchema(schema, schema).member("a").item().member("b").is_text


def test_a_member_that_is_not_named_takes_what_additional_ones_are() -> None:
    schema = {"properties": {"a": INTEGER}, "additionalProperties": STRING}
    assert ArgumentSchema(schema, schema).member("b").is_text


# Hostile schemas

CIRCLE = {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#"}]}}}
FAN = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 8} for n in range(60)}
DEEP: dict[str, Any] = {"type": "string"}
for _ in range(2000):
    DEEP = {"anyOf": [DEEP]}
WEIRD: dict[str, Any] = {
    "nothing": None,
    "true": True,
    "a number": 5,
    "a word": "string",
    "a list": [{"type": "string"}],
    "properties are null": {"properties": None},
    "properties are a number": {"properties": 5},
    "properties of a property are a number": {
        "properties": {"a": {"properties": 5}, "item": {"properties": 5}}
    },
    "properties are booleans": {"properties": {"a": True, "item": False}},
    "a type that is a number": {"properties": {"a": {"type": 5}}},
    "a list of types with other things": {"properties": {"a": {"type": ["integer", None, {"x": 1}]}}},
    "an enum that is a number": {"properties": {"a": {"enum": 5}}},
    "a union of other things": {"properties": {"a": {"anyOf": [5, None, True]}}},
    "a union that is a word": {"properties": {"a": {"oneOf": "x"}}},
    "references to nowhere": {"properties": {"a": {"$ref": "#/none"}, "item": {"$ref": 5}}},
    "references in a circle": {"properties": {"a": {"$ref": "#"}}, **CIRCLE},
    "references that fan out": {"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": FAN},
    "unions inside unions": {"properties": {"a": DEEP}},
    "items that are a list": {"properties": {"a": {"type": "array", "items": [STRING]}}},
    "many properties": {"properties": {f"p{n}": INTEGER for n in range(10_000)}},
}
CALLS = {
    "qwen3_coder": "<function=f><parameter=a>[1]</parameter></function>",
    "minimax_m3": ']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="f">]<]minimax[>[<a>]<]minimax[>[<item>1'
    "]<]minimax[>[</item>]<]minimax[>[</a>]<]minimax[>[</invoke>]<]minimax[>[</tool_call>",
    "gemma4": "<|tool_call>call:f{a:[1,{item:2}]}<tool_call|>",
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="a" '
    'type="array"<|sep|>[1]<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
}


@pytest.mark.parametrize("dialect", CALLS)
@pytest.mark.parametrize("schema", WEIRD.values(), ids=WEIRD)
def test_a_weird_schema_never_loses_a_call(dialect: str, schema: Any) -> None:
    answer = parse(CALLS[dialect], dialect, tools=[{"function": {"name": "f", "parameters": schema}}])
    assert [call.name for call in answer.calls] == ["f"]
    assert "a" in json.loads(answer.calls[0].arguments)


@pytest.mark.parametrize(
    "tool", [None, 5, "f", {}, {"function": 5}, {"function": {"name": 5}}, {"name": "f"}]
)
def test_weird_tools_are_no_tools(tool: Any) -> None:
    assert ToolDeclarations([tool]).arguments("f").member("a").json("5") == "5"
