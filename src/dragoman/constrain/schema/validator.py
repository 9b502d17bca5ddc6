"""Validator of values against a JSON Schema, for answers of engines without constraints.

All keywords that restrict a value count, in draft 2020-12 or draft 7; unknown ones have no effect. Patterns
and formats are checked with the grammar that would enforce them, in time proportional to the text, whatever
the expression. Nested alternatives can mean very many checks of one value, so steps are counted, and too many
are an error.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from functools import cached_property
from typing import Any, TypeAlias, TypeGuard

import msgspec

from dragoman.constrain.calls.tool_schemas import LARK
from dragoman.constrain.constraint import Constraint
from dragoman.dialects.schema import resolve, type_of
from dragoman.errors import BadRequest, ConstraintFailed, shorten

MOST_STEPS = 100_000
GRAMMAR_STEPS = 2000
"""Cost of making a grammar, in steps; using one costs a step per character."""
MOST_DEPTH = 100
QUOTED = 60
"""Maximum number of characters of a name in an error message."""
_VALUES = frozenset({"enum", "const", "default", "examples"})
_COMBINE = frozenset({"$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas"})

Faults: TypeAlias = Iterator[str]
"""Errors such as `$.city is missing`; the first is enough."""


def find_fault(value: Any, schema: Any) -> str | None:
    """Return the first error of a value, without a period: `$.city is missing`."""
    try:
        return next(_SchemaChecker(schema).faults(value, schema, "$", 0), None)
    except RecursionError:
        raise _too_deep() from None


def find_json_fault(text: str, schema: Any) -> str | None:
    """Return the first error of a text that must be JSON."""
    try:
        return find_fault(msgspec.json.decode(text), schema)
    except (msgspec.DecodeError, RecursionError):
        return "it is not JSON, or has other text beside the JSON"


class _SchemaChecker:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._left = MOST_STEPS
        self._grammars: dict[str, Constraint] = {}
        self._by_type: dict[str, Callable[[Any, Mapping[str, Any], str, int], Faults]] = {
            "object": self._object,
            "array": self._list,
            "string": self._text,
            "integer": self._number,
            "number": self._number,
        }

    def faults(self, value: Any, schema: Any, pointer: str, depth: int) -> Faults:
        self._count(1)
        if schema is False:
            yield f"{pointer} is not allowed"
        if not isinstance(schema, Mapping):
            return
        if depth > MOST_DEPTH:
            raise _too_deep()
        kind = type_of(value)
        yield from _plain_faults(value, kind, schema, pointer)
        yield from self._combined(value, schema, pointer, depth + 1)
        if kind in self._by_type:
            yield from self._by_type[kind](value, schema, pointer, depth + 1)

    def _fits(self, value: Any, schema: Any, pointer: str, depth: int) -> bool:
        return next(self.faults(value, schema, pointer, depth), None) is None

    def _count(self, steps: int) -> None:
        self._left -= steps
        if self._left < 0:
            raise ConstraintFailed(
                "The answer cannot be checked: its schema has too many alternatives; simplify it."
            )

    def _referred(self, reference: Any) -> Any:
        """Return the target of a reference; None if it is not in the schema."""
        own = self._root.get("$id")
        if isinstance(reference, str) and isinstance(own, str) and own:
            reference = "#" + reference.removeprefix(own.rstrip("#")).lstrip("#")
        result = resolve(self._root, reference)
        return self._anchors.get(str(reference)[1:]) if result is None else result

    @cached_property
    def _anchors(self) -> dict[str, Any]:
        anchors, waiting = {}, [self._root]
        while waiting:
            self._count(1)
            schema = waiting.pop()
            if isinstance(schema, Mapping) and isinstance(schema.get("$anchor"), str):
                anchors[schema["$anchor"]] = schema
            inner = (
                [schema[word] for word in schema.keys() - _VALUES] if isinstance(schema, Mapping) else schema
            )
            waiting += [item for item in inner if isinstance(item, Mapping | list)]
        return anchors

    def _combined(self, value: Any, schema: Mapping[str, Any], pointer: str, depth: int) -> Faults:
        if "$ref" in schema:
            yield from self.faults(value, self._referred(schema["$ref"]), pointer, depth)
        for part in _some(schema.get("allOf")):
            yield from self.faults(value, part, pointer, depth)
        options = _some(schema.get("anyOf"))
        if options and not any(self._fits(value, option, pointer, depth) for option in options):
            yield f"{pointer} matches none of anyOf"
        if options := _some(schema.get("oneOf")):
            count = sum(self._fits(value, option, pointer, depth) for option in options)
            if count != 1:
                yield f"{pointer} matches {count} of oneOf"
        if "not" in schema and self._fits(value, schema["not"], pointer, depth):
            yield f"{pointer} matches 'not'"
        if "if" in schema:
            branch = "then" if self._fits(value, schema["if"], pointer, depth) else "else"
            yield from self.faults(value, schema.get(branch), pointer, depth)

    def _object(self, value: dict[str, Any], schema: Mapping[str, Any], pointer: str, depth: int) -> Faults:
        declared, patterns = _map(schema.get("properties")), _map(schema.get("patternProperties"))
        yield from _missing(value, schema.get("required"), pointer)
        yield from _count_faults(len(value), schema, pointer, "Properties", "properties")
        for name, needed in self._dependent(schema):
            if name in value:
                yield from self._needed(value, needed, pointer, depth)
        # If no other keyword describes the object, the two keywords mean the same.
        alone = not _COMBINE & schema.keys()
        others = schema.get("additionalProperties", schema.get("unevaluatedProperties") if alone else None)
        for name, inner in value.items():
            where = _at(pointer, name)
            schemas = [declared[name]] if name in declared else []
            schemas += [extra for pattern, extra in patterns.items() if self._matches(name, pattern)]
            for each in schemas or [others]:
                yield from self.faults(inner, each, where, depth)
            yield from self.faults(name, schema.get("propertyNames"), where, depth)

    def _dependent(self, schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        for word in ("dependentRequired", "dependentSchemas", "dependencies"):
            yield from _map(schema.get(word)).items()

    def _needed(self, value: dict[str, Any], needed: Any, pointer: str, depth: int) -> Faults:
        if isinstance(needed, list):
            yield from _missing(value, needed, pointer)
        else:
            yield from self.faults(value, needed, pointer, depth)

    def _list(self, value: list[Any], schema: Mapping[str, Any], pointer: str, depth: int) -> Faults:
        yield from _count_faults(len(value), schema, pointer, "Items", "items")
        alone = not _COMBINE & schema.keys()
        rest = schema.get("items", schema.get("unevaluatedItems") if alone else None)
        first = _some(schema.get("prefixItems"))
        if isinstance(rest, list):
            first, rest = rest, schema.get("additionalItems")
        for number, inner in enumerate(value):
            each = first[number] if number < len(first) else rest
            yield from self.faults(inner, each, f"{pointer}[{number}]", depth)
        if schema.get("uniqueItems") is True and len({_key(inner) for inner in value}) < len(value):
            yield f"{pointer} has duplicate items"
        if "contains" in schema:
            count = sum(self._fits(inner, schema["contains"], pointer, depth) for inner in value)
            least = schema.get("minContains", 1)
            yield from _count_faults(
                count,
                {"minContains": least, "maxContains": schema.get("maxContains")},
                pointer,
                "Contains",
                "items that match contains",
            )

    def _text(self, value: str, schema: Mapping[str, Any], pointer: str, depth: int) -> Faults:
        yield from _count_faults(len(value), schema, pointer, "Length", "characters")
        pattern, format_ = schema.get("pattern"), schema.get("format")
        if isinstance(pattern, str) and not self._matches(value, pattern):
            yield f"{pointer} does not match the pattern {shorten(pattern, QUOTED)}"
        if isinstance(format_, str) and not self._has_format(value, format_):
            yield f"{pointer} does not match the format {shorten(format_, QUOTED)}"
        grammar = schema.get(LARK)
        if isinstance(grammar, str) and not self._accepts(
            lambda: Constraint.from_lark(grammar), grammar, value
        ):
            yield f"{pointer} does not match its grammar"

    def _matches(self, text: str, pattern: str) -> bool:
        return self._accepts(lambda: Constraint.from_search(pattern), pattern, text)

    def _has_format(self, text: str, name: str) -> bool:
        schema, quoted = {"type": "string", "format": name}, json.dumps(text, ensure_ascii=False)
        return self._accepts(lambda: Constraint.from_json_schema(schema), f"format {name}", quoted)

    def _accepts(self, make: Callable[[], Constraint], name: str, text: str) -> bool:
        """Whether a grammar accepts the text. If the grammar is invalid, every text is accepted."""
        self._count(len(text) + (0 if name in self._grammars else GRAMMAR_STEPS))
        try:
            if name not in self._grammars:
                self._grammars[name] = make()
            return self._grammars[name].accepts(text)
        except BadRequest:
            # The request was refused before there was an answer, if this had to be enforced.
            return True

    def _number(self, value: float, schema: Mapping[str, Any], pointer: str, depth: int) -> Faults:
        least, most = schema.get("minimum"), schema.get("maximum")
        above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
        # Draft 4 has a flag in addition to the bound.
        above = least if above is True else above
        below = most if below is True else below
        if (_is_number(least) and value < least) or (_is_number(above) and value <= above):
            yield f"{pointer} is too small"
        if (_is_number(most) and value > most) or (_is_number(below) and value >= below):
            yield f"{pointer} is too large"
        step = schema.get("multipleOf")
        if _is_number(step) and step > 0 and not _is_multiple(value, step):
            yield f"{pointer} is not a multiple of {step}"


def _plain_faults(value: Any, kind: str, schema: Mapping[str, Any], pointer: str) -> Faults:
    """Yield errors of keywords that apply to all types."""
    stated = schema.get("type")
    types = [name for name in (_some(stated) or [stated]) if isinstance(name, str)]
    whole = kind == "number" and float(value).is_integer()
    named = {kind, *(["number"] if kind == "integer" else []), *(["integer"] if whole else [])}
    null = value is None and schema.get("nullable") is True
    if types and not null and not named & set(types):
        yield f"{pointer} is of type {kind}; it must be {' or '.join(types)}"
    allowed = _some(schema.get("enum"))
    if allowed and not null and _key(value) not in map(_key, allowed):
        yield f"{pointer} is not one of {shorten(json.dumps(allowed, ensure_ascii=False), 4 * QUOTED)}"
    if "const" in schema and _key(value) != _key(schema["const"]):
        yield f"{pointer} is not {shorten(json.dumps(schema['const'], ensure_ascii=False), QUOTED)}"


def _count_faults(count: int, schema: Mapping[str, Any], pointer: str, word: str, what: str) -> Faults:
    least, most = schema.get(f"min{word}"), schema.get(f"max{word}")
    if _is_number(least) and count < least:
        yield f"{pointer} has {count} {what}; at least {least} are required"
    if _is_number(most) and count > most:
        yield f"{pointer} has {count} {what}; at most {most} are allowed"


def _missing(value: dict[str, Any], names: Any, pointer: str) -> Faults:
    missing = (name for name in _some(names) if isinstance(name, str) and name not in value)
    yield from (f"{_at(pointer, name)} is missing" for name in missing)


def _is_multiple(value: float, step: float) -> bool:
    try:
        return not Decimal(repr(value)) % Decimal(repr(step))
    except InvalidOperation:
        # The magnitudes differ so much that no decimal has enough digits.
        return True


def _too_deep() -> ConstraintFailed:
    return ConstraintFailed("The answer cannot be checked: its schema is nested too deeply.")


def _key(value: Any) -> str:
    """Return a key that is equal for values that JSON Schema calls equal: 1 and 1.0
    are, 1 and true are not.
    """
    return json.dumps(_whole_numbers(value), sort_keys=True)


def _whole_numbers(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_whole_numbers(inner) for inner in value]
    return (
        {name: _whole_numbers(inner) for name, inner in value.items()} if isinstance(value, dict) else value
    )


def _at(pointer: str, name: str) -> str:
    return f"{pointer}.{shorten(name, QUOTED)}"


def _some(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def _map(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
