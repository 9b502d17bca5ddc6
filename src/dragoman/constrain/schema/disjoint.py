"""Whether two schemas can never allow the same value: then `oneOf` and `anyOf` say the same."""

import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from dragoman.constrain.schema.keywords import TYPES

_DEEPEST = 8
_MOST_STEPS = 50_000
_KINDS: dict[type, str] = {bool: "boolean", int: "number", float: "number", str: "string", list: "array"}


class Disjoint:
    """Asked about schemas of one document, whose references it follows. It says no where it does not know."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self._steps = _MOST_STEPS

    def all(self, options: list[Any]) -> bool:
        return all(self.two(one, other) for at, one in enumerate(options) for other in options[at + 1 :])

    def two(self, one: Any, other: Any, depth: int = 0) -> bool:
        if one is False or other is False:
            return True
        self._steps -= 1
        if one is True or other is True or depth > _DEEPEST or self._steps < 0:
            return False
        checks = (_by_type, _by_value, _by_range, self._by_property, self._by_part)
        return any(check(one, other, depth) or check(other, one, depth) for check in checks)

    def _by_part(self, one: Mapping[str, Any], other: Mapping[str, Any], depth: int) -> bool:
        """All alternatives of one are apart from the other, or one of several demands is."""
        for word in ("anyOf", "oneOf"):
            if word in one and all(self.two(part, other, depth + 1) for part in one[word]):
                return True
        demands = [*one.get("allOf", []), *([resolve(self.root, one["$ref"])] if "$ref" in one else [])]
        return any(self.two(part, other, depth + 1) for part in demands if part is not None)

    def _by_property(self, one: Mapping[str, Any], other: Mapping[str, Any], depth: int) -> bool:
        """One demands a property that the other forbids, or has something else in."""
        if not _only(one, "object") or not _only(other, "object"):
            return False
        for name in one.get("required", []):
            mine, its = one.get("properties", {}).get(name, True), other.get("properties", {})
            closed = other.get("additionalProperties") is False and not other.get("patternProperties")
            if name in its and self.two(mine, its[name], depth + 1):
                return True
            if closed and name not in its and not {"$ref", "allOf", "anyOf", "oneOf"} & set(other):
                return True
        return False


def resolve(root: Any, reference: str) -> Any:
    """What `#/$defs/name` points at; None where it leads nowhere."""
    found = root
    for step in unquote(reference.removeprefix("#")).split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and step.isdecimal() and int(step) < len(found):
            found = found[int(step)]
        elif isinstance(found, Mapping) and step in found:
            found = found[step]
        else:
            return None
    return found if reference.startswith("#/") or reference == "#" else None


def _by_type(one: Mapping[str, Any], other: Mapping[str, Any], depth: int) -> bool:
    return not set(_types(one)) & set(_types(other))


def _only(schema: Mapping[str, Any], kind: str) -> bool:
    return set(_types(schema)) <= {kind}


def _types(schema: Mapping[str, Any]) -> Iterator[str]:
    """Those that may occur; an integer counts as a number."""
    values = _values(schema)
    if values is not None:
        yield from (_KINDS.get(type(value), "null" if value is None else "object") for value in values)
    else:
        said = schema.get("type", TYPES)
        for name in [said] if isinstance(said, str) else said:
            yield "number" if name == "integer" else name


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    found: list[Any] | None = schema.get("enum")
    return found


def _by_value(one: Mapping[str, Any], other: Mapping[str, Any], depth: int) -> bool:
    mine, its = _values(one), _values(other)
    if mine is None or its is None:
        return False
    return not {_canonical(value) for value in mine} & {_canonical(value) for value in its}


def _canonical(value: Any) -> str:
    """1 and 1.0 are the same value, and so are objects whatever their order."""
    whole = json.dumps(value, sort_keys=True)
    if isinstance(value, float | int) and not isinstance(value, bool):
        return repr(float(value))
    return whole.replace(".0", "") if isinstance(value, list | dict) else whole


def _by_range(one: Mapping[str, Any], other: Mapping[str, Any], depth: int) -> bool:
    """The largest that one allows is below the least that the other does."""
    pairs = [
        ("number", "maximum", "minimum"),
        ("array", "maxItems", "minItems"),
        ("string", "maxLength", "minLength"),
    ]
    for kind, most, least in pairs:
        if most in one and least in other and _only(one, kind) and _only(other, kind):
            return bool(one[most] < other[least])
    return False
