"""Types of argument values from a tool's schema, and a value's text as JSON of such a type."""

import json
import re
from collections.abc import Iterator, Mapping
from json.encoder import encode_basestring
from typing import Any, TypeAlias
from urllib.parse import unquote

Schema: TypeAlias = Mapping[str, Any]

ANY: Schema = {}
"""Schema of a value that the tool does not describe."""
WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
SURROGATE = re.compile("[\ud800-\udfff]")
TO_ESCAPE = re.compile('["\\\\\x00-\x1f\ud800-\udfff]')
TYPE_NAMES = {
    "int": "integer",
    "long": "integer",
    "float": "number",
    "double": "number",
    "bool": "boolean",
    "str": "string",
    "text": "string",
    "dict": "object",
    "map": "object",
    "list": "array",
    "tuple": "array",
    "none": "null",
}
"""Type names that people write for those of JSON Schema."""
MOST_STEPS = 64
"""Maximum number of references and unions followed, together."""


def whole_characters(text: str) -> str:
    """Return the text without halves of surrogate pairs, which cannot be encoded."""
    return SURROGATE.sub("", text)


def quote_json(text: str) -> str:
    """Return the text as a JSON string."""
    return str(encode_basestring(whole_characters(text)))


def escape_json(text: str) -> str:
    """Return the inside of `quote_json`; the text may be a chunk of the string."""
    return quote_json(text)[1:-1] if TO_ESCAPE.search(text) else text


class ToolDeclarations:
    """Declared tools by name, with the schemas of their arguments."""

    def __init__(self, tools: Any = ()) -> None:
        self._parameters: dict[str, Schema] = {}
        strict = False
        for tool in tools or ():
            function = tool.get("function", tool) if isinstance(tool, Mapping) else {}
            name = function.get("name") if isinstance(function, Mapping) else None
            if isinstance(name, str):
                strict |= function.get("strict") is True
                parameters = function.get("parameters") or function.get("input_schema")
                self._parameters[name] = parameters if isinstance(parameters, Mapping) else {}

        self.lenient = bool(self._parameters) and not strict
        """Whether there are tools and none is strict, so that no grammar constrains the arguments."""

    def __contains__(self, name: str) -> bool:
        return name in self._parameters

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def arguments(self, name: str) -> "ArgumentSchema":
        schema = self._parameters.get(name)
        return ArgumentSchema(schema, schema or {})


class ArgumentSchema:
    """A position in a tool's arguments. `schema` is None if the tool is unknown."""

    def __init__(self, schema: Schema | None, root: Schema) -> None:
        self.root = root
        self.options = None if schema is None else _options(schema, root)
        """All schemas that apply here, with references and unions followed."""

    @property
    def known(self) -> bool:
        return self.options is not None

    @property
    def types(self) -> frozenset[str]:
        """JSON types allowed here; empty if any is."""
        return frozenset(kind for option in self.options or () for kind in _types(option))

    @property
    def is_text(self) -> bool:
        return self.types == {"string"}

    def member(self, key: str) -> "ArgumentSchema":
        if self.options is None:
            return self
        for option in self.options:
            properties = option.get("properties")
            if isinstance(properties, Mapping) and isinstance(properties.get(key), Mapping):
                return ArgumentSchema(properties[key], self.root)
        extra = (option.get("additionalProperties") for option in self.options)
        return ArgumentSchema(
            next((schema for schema in extra if isinstance(schema, Mapping)), ANY), self.root
        )

    def item(self) -> "ArgumentSchema":
        if self.options is None:
            return self
        items = (option.get("items") for option in self.options)
        return ArgumentSchema(
            next((schema for schema in items if isinstance(schema, Mapping)), ANY), self.root
        )

    @property
    def has_properties(self) -> bool:
        return any(isinstance(option.get("properties"), Mapping) for option in self.options or ())

    def has(self, key: str) -> bool:
        all_properties = (option.get("properties") for option in self.options or ())
        return any(isinstance(properties, Mapping) and key in properties for properties in all_properties)

    def json(self, text: str, untyped: str = "json") -> str:
        """Return the text as JSON of an allowed type; as a string if it fits none."""
        types = self.types
        if types == {"string"} or (not types and untyped == "text"):
            return quote_json(text)
        stripped = text.strip()
        value = WORDS.get(stripped) or _as_json(stripped) or _as_python(stripped)
        if value is None or (types and not _fits(value, types)):
            return quote_json(text)
        return value


def _options(schema: Schema, root: Schema) -> list[Schema]:
    """Return the schema and everything its references and unions lead to."""
    schemas: list[Schema] = []
    waiting, steps = [schema], 0
    while waiting and steps < MOST_STEPS:
        steps += 1
        current = waiting.pop(0)
        schemas.append(current)
        target = resolve(root, current.get("$ref"))
        if isinstance(target, Mapping):
            waiting.append(target)
        for word in ("anyOf", "oneOf", "allOf"):
            options = current.get(word)
            if isinstance(options, list):
                waiting += [option for option in options if isinstance(option, Mapping)]
    return schemas


def resolve(root: Any, reference: Any) -> Any:
    """Return what `#/$defs/name` points at; None if it leads nowhere or is not local."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    target = root
    for step in unquote(reference).split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and step.isdecimal() and int(step) < len(target):
            target = target[int(step)]
        elif isinstance(target, Mapping) and step in target:
            target = target[step]
        else:
            return None
    return target


def _types(schema: Schema) -> set[str]:
    stated = schema.get("type")
    types = {stated} if isinstance(stated, str) else set()
    types |= {kind for kind in stated if isinstance(kind, str)} if isinstance(stated, list) else set()
    if schema.get("nullable") is True:
        types.add("null")
    if not types:
        values = schema.get("enum", [schema["const"]] if "const" in schema else [])
        types = {type_of(value) for value in values} if isinstance(values, list) else set()
    if not types and "properties" in schema:
        types = {"object"}
    return {TYPE_NAMES.get(kind.lower(), kind.lower()) for kind in types}


def type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    names = {int: "integer", float: "number", str: "string", list: "array"}
    return names.get(type(value), "object")


def _fits(value: str, types: frozenset[str]) -> bool:
    start = value[0]
    if start == "{":
        return "object" in types
    if start == "[":
        return "array" in types
    if start == '"':
        return "string" in types
    if start == "n":
        return "null" in types
    if start in "tf":
        return "boolean" in types
    # A float would overflow where an integer is merely long.
    whole = value.lstrip("-").isdigit() or float(value).is_integer()
    return "number" in types or ("integer" in types and whole)


def _as_json(text: str) -> str | None:
    """Return the text itself if it is JSON: number spelling and spaces are the model's."""
    if NUMBER.fullmatch(text):
        return text
    if not text or text[0] not in '{["':
        return None
    try:
        json.loads(text, parse_int=len, parse_float=len, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return text


def _refuse(word: str) -> None:
    raise ValueError(word)


def _as_python(text: str) -> str | None:
    """Convert `{'a': True}` to JSON."""
    # Imported here to break a cycle: the literal reader imports this module.
    from dragoman.dialects.readers.literals import python_as_json

    return python_as_json(text) if text[:1] in ("{", "[", "(") else None


NO_TOOLS = ToolDeclarations()
