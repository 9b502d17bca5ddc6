"""Tools of a request with their schemas split by type, for call syntaxes that are not JSON.

If the arguments of a call are JSON, llguidance reads the whole JSON Schema. In tags or literals each value
gets a grammar of our own. Keywords not supported here are refused, so everything is enforced.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import msgspec
from msgspec import Struct

from dragoman.constrain.constraint import Constraint
from dragoman.constrain.grammar.expressions import PatternError, read_pattern, write_search
from dragoman.constrain.grammar.lark_builder import LarkBuilder, Symbol, regex
from dragoman.constrain.quoted.quoted_lark import QuotedLark
from dragoman.constrain.schema import rewrites
from dragoman.constrain.schema.json_schema import prepare_schema
from dragoman.constrain.schema.keywords import APPLICATORS, OF_TYPES, SchemaProblems, at, fate_of
from dragoman.dialects.schema import resolve, type_of
from dragoman.errors import TOOLS, BadRequest

# Splitting a schema by type


SILENT = frozenset(["nullable", "$anchor", "$defs", "definitions"])
"""Keywords that forbid nothing by themselves. Values that one of them allows in addition are just not
written.
"""
LARGEST = frozenset(["minLength", "minimum", "exclusiveMinimum", "minItems", "minProperties"])
SMALLEST = frozenset(["maxLength", "maximum", "exclusiveMaximum", "maxItems", "maxProperties"])
MOST_OPTIONS = 256
MOST_STEPS = 64
MOST_LENGTH = 100_000
EVERYTHING: Mapping[str, Any] = {}


class SchemaLocation(Struct, frozen=True):
    """A location in a tool's schema, for error messages."""

    tool: str
    param: str
    """Field of the request that has the schema."""
    pointer: str = ""
    """JSON pointer within the schema."""

    def at(self, *steps: str) -> "SchemaLocation":
        return SchemaLocation(self.tool, self.param, at(self.pointer, *steps))

    def beside(self, name: str) -> str:
        """Return the param of another field of the same tool."""
        return f"{self.param.rpartition('.')[0]}.{name}"

    def refuse(self, what: str) -> NoReturn:
        param = f"{self.param}#{self.pointer}" if self.pointer else self.param
        message = f"The arguments of {self.tool!r} cannot be enforced: '{param}' {what}."
        raise BadRequest(message, param=param, code="unsupported_schema")


class TypeOption(Struct, frozen=True):
    """One JSON type with its keywords, or a few values of one type."""

    kind: str
    """One of string, number, integer, boolean, null, object and array."""
    schema: Mapping[str, Any]
    values: tuple[Any, ...] | None = None
    free: bool = False
    """Whether the schema says nothing about the value."""


class SchemaResolver:
    """Schemas of one tool, with references followed."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.root = root

    def options(self, schema: Any, where: SchemaLocation) -> list[TypeOption]:
        """Return everything that the schema allows, one type at a time."""
        type_options = [
            option for flat in self._flatten(schema, where, 0) for option in _split_by_type(flat, where)
        ]
        if len(type_options) > MOST_OPTIONS:
            where.refuse("has too many alternatives")
        return type_options

    def objects(self, where: SchemaLocation) -> list[TypeOption]:
        """Return the alternatives for arguments, which must be objects."""
        options = [option for option in self.options(self.root, where) if option.kind == "object"]
        if not options or any(option.values is not None for option in options):
            where.refuse("must be the schema of an object")
        return options

    def _flatten(self, schema: Any, where: SchemaLocation, depth: int) -> list[Mapping[str, Any]]:
        """Return alternatives without references and unions."""
        if schema is True:
            return [EVERYTHING]
        if schema is False:
            return []
        if not isinstance(schema, Mapping):
            where.refuse("is not a valid schema")
        if depth > MOST_STEPS:
            where.refuse("refers only to itself")
        result: list[Mapping[str, Any]] = [
            {key: value for key, value in schema.items() if key not in ("$ref", "allOf", "anyOf", "oneOf")}
        ]
        for key in ("$ref", "allOf", "anyOf", "oneOf"):
            if key in schema:
                inner = self._inner(key, schema[key], where.at(key), depth + 1)
                result = [merge_schemas(left, right, where) for left in result for right in inner]
            if len(result) > MOST_OPTIONS:
                where.refuse("has too many alternatives")
        return result

    def _inner(self, key: str, value: Any, where: SchemaLocation, depth: int) -> list[Mapping[str, Any]]:
        if key == "$ref":
            target = resolve(self.root, value)
            if target is None:
                where.refuse("must be a reference within the schema, as #/$defs/name")
            return self._flatten(target, where, depth)
        if not isinstance(value, Sequence) or isinstance(value, str):
            where.refuse("must be a list")
        if key == "allOf":
            whole: list[Mapping[str, Any]] = [{}]
            for part in value:
                flat = self._flatten(part, where, depth)
                whole = [merge_schemas(left, right, where) for left in whole for right in flat]
            return whole
        each = [self._flatten(part, where, depth) for part in value]
        # The check of the whole schema accepts oneOf only if it is equivalent to anyOf.
        return [option for options in each for option in options]


def merge_schemas(
    one: Mapping[str, Any], other: Mapping[str, Any], where: SchemaLocation
) -> Mapping[str, Any]:
    """Return a schema of the values that satisfy both."""
    if not one or not other:
        return one or other
    _check_closed(one, other, where)
    both = dict(one)
    for key, value in other.items():
        if key not in both or both[key] == value:
            both[key] = value
        elif is_annotation(key):
            continue
        elif key == "properties":
            both[key] = dict(both[key])
            for name, schema in value.items():
                both[key][name] = {"allOf": [both[key][name], schema]} if name in both[key] else schema
        elif key == "required":
            both[key] = list(dict.fromkeys([*both[key], *value]))
        elif key in LARGEST or key in SMALLEST:
            both[key] = (max if key in LARGEST else min)(both[key], value)
        elif key in ("enum", "type"):
            mine, yours = _as_list(both[key]), _as_list(value)
            both[key] = [choice for choice in mine if any(same(choice, another) for another in yours)]
        elif key == "pattern":
            both[key] = [*_as_list(both[key]), *_as_list(value)]
        else:
            where.at(key).refuse("is stated twice with different values")
    return both


def is_annotation(key: str) -> bool:
    """Whether the keyword only annotates a value."""
    row = fate_of(key)
    return key in SILENT or (row is not None and row.handling == "note")


def _check_closed(one: Mapping[str, Any], other: Mapping[str, Any], where: SchemaLocation) -> None:
    """Refuse to merge a schema that forbids further properties with properties of another: it is about its
    own only.
    """
    for closed, opening in ((one, other), (other, one)):
        extra = set(opening.get("properties", ())) - set(closed.get("properties", ()))
        if closed.get("additionalProperties", True) not in (True, EVERYTHING) and extra:
            where.at("additionalProperties").refuse(
                "cannot be combined with the properties of another schema"
            )


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal as JSON: true is not 1."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    return bool(one == other)


def _split_by_type(schema: Mapping[str, Any], where: SchemaLocation) -> list[TypeOption]:
    stated = {key for key in schema if not is_annotation(key)}
    known = APPLICATORS.union(*OF_TYPES.values())
    for key in schema:
        if key in stated and key not in known:
            where.at(key).refuse("is not supported in this model's call syntax")
    if schema.get("uniqueItems"):
        where.at("uniqueItems").refuse("cannot be enforced in a call; leave it out")
    kinds = _kinds(schema, stated, where)
    if "enum" in schema or "const" in schema:
        return _split_by_value(schema, kinds, where)
    return [TypeOption(kind, schema, free=not stated) for kind in kinds]


def _kinds(schema: Mapping[str, Any], stated: set[str], where: SchemaLocation) -> list[str]:
    """Return the stated types; else the types that keywords are about; else all types."""
    if "type" in schema:
        kinds = _as_list(schema["type"])
        if not all(kind in OF_TYPES or kind == "integer" for kind in kinds):
            where.at("type").refuse("must be a JSON type, or several")
        return [kind for kind in kinds if kind != "integer" or "number" not in kinds]
    spoken_of = [kind for kind, words in OF_TYPES.items() if words & stated]
    return spoken_of if spoken_of and not stated & {"enum", "const"} else list(OF_TYPES)


def _split_by_value(
    schema: Mapping[str, Any], kinds: Sequence[str], where: SchemaLocation
) -> list[TypeOption]:
    values = schema.get("enum", [schema.get("const")])
    if not isinstance(values, list):
        where.at("enum").refuse("must be a list")
    if "const" in schema:
        values = [value for value in values if same(value, schema["const"])]
    beside = {key for key in schema if any(key in words for words in OF_TYPES.values())}
    if beside:
        where.at(min(beside)).refuse("cannot be combined with enum or const")
    fields: dict[str, list[Any]] = {}
    for value in values:
        kind = type_of(value)
        if kind == "number" and float(value).is_integer() and "number" not in kinds:
            kind = "integer"
        if kind in kinds or (kind == "integer" and "number" in kinds):
            fields.setdefault(kind, []).append(value)
    return [TypeOption(kind, schema, values=tuple(some)) for kind, some in fields.items()]


# Requirements on strings, as languages of the string itself: without quotes and escapes


def languages(schema: Mapping[str, Any], where: SchemaLocation) -> list[Symbol]:
    """Return terminals that a string must all match; none if any string is allowed."""
    symbols = []
    patterns = schema.get("pattern", [])
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        symbols.append(search(pattern, where.at("pattern")))
    if "format" in schema:
        symbols += _format(schema["format"], where.at("format"))
    length = lengths(schema, where)
    if length:
        symbols.append(regex(f"(?s:.{length})"))
    return symbols


def lengths(schema: Mapping[str, Any], where: SchemaLocation) -> str:
    """Return the allowed number of characters as `{2,5}`; "" if any is allowed."""
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    for word, value in (("minLength", least), ("maxLength", most)):
        if value is not None and not (float(value).is_integer() and 0 <= value <= MOST_LENGTH):
            where.at(word).refuse(f"must be a whole number up to {MOST_LENGTH}")
    if most is not None and most < least:
        where.at("maxLength").refuse("is less than minLength")
    if most is None:
        return f"{{{int(least)},}}" if least else ""
    return f"{{{int(least)},{int(most)}}}"


def _format(name: Any, where: SchemaLocation) -> list[Symbol]:
    if name in rewrites.PATTERNS:
        return [search(rewrites.PATTERNS[name], where)]
    if name in rewrites.TEXTS:
        return [regex(rewrites.TEXTS[name])]
    if name not in rewrites.FREE:
        where.refuse(f"must be one of {', '.join(sorted([*rewrites.PATTERNS, *rewrites.TEXTS]))}")
    return []


def search(pattern: str, where: SchemaLocation) -> Symbol:
    """Return a terminal for texts in which the expression matches somewhere."""
    try:
        return regex(write_search(read_pattern(pattern)))
    except PatternError as error:
        where.refuse(f"{error}, which cannot be enforced")


# The tools, and the meaning of their schemas in a forced call


NOTHING: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
"""Schema of the arguments of a tool that declares none."""
ANYTHING: Mapping[str, Any] = {"type": "object"}
COMBINES = ("allOf", "anyOf", "oneOf", "$ref", "patternProperties", "unevaluatedProperties", "if")
MOST_DEPTH = 64
LARK = "x-lark"
"""Our own keyword in the schema of a custom tool's text: the grammar that the text must match."""


class ToolSchema(Struct, frozen=True):
    name: str
    declared: Mapping[str, Any]
    """Schema of its arguments as the client sent it, which the parser uses."""
    schema: Mapping[str, Any]
    """The schema that is enforced, in JSON Schema's keywords."""
    native: Mapping[str, Any]
    """The same schema in llguidance's keywords."""
    where: SchemaLocation
    lark: str = ""
    """Grammar of the tool's only argument, a text."""

    def text(self, rules: LarkBuilder) -> QuotedLark | None:
        """Return the grammar of the text, if there is one."""
        return QuotedLark(rules, self.lark, self.where.beside("format")) if self.lark else None


def read_tools(
    declared: Sequence[Mapping[str, Any]],
    names: Collection[str] | None,
    strict: Collection[str] | None,
    custom: Collection[str] = (),
    pointers: Sequence[str] = (),
) -> list[ToolSchema]:
    """Return the tools that may be called. `strict` names those whose calls must match their schemas; None
    means all.

    `custom` names the tools that stand for a tool with one text; `places` are the params of their schemas.
    """
    schemas = []
    for number, tool in enumerate(declared):
        inner = "function" in tool
        function = tool["function"] if inner else tool
        name = function["name"]
        if names is not None and name not in names:
            continue
        schema = function.get("parameters") or function.get("input_schema") or NOTHING
        json_path = f"{TOOLS}[{number}]{'.function' if inner else ''}.parameters"
        where = SchemaLocation(name, pointers[number] if pointers else json_path)
        loose = strict is not None and name not in strict
        wanted = ANYTHING if loose else {"type": "object", **close_objects(schema)}
        lark = _lark(schema, where.beside("format")) if name in custom and not loose else ""
        schemas.append(ToolSchema(name, schema, wanted, _native(wanted, where), where, lark))
    return schemas


def strict_names(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of tools whose calls must match their schemas even if calls are optional."""
    return [tool["function"]["name"] for tool in tools if tool["function"].get("strict")]


def _lark(schema: Mapping[str, Any], param: str) -> str:
    """Return the Lark grammar of a custom tool's text, if it has one. In other schemas the keyword has no
    effect.
    """
    [text] = schema["properties"].values()
    if LARK in text:
        Constraint.from_lark(text[LARK], param)
    return str(text.get(LARK, ""))


def _native(schema: Mapping[str, Any], where: SchemaLocation) -> Mapping[str, Any]:
    """Check the schema keyword by keyword, whatever the call syntax, and refuse what cannot be enforced."""
    problems = SchemaProblems()
    prepared: Any = prepare_schema(schema, problems, where.param)
    for json_path in problems.watched:
        problems.add(json_path, "cannot be enforced in the arguments of a call; leave it out")
    if problems.items:
        first = problems.items[0]
        msgspec.structs.replace(where, pointer=first.pointer).refuse(first.message)
    return {"allOf": [prepared]} if isinstance(prepared, bool) else prepared


def close_objects(schema: Any) -> Any:
    """Set `additionalProperties` to false where properties are declared and it is unset.

    A model that may invent properties does so, and a client that wants them can say so.
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
    """Close a schema. `whole` means that no other schema describes the same value."""
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
