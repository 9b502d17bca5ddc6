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
"""Those of `NATIVE`, for texts that are not in JSON. Each is a part of what its format allows: the common
ways to write it, and nothing that is wrong."""

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
