"""The formats of strings, as patterns. Each matches what its standard allows, or the usual part of it."""

_DAY_OF_MONTH = (
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
# The year 0 is none for many who check dates, Python among them.
_YEAR = r"(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = rf"(?:{_YEAR}-{_DAY_OF_MONTH}|{_LEAP_YEAR}-02-29)"
_HOUR, _SIXTY = r"(?:[01][0-9]|2[0-3])", r"[0-5][0-9]"
# Fractions have an end, at nanoseconds, because a model may not find one.
# A leap second is the last one of a day in UTC, so it is only allowed where that can be seen.
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
"""Formats that we write down ourselves."""

NATIVE = frozenset({"duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
"""Formats of llguidance that hold against the test suite of JSON Schema."""

RANGES: dict[str, tuple[int, int]] = {"int32": (-(2**31), 2**31 - 1), "int64": (-(2**53), 2**53)}
"""OpenAPI's formats of integers."""

FREE = frozenset({"float", "double", "password", "binary"})
"""OpenAPI's formats that forbid no value."""

NOTES: dict[str, str] = {
    "date": "days that there are: 29 February in leap years only",
    "time": "with an offset; a leap second only where it is one in UTC",
    "date-time": "as `date` and `time`",
    "email": "without quoted names and addresses in brackets",
    "ipv6": "without an IPv4 address at its end",
    "byte": "base64",
    "int32": "a range of integers",
    "int64": "integers up to 2^53 in size",
    **dict.fromkeys(FREE, "OpenAPI's; forbids no value"),
}

KNOWN = frozenset({*PATTERNS, *NATIVE, *RANGES, *FREE})
