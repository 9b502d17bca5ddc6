"""What a schema says of a string, as languages of the string itself: without quotes and escapes around it."""

from collections.abc import Mapping
from typing import Any

from dragoman.constrain.calls.schema_parts import SchemaPlace
from dragoman.constrain.grammar.expressions import PatternError, read_pattern, write_search
from dragoman.constrain.grammar.rules import Symbol, regex
from dragoman.constrain.schema import formats

MOST_LENGTH = 100_000

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
FORMATS = {
    "duration": rf"P(?:{_SPAN}(?:{_CLOCK})?|{_CLOCK}|[0-9]{{1,9}}W)",
    "email": rf"{_ATOM}(?:\.{_ATOM})*@{_LABEL}(?:\.{_LABEL})+",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": "[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}",
    "uri": rf"[a-zA-Z][a-zA-Z0-9+.-]*:\/\/{_HOST}(?::[0-9]{{1,5}})?(?:\/{_URI_CHARACTERS}*)?"
    rf"(?:\?{_URI_CHARACTERS}*)?(?:#{_URI_CHARACTERS}*)?",
}
"""Those that are llguidance's own in JSON. Each is a part of what its format allows: the common ways to write
it, and nothing that is wrong."""


def languages(schema: Mapping[str, Any], where: SchemaPlace) -> list[Symbol]:
    """The terminals that a string must all be in; none where any string will do."""
    found = []
    patterns = schema.get("pattern", [])
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        found.append(search(pattern, where.at("pattern")))
    if "format" in schema:
        found += _format(schema["format"], where.at("format"))
    length = lengths(schema, where)
    if length:
        found.append(regex(f"(?s:.{length})"))
    return found


def lengths(schema: Mapping[str, Any], where: SchemaPlace) -> str:
    """`{2,5}`: how many characters there are; "" where any number will do."""
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    for word, value in (("minLength", least), ("maxLength", most)):
        if value is not None and not (float(value).is_integer() and 0 <= value <= MOST_LENGTH):
            where.at(word).refuse(f"must be a whole number up to {MOST_LENGTH}")
    if most is not None and most < least:
        where.at("maxLength").refuse("is less than minLength")
    if most is None:
        return f"{{{int(least)},}}" if least else ""
    return f"{{{int(least)},{int(most)}}}"


def _format(name: Any, where: SchemaPlace) -> list[Symbol]:
    if name in formats.PATTERNS:
        return [search(formats.PATTERNS[name], where)]
    if name in FORMATS:
        return [regex(FORMATS[name])]
    if name not in formats.FREE:
        where.refuse(f"must be one of {', '.join(sorted([*formats.PATTERNS, *FORMATS]))}")
    return []


def search(pattern: str, where: SchemaPlace) -> Symbol:
    """An expression that must match somewhere."""
    try:
        return regex(write_search(read_pattern(pattern)))
    except PatternError as error:
        where.refuse(f"{error}, which cannot be enforced")
