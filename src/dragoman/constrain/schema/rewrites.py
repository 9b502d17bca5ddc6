"""Rewrites of keywords that llguidance does not support, or interprets differently, into ones it enforces
exactly.
"""

import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import partial
from typing import Any

from dragoman.constrain.grammar.expressions import (
    PatternError,
    escape_character,
    read_pattern,
    write_pattern,
)
from dragoman.constrain.schema.keywords import SchemaProblems, at, fate_of
from dragoman.constrain.schema.unique_items import MARK
from dragoman.dialects.schema import resolve

# Formats of strings as patterns. Each matches what its standard allows, or the common part of it.


_DAY_OF_MONTH = (
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
# Many date parsers, such as Python's, do not accept the year 0.
_YEAR = r"(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = rf"(?:{_YEAR}-{_DAY_OF_MONTH}|{_LEAP_YEAR}-02-29)"
_HOUR, _SIXTY = r"(?:[01][0-9]|2[0-3])", r"[0-5][0-9]"
# Fractions end at nanoseconds, because a model may never end one. A leap second is the last second of a day
# in UTC, so it is only allowed where that is visible.
_TIME = (
    rf"(?:{_HOUR}:{_SIXTY}:{_SIXTY}(?:\.[0-9]{{1,9}})?(?:[Zz]|[+-]{_HOUR}:{_SIXTY})"
    r"|23:59:60(?:\.[0-9]{1,9})?(?:[Zz]|[+-]00:00))"
)

PATTERNS: dict[str, str] = {
    "date": rf"^{_DATE}$",
    "time": rf"^{_TIME}$",
    "date-time": rf"^{_DATE}[Tt]{_TIME}$",
    "byte": r"^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
    "json-pointer": r"^(?:/(?:[^~/]|~[01])*)*$",
    "relative-json-pointer": r"^(?:0|[1-9][0-9]*)(?:#|(?:/(?:[^~/]|~[01])*)*)$",
}
"""Formats with patterns of our own."""

NATIVE = frozenset({"duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
"""Formats of llguidance that pass JSON Schema's test suite."""

_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"(?:{_OCTET}\.){{3}}{_OCTET}"
_H16 = "[0-9a-fA-F]{1,4}"
_IPV6 = "|".join(
    [
        rf"(?:{_H16}:){{7}}{_H16}",
        *(rf"(?:{_H16}:){{{left}}}(?::{_H16}){{1,{7 - left}}}" for left in range(1, 7)),
        rf"::(?:{_H16}:){{0,5}}{_H16}",
        "::",
    ]
)
_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,7}}"
_ATOM = r"[a-zA-Z0-9!#$%&'*+\/=?^_`{|}~-]+"
_DAYS, _CLOCK = (
    r"[0-9]{1,9}D",
    r"T(?:[0-9]{1,9}H(?:[0-9]{1,9}M(?:[0-9]{1,9}S)?)?|[0-9]{1,9}M(?:[0-9]{1,9}S)?|[0-9]{1,9}S)",
)
_MONTHS = rf"[0-9]{{1,9}}M(?:{_DAYS})?"
_SPAN = rf"(?:[0-9]{{1,9}}Y(?:{_MONTHS})?|{_MONTHS}|{_DAYS})"
_URI_CHARACTERS = r"(?:[a-zA-Z0-9._~:@!$&'()*+,;=\/-]|%[0-9a-fA-F]{2})"
TEXTS = {
    "duration": rf"P(?:{_SPAN}(?:{_CLOCK})?|{_CLOCK}|[0-9]{{1,9}}W)",
    "email": rf"{_ATOM}(?:\.{_ATOM})*@{_LABEL}(?:\.{_LABEL})+",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": "[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}",
    "uri": rf"[a-zA-Z][a-zA-Z0-9+.-]*:\/\/{_HOST}(?::[0-9]{{1,5}})?(?:\/{_URI_CHARACTERS}*)?"
    rf"(?:\?{_URI_CHARACTERS}*)?(?:#{_URI_CHARACTERS}*)?",
}
"""Patterns of `NATIVE` formats, for texts that are not in JSON. Each matches a part of what its format
allows: the common spellings, and nothing invalid.
"""

RANGES: dict[str, tuple[int, int]] = {"int32": (-(2**31), 2**31 - 1), "int64": (-(2**53), 2**53)}
"""OpenAPI's integer formats."""

FREE = frozenset({"float", "double", "password", "binary"})
"""OpenAPI's formats that forbid no value."""

NOTES: dict[str, str] = {
    "date": "existing dates: 29 February in leap years only",
    "time": "with an offset; leap seconds only at the end of a UTC day",
    "date-time": "as `date` and `time`",
    "email": "without quoted names and addresses in brackets",
    "ipv6": "without an IPv4 address at its end",
    "byte": "base64",
    "int32": "a range of integers",
    "int64": "integers up to 2^53 in size",
    **dict.fromkeys(FREE, "OpenAPI's; forbids no value"),
}

KNOWN = frozenset({*PATTERNS, *NATIVE, *RANGES, *FREE})


# Rewrites of all keywords


_BESIDE = ("$ref", "allOf", "anyOf", "oneOf", "dependentSchemas", "dependencies", "if")
_DEPENDENCIES = ("dependentRequired", "dependentSchemas", "dependencies")
_MOST_DEPENDENCIES = 6
_MOST_STEPS = 8
_MOST_PROPERTIES = 500
"""Maximum number of properties: the cost of optional ones grows with the square of their number."""
_OF_NAMES = frozenset({"type", "enum", "const", "pattern", "minLength", "maxLength"})


class SchemaRewrite:
    """Rewrite of one schema: `words` is changed in place; `said` is what the client wrote."""

    def __init__(
        self,
        words: dict[str, Any],
        fields: Mapping[str, Any],
        root: Any,
        json_path: str,
        problems: SchemaProblems,
    ) -> None:
        self.words, self.said, self.root, self.pointer = words, fields, root, json_path
        self.problems = problems

    def refuse(self, word: str, message: str, *steps: str | int) -> None:
        self.problems.add(at(self.pointer, word, *steps), message)

    def demand(self, *schemas: Any) -> None:
        """Add a requirement. It comes last, so that the order of properties stays."""
        self.words["allOf"] = [*self.words.pop("allOf", []), *schemas]


def rewrite_words(
    words: dict[str, Any], fields: Mapping[str, Any], root: Any, json_path: str, problems: SchemaProblems
) -> Any:
    rewrite = SchemaRewrite(words, fields, root, json_path, problems)
    for step in _STEPS:
        step(rewrite)
    return rewrite.words


def _draft_7_items(rewrite: SchemaRewrite) -> None:
    words = rewrite.words
    rest = words.pop("additionalItems", None)
    if isinstance(words.get("items"), list):
        if "prefixItems" in words:
            rewrite.refuse("items", "must be a schema where there are prefixItems")
        first = words.pop("items")
        if first:
            words["prefixItems"] = first
        if rest is not None:
            words["items"] = rest


def _draft_4_bounds(rewrite: SchemaRewrite) -> None:
    for word, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        flag = rewrite.words.get(word)
        if isinstance(flag, bool):
            del rewrite.words[word]
            if flag and bound in rewrite.words:
                rewrite.words[word] = rewrite.words.pop(bound)


def _numbers(rewrite: SchemaRewrite) -> None:
    for word in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        if word in rewrite.words:
            check_number(rewrite.words[word], partial(rewrite.refuse, word))
    if "multipleOf" in rewrite.words:
        check_multiple(rewrite.words["multipleOf"], partial(rewrite.refuse, "multipleOf"))
    if "const" in rewrite.words:
        check_value(rewrite.words["const"], partial(rewrite.refuse, "const"))
    for value in rewrite.words.get("enum", []):
        check_value(value, partial(rewrite.refuse, "enum"))


def _names(rewrite: SchemaRewrite) -> None:
    if len(rewrite.words.get("properties", {})) > _MOST_PROPERTIES:
        rewrite.refuse("properties", f"has more than {_MOST_PROPERTIES} properties; use fewer")
    for word in ("properties", "required", *_DEPENDENCIES):
        for name in rewrite.words.get(word, []):
            check_value(name, partial(rewrite.refuse, word))


def _pattern(rewrite: SchemaRewrite) -> None:
    if "pattern" in rewrite.words:
        rewrite.words["pattern"] = _translate(rewrite, rewrite.words["pattern"], "pattern")
    if "patternProperties" in rewrite.words:
        rewrite.words["patternProperties"] = {
            _translate(rewrite, pattern, "patternProperties", pattern): schema
            for pattern, schema in rewrite.words["patternProperties"].items()
        }


def _translate(rewrite: SchemaRewrite, pattern: str, word: str, *steps: str) -> str:
    try:
        return write_pattern(read_pattern(pattern), in_json=True)
    except PatternError as error:
        rewrite.refuse(word, f"{error}, which cannot be enforced; write the pattern without it", *steps)
        return pattern


def _format(rewrite: SchemaRewrite) -> None:
    name = rewrite.words.get("format")
    if name is None or name in NATIVE:
        return
    del rewrite.words["format"]
    if name in PATTERNS:
        rewrite.demand({"pattern": PATTERNS[name]})
    elif name in RANGES:
        least, most = RANGES[name]
        rewrite.demand({"minimum": least, "maximum": most})
    elif name not in FREE:
        rewrite.refuse("format", f"must be one of {', '.join(sorted(KNOWN))}, or be replaced by a pattern")


def _nullable(rewrite: SchemaRewrite) -> None:
    if rewrite.words.pop("nullable", False) and "type" in rewrite.words:
        types = rewrite.words["type"]
        types = [types] if isinstance(types, str) else types
        rewrite.words["type"] = types if "null" in types else [*types, "null"]


def _dependencies(rewrite: SchemaRewrite) -> None:
    """Rewrite `{"a": ["b"]}` next to properties: either `a` is absent, or `b` is present."""
    fields: dict[str, list[Any]] = {}
    for word in _DEPENDENCIES:
        for name, demand in rewrite.words.pop(word, {}).items():
            fields.setdefault(name, []).append({"required": demand} if isinstance(demand, list) else demand)
    if len(fields) > _MOST_DEPENDENCIES:
        word = next(word for word in _DEPENDENCIES if word in rewrite.said)
        rewrite.refuse(word, f"has more than {_MOST_DEPENDENCIES} properties; use fewer")
        return
    for name, demands in fields.items():
        for demand in demands:
            if demand != {"required": []} and demand is not True:
                rewrite.demand({"anyOf": [{"properties": {name: False}}, demand]})


def _unevaluated(rewrite: SchemaRewrite) -> None:
    """Treat unevaluated as additional where no other keyword describes the value."""
    for word, other in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
        if word not in rewrite.words:
            continue
        schema = rewrite.words.pop(word)
        if schema is True or other in rewrite.words:
            continue
        beside = [name for name in _BESIDE if name in rewrite.said]
        if beside:
            rewrite.refuse(word, f"cannot be enforced together with {beside[0]}; use {other} in each option")
        else:
            rewrite.words[other] = schema


def _property_names(rewrite: SchemaRewrite) -> None:
    """Turn required names into the only pattern of properties."""
    names = rewrite.words.pop("propertyNames", True)
    if names in (True, {}, {"type": "string"}):
        return
    value = rewrite.said.get("propertyNames")
    pattern = _pattern_of_names(names) if isinstance(value, dict) and not set(value) - _OF_NAMES else None
    rest = rewrite.words.pop("additionalProperties", True)
    if pattern is None or "patternProperties" in rewrite.words or rewrite.words.get("properties"):
        rewrite.refuse(
            "propertyNames",
            "can only be enforced without properties and patternProperties, and with one of "
            "pattern, enum, const, or minLength and maxLength; use properties or patternProperties",
        )
        return
    rewrite.words["patternProperties"] = {pattern: rest}
    rewrite.words["additionalProperties"] = False


def _pattern_of_names(names: Any) -> str | None:
    words = dict(names) if isinstance(names, dict) else {"enum": []}
    if words.pop("type", "string") != "string":
        return None
    if set(words) == {"pattern"}:
        return str(words["pattern"])
    if set(words) in ({"enum"}, {"const"}):
        values = words.get("enum", [words.get("const")])
        texts = [value for value in values if isinstance(value, str)]
        escaped = ("".join(map(escape_character, text)) for text in texts)
        return f"^(?:{'|'.join(escaped)})$" if texts else None
    if words and set(words) <= {"minLength", "maxLength"}:
        most = int(words["maxLength"]) if "maxLength" in words else ""
        return f"^(?s:.){{{int(words.get('minLength', 0))},{most}}}$"
    return None


def _one_of(rewrite: SchemaRewrite) -> None:
    """Replace oneOf by anyOf; whether no value matches two options is checked at the end."""
    options = rewrite.words.pop("oneOf", None)
    if options is None:
        return
    rewrite.problems.exclusive.append((at(rewrite.pointer, "oneOf"), options))
    if "anyOf" in rewrite.words:
        rewrite.demand({"anyOf": options})
    else:
        rewrite.words["anyOf"] = options


def _sizes(rewrite: SchemaRewrite) -> None:
    """Check sizes. Names other than those of `properties` may be written twice, which a parser reads as one
    property.
    """
    words = rewrite.words
    least, required = words.get("minProperties", 0), set(words.get("required", []))
    if least <= len(required):
        words.pop("minProperties", None)
    elif (least > len(required) + 1 or words.get("properties")) and (least > 1 or required):
        rewrite.refuse("minProperties", "may be at most one more than the number of required properties")
    for word in ("minProperties", "minItems", "maxItems", "maxProperties", "minLength", "maxLength"):
        if word in words:
            words[word] = int(words[word])


def _unique(rewrite: SchemaRewrite) -> None:
    """Mark the list for `unique_items.py`, because no grammar can compare strings."""
    words = rewrite.words
    if not words.pop("uniqueItems", False) or words.get("maxItems", 2) <= 1:
        return
    items = rewrite.said.get("items")
    for _ in range(_MOST_STEPS):
        items = resolve(rewrite.root, items["$ref"]) if isinstance(items, dict) and "$ref" in items else items
    known = (
        {word: value for word, value in items.items() if not _is_note(word)}
        if isinstance(items, dict)
        else {}
    )
    values = known.get("enum", [known["const"]] if "const" in known else None)
    alone = (
        not {"prefixItems", "enum", "const", *_BESIDE} & set(rewrite.said)
        and "/allOf/" not in rewrite.pointer
    )
    if alone and known.get("type") == "string" and not set(known) - {"type", "minLength"}:
        words[MARK] = True
    elif alone and values and all(isinstance(value, str) for value in values) and _only_values(known):
        words[MARK] = values
        words["maxItems"] = min(words.get("maxItems", len(values)), len(set(values)))
    else:
        rewrite.refuse(
            "uniqueItems",
            "can only be enforced if the items are strings of any length, or an enum of strings, "
            "without enum, anyOf, allOf or $ref in the same schema; leave it out, or use an object instead "
            "of a list",
        )
        return
    rewrite.problems.watched.append(at(rewrite.pointer, "uniqueItems"))


def _only_values(known: Mapping[str, Any]) -> bool:
    return not set(known) - {"type", "enum", "const"} and known.get("type", "string") == "string"


def _is_note(word: str) -> bool:
    row = fate_of(word)
    return row is not None and row.handling == "note"


_STEPS: tuple[Callable[[SchemaRewrite], None], ...] = (
    _draft_7_items,
    _draft_4_bounds,
    _numbers,
    _names,
    _pattern,
    _unevaluated,
    _property_names,
    _nullable,
    _format,
    _dependencies,
    _one_of,
    _unique,
    _sizes,
)

EXACT = 2**53
"""Maximum magnitude of a bound: above it, numbers are rounded to the nearest 64-bit float."""
_MOST_STATES = 10_000

_UNWRITTEN = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f\ud800-\udfff]")
"""Characters that JSON can write only with \\\\u, which is not allowed here, and
halves of surrogate pairs.
"""

Refuse = Callable[[str], None]


def check_number(value: Any, refuse: Refuse) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        refuse("must be a number")
    elif abs(value) > EXACT:
        refuse("may be at most 2^53 in magnitude, because larger numbers are not exact")


def check_multiple(value: Any, refuse: Refuse) -> None:
    """Check a divisor: one of size n has n states."""
    check_number(value, refuse)
    if value <= 0:
        refuse("must be above 0")
        return
    exact = Decimal(str(value))
    decimals = max(0, -int(exact.normalize().as_tuple().exponent))
    if decimals > 9 or exact.scaleb(decimals) > _MOST_STATES:
        refuse(f"may be at most {_MOST_STATES} without its decimal point")


def check_value(value: Any, refuse: Refuse) -> None:
    """Check a value of `enum` or `const`, however nested."""
    waiting = [value]
    while waiting:
        current = waiting.pop()
        if isinstance(current, dict):
            waiting += [*current, *current.values()]
        elif isinstance(current, list):
            waiting += current
        elif isinstance(current, str) and _UNWRITTEN.search(current):
            refuse("contains a control character that cannot be written; remove it")
            return
        elif isinstance(current, int | float) and abs(current) > EXACT:
            refuse("contains a number above 2^53 in magnitude, which is not exact; use a smaller one")
            return
