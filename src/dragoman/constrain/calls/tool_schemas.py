"""The tools of a request, and what their schemas mean where a call is forced."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from dragoman.constrain.calls.schema_parts import SchemaPlace
from dragoman.constrain.constraint import Constraint
from dragoman.constrain.grammar.rules import Rules
from dragoman.constrain.quoted.quoted_lark import QuotedLark
from dragoman.constrain.schema.json_schema import prepare_schema
from dragoman.constrain.schema.keywords import Problems
from dragoman.errors import TOOLS

NOTHING: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
"""The arguments of a tool that declares none."""
ANYTHING: Mapping[str, Any] = {"type": "object"}
COMBINES = ("allOf", "anyOf", "oneOf", "$ref", "patternProperties", "unevaluatedProperties", "if")
MOST_DEPTH = 64
LARK = "x-lark"
"""A word of our own in the schema of a custom tool's text: the grammar that it must be in."""


class ToolSchema(Struct, frozen=True):
    name: str
    declared: Mapping[str, Any]
    """The schema of its arguments as the client sent it, which the reader knows."""
    schema: Mapping[str, Any]
    """What is enforced, in the words of the client."""
    native: Mapping[str, Any]
    """The same in those of llguidance."""
    where: SchemaPlace
    lark: str = ""
    """A grammar that the one argument of the tool, a text, must be in."""

    def text(self, rules: Rules) -> QuotedLark | None:
        """What the text must be, if a grammar says so."""
        return QuotedLark(rules, self.lark, self.where.beside("format")) if self.lark else None


def read_tools(
    declared: Sequence[Mapping[str, Any]],
    names: Collection[str] | None,
    strict: Collection[str] | None,
    custom: Collection[str] = (),
    places: Sequence[str] = (),
) -> list[ToolSchema]:
    """Those that may be called. `strict` are those that are held to their schemas; None: all of them.

    `custom` are those that stand for a tool with one text, `places` is where the schema of each is.
    """
    found = []
    for number, tool in enumerate(declared):
        inner = "function" in tool
        function = tool["function"] if inner else tool
        name = function["name"]
        if names is not None and name not in names:
            continue
        schema = function.get("parameters") or function.get("input_schema") or NOTHING
        place = f"{TOOLS}[{number}]{'.function' if inner else ''}.parameters"
        where = SchemaPlace(name, places[number] if places else place)
        loose = strict is not None and name not in strict
        wanted = ANYTHING if loose else {"type": "object", **close_objects(schema)}
        lark = _lark(schema, where.beside("format")) if name in custom and not loose else ""
        found.append(ToolSchema(name, schema, wanted, _native(wanted, where), where, lark))
    return found


def strict_names(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """The tools whose calls must be in their schemas, even if the model calls them by itself."""
    return [tool["function"]["name"] for tool in tools if tool["function"].get("strict")]


def _lark(schema: Mapping[str, Any], param: str) -> str:
    """The grammar of a custom tool's text, if it has one in Lark. In other schemas the word says nothing."""
    [text] = schema["properties"].values()
    if LARK in text:
        Constraint.from_lark(text[LARK], param)
    return str(text.get(LARK, ""))


def _native(schema: Mapping[str, Any], where: SchemaPlace) -> Mapping[str, Any]:
    """Checked word by word, whatever the syntax of calls is: what cannot be enforced is refused."""
    problems = Problems()
    prepared: Any = prepare_schema(schema, problems, where.param)
    for place in problems.watched:
        problems.add(place, "cannot be enforced in the arguments of a call; leave it out")
    if problems.found:
        first = problems.found[0]
        msgspec.structs.replace(where, place=first.place).refuse(first.message)
    return {"allOf": [prepared]} if isinstance(prepared, bool) else prepared


def close_objects(schema: Any) -> Any:
    """Where properties are declared and nothing is said of others, there are none.

    A model that may make up properties does so; and those who want them say so.
    """
    combined = any("allOf" in part or ("$ref" in part and len(part) > 1) for part in _parts(schema, 0))
    return _close(schema, not combined, 0)


def _parts(schema: Any, depth: int) -> Iterator[Mapping[str, Any]]:
    if depth < MOST_DEPTH and isinstance(schema, Mapping | list):
        if isinstance(schema, Mapping):
            yield schema
        for inner in schema.values() if isinstance(schema, Mapping) else schema:
            yield from _parts(inner, depth + 1)


def _close(schema: Any, whole: bool, depth: int) -> Any:
    """`whole`: nothing else is said of the same value in another place."""
    if not isinstance(schema, Mapping) or depth > MOST_DEPTH:
        return schema
    alone = not any(word in schema for word in COMBINES)
    result = dict(schema)
    for word in ("properties", "$defs", "definitions"):
        if isinstance(schema.get(word), Mapping):
            inside = whole if word != "properties" else True
            result[word] = {key: _close(value, inside, depth + 1) for key, value in schema[word].items()}
    if isinstance(schema.get("items"), Mapping):
        result["items"] = _close(schema["items"], True, depth + 1)
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list):
            inside = whole and "properties" not in schema
            result[word] = [_close(value, inside, depth + 1) for value in schema[word]]
    if whole and alone and "properties" in schema and "additionalProperties" not in schema:
        result["additionalProperties"] = False
    return result
