"""Decodes bytes to a request struct in one pass. Any error becomes a 400 that names the field.

Before that, the shape of a body is checked: nesting depth, size and length of numbers. A few counts show that
most bodies are fine; the others are checked again without their strings.
"""

import json
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Literal, TypeAlias, cast

import msgspec
import numpy as np
from msgspec import inspect

from dragoman.errors import BadRequest, UnknownField, is_typo_of, shorten
from dragoman.json_size import check_json_size, strip_strings, too_much
from dragoman.limits import Limits

# The shape of a body, checked before it is decoded.


_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_DIGITS_AS_ZERO = bytes(0x30 if 0x30 <= byte <= 0x39 else byte for byte in range(256))
_LONG = b"0" * 19
_LONG_INTEGER = re.compile(rb"(?<![0-9.eE+])-?[0-9]{19,}(?![0-9.eE])")
_LEAST, _MOST = -(2**63), 2**64 - 1


def check_shape(body: bytes, limits: Limits) -> None:
    """Raise if a body is nested, large or numeric beyond the limits. Invalid JSON is reported later."""
    if (
        len(body) > 2 * limits.json_values
        or body.count(b"[") + body.count(b"{") > min(limits.json_depth, limits.json_lists)
        or body.count(b":") > limits.json_names
        or _LONG in body.translate(_DIGITS_AS_ZERO)
    ):
        _check_bare(strip_strings(body), limits)
    _check_names(body)


def _check_bare(bare: bytes, limits: Limits) -> None:
    check_json_size(bare, limits, "the body")
    if _depth(bare) > limits.json_depth:
        raise too_much("the body", limits.json_depth, "values within each other")
    zeros = bare.translate(_DIGITS_AS_ZERO)
    if _LONG not in zeros:
        return
    if b"0" * (limits.json_digits + 1) in zeros:
        message = f"The JSON of the body has a number with more than {limits.json_digits} digits."
        raise BadRequest(message, code="limit_exceeded")
    for match in _LONG_INTEGER.finditer(bare):
        if not _LEAST <= int(match[0]) <= _MOST:
            raise BadRequest("The body has an integer of more than 64 bits.", code="invalid_value")


def _depth(bare: bytes) -> int:
    brackets = np.frombuffer(bare.translate(None, _NOT_BRACKETS), np.uint8)
    # In ASCII, opening brackets have the second bit ([ 0x5B, { 0x7B), closing ones do not (] 0x5D, } 0x7D).
    return int(np.cumsum((brackets & 2).astype(np.int64) - 1).max(initial=0))


def _check_names(body: bytes) -> None:
    try:
        _NAMES.decode(body.decode())
    except _DuplicateName as twice:
        raise BadRequest(
            f"The name {str(twice)[:64]!r} occurs twice in one object; send it once.", code="invalid_json"
        ) from None
    except (ValueError, RecursionError):
        pass  # Not JSON: the decoder reports where.


class _DuplicateName(Exception):
    """A name that occurs twice in an object: parsers differ in which of the values counts."""


def _no_name_twice(members: list[tuple[str, Any]]) -> None:
    if len(dict(members)) == len(members):
        return
    seen: set[str] = set()
    for name, _ in members:
        if name in seen:
            raise _DuplicateName(name)
        seen.add(name)


# The value of a number does not matter here, and its length is the fastest thing to compute.
_NAMES = json.JSONDecoder(object_pairs_hook=_no_name_twice, parse_int=len, parse_float=len)


# The contents of a body.
#
# A body that does not decode as it is gets read once more, field by field: valid fields are decoded as
# before, and the rest is read as other servers and clients mean it (`coerce`, and the names of
# `compat_fields`).


Members: TypeAlias = Mapping[str, msgspec.Raw]
Unknown: TypeAlias = Literal["error", "warn"]

LONGEST_TEXT = 512
"""Characters of a msgspec error, which may quote a value or name of any length; the path comes last."""
MOST_IGNORED = 32
"""Different ignored fields per body; a client that sends more is not meant for this server."""
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>[^`]*)`(?: - at `(?P<path>[^`]*)`)?")
_INVALID = re.compile(r"(?P<what>.*?)(?: - at (?:`key` in )?`(?P<path>[^`]*)`)?$", re.DOTALL)
_STEPS = re.compile(r"\[[^\]]*\]|[^.\[\]$]+")
_INDEX = re.compile(r"\[\d+\]")
_UNTOLD = re.compile(r"[^A-Za-z0-9_.\[\]-]")
_NUMBER = re.compile(r"[+-]?[0-9]{1,18}(\.[0-9]{0,18})?([eE][+-]?[0-9]{1,3})?", re.ASCII)
_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_any = msgspec.json.Decoder().decode
_describe: Callable[[Any], inspect.Type] = cache(inspect.type_info)


class IgnoredFields:
    """The fields of a body that were accepted without effect; `unknown` says whether unknown fields may be
    ignored."""

    __slots__ = ("_names", "_seen", "unknown")

    def __init__(self, unknown: Unknown = "warn") -> None:
        self.unknown = unknown
        self._names: dict[str, None] = {}
        self._seen: set[tuple[str, str]] = set()

    def add(self, param: str) -> None:
        if len(self._names) < MOST_IGNORED:
            self._names[_UNTOLD.sub("?", _INDEX.sub("[]", shorten(param, 64)))] = None

    def seen(self, param: str, name: str) -> bool:
        """Return whether this unknown field was seen before in an object at the same path."""
        known = (_INDEX.sub("[]", param), name)
        if known in self._seen:
            return True
        if len(self._seen) == MOST_IGNORED:
            full = _full_name(param, name)
            raise UnknownField(
                f"'{full}' is one of more than {MOST_IGNORED} unknown fields; send fewer.", param=full
            )
        self._seen.add(known)
        return False

    @property
    def summary(self) -> str:
        """The ignored fields for a header or log: `user, messages[].colour`; empty if there are none."""
        return ", ".join(self._names)


class CompatFields(msgspec.Struct, frozen=True):
    """Other servers' names for the fields of one request type, and fields that only other servers have."""

    aliases: Mapping[str, Callable[[Any, Members], Mapping[str, Any]]] = {}
    """Converts foreign fields to our own, and foreign values of our fields."""
    no_effect: frozenset[str] = frozenset()
    """Fields without effect on the answer."""
    refused: Mapping[str, tuple[str, tuple[Any, ...]]] = {}
    """The reason for rejecting each field, and its values that mean unset. Fields that would change the
    answer are never ignored."""
    wrapping: frozenset[str] = frozenset()
    """Objects whose members count as fields of the request."""
    overrules: frozenset[str] = frozenset()
    """Names in `aliases` that take precedence over the field they set."""


NOTHING_FOREIGN = CompatFields()
_OFF: tuple[Any, ...] = (False, "", [])
_TRUTHS: Mapping[Any, bool] = {"true": True, "false": False, 1: True, 0: False}


class _Field(msgspec.Struct, frozen=True):
    name: str
    kind: inspect.Type
    type: Any
    required: bool
    decoder: msgspec.json.Decoder[Any]


class RequestDecoder(msgspec.Struct, frozen=True):
    """Decodes one request type; created once per type, as building a decoder costs more than using it."""

    decoder: msgspec.json.Decoder[Any]
    compat: CompatFields
    idle: tuple[str, ...]
    """Own fields of the type without effect."""

    @classmethod
    def for_type(
        cls, type_: type[msgspec.Struct], foreign: CompatFields = NOTHING_FOREIGN, idle: Sequence[str] = ()
    ) -> "RequestDecoder":
        return cls(msgspec.json.Decoder(type_), foreign, tuple(idle))

    @property
    def kind(self) -> inspect.Type:
        return _describe(self.decoder.type)

    def read(self, body: bytes, ignored: IgnoredFields | None = None) -> Any:
        """Decode a body; fields without effect are added to `ignored`."""
        if not body:
            raise BadRequest("The request has no body; send a JSON object.", code="empty_body")
        ignored = ignored or IgnoredFields("error")
        try:
            request = self._decode(body, ignored)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadRequest(f"The body is not valid JSON: {error}.", code="invalid_json") from None
        except RecursionError:
            raise BadRequest("The JSON of the body is nested too deeply.", code="invalid_json") from None
        for name in self.idle:
            if getattr(request, name) is not None:
                ignored.add(name)
        return request

    def _decode(self, body: bytes, ignored: IgnoredFields) -> Any:
        try:
            return self.decoder.decode(body)
        except msgspec.ValidationError as error:
            try:
                members = _members(body)
            except msgspec.ValidationError:
                raise _explain(error, self.kind) from None
        return _LenientDecoder(self, members, ignored).request()

    def convert(self, value: Any, param: str, ignored: IgnoredFields | None = None) -> Any:
        """Decode a part of a body, such as `tools[2]`, that was already parsed.

        Without `ignored` no value is converted: for parts that are stored as sent.
        """
        return _convert(value, self.decoder.type, self.kind, param, ignored)


class _LenientDecoder:
    """Reads one body field by field."""

    def __init__(self, reader: RequestDecoder, members: Members, ignored: IgnoredFields) -> None:
        self._type: Any = reader.decoder.type
        self._fields = _fields_of(cast(Hashable, self._type))
        self._foreign = reader.compat
        self._members = members
        self._ignored = ignored
        self._given: dict[str, Any] = {}
        self._errors: dict[str, msgspec.ValidationError] = {}
        self._places: dict[str, str] = {}
        """Where a field was found, if not under its own name."""

    def request(self) -> Any:
        others = [name for name, raw in self._members.items() if not self._take_as_is(name, raw)]
        for name in sorted(others, key=self._foreign.overrules.__contains__):
            self._take(name, self._value(name))
        for name, field in self._fields.items():
            if field.required and name not in self._given:
                raise BadRequest(f"'{name}' is required.", param=name, code="missing_field")
        return self._type(**{self._fields[name].name: value for name, value in self._given.items()})

    def _take_as_is(self, name: str, raw: msgspec.Raw) -> bool:
        """Return whether the field is valid as it is; null means unset for any name."""
        if name in self._fields:
            try:
                self._given[name] = self._fields[name].decoder.decode(raw)
                return True
            except msgspec.ValidationError as error:
                self._errors[name] = error.with_traceback(
                    None
                )  # The frames would keep the body and this object alive.
        return bytes(memoryview(raw)[:5]) == b"null"

    def _value(self, name: str) -> Any:
        try:
            return _any(self._members[name])
        except msgspec.DecodeError:
            if name not in self._errors:
                raise
            # A number with too many digits: the field's own error is clearer.
            raise _explain(self._errors[name], self._fields[name].kind, name) from None

    def _take(self, name: str, value: Any, parent: str = "", by: str = "") -> None:
        """Take a field; `parent` is the object that contains it, `by` its name there."""
        foreign = self._foreign
        if value is None:
            return
        if name in foreign.wrapping and isinstance(value, dict):
            for inner, member in value.items():
                self._take(inner, member, _full_name(parent, name))
        elif name in foreign.aliases:
            for own, meant in foreign.aliases[name](value, self._members).items():
                take = self._set if own == name else self._take
                take(own, meant, parent, by or name)
        elif name in self._fields:
            self._set(name, value, parent, by)
        elif name in foreign.no_effect:
            self._ignored.add(name)
        elif name in foreign.refused:
            self._check_off(name, value)
        else:
            known = (*self._fields, *foreign.aliases, *foreign.no_effect, *foreign.refused)
            _check_unknown(name, parent, known, self._ignored)

    def _set(self, name: str, value: Any, parent: str, by: str) -> None:
        field, param_path = self._fields[name], _full_name(parent, by or name)
        converted = _convert(value, field.type, field.kind, param_path, self._ignored)
        if converted is None:
            return
        before = self._given.get(name)
        if before is None or by in self._foreign.overrules:
            self._given[name], self._places[name] = converted, param_path
        elif isinstance(converted, dict) and isinstance(before, dict):
            self._given[name] = {**converted, **before}
        elif converted != before:
            first = self._places.get(name, name)
            message = (
                f"'{param_path}' and '{first}' set the same field to different values; send one of them."
            )
            raise BadRequest(message, param=param_path, code="invalid_value")

    def _check_off(self, name: str, value: Any) -> None:
        reason, off = self._foreign.refused[name]
        if value not in _OFF and value not in off:
            message = f"'{name}' is not supported: {reason}."
            raise BadRequest(message, param=name, code="unsupported_field")


@cache
def _fields_of(type_: Any) -> Mapping[str, _Field]:
    """Return the fields of a type by their JSON names."""
    return {
        field.encode_name: _Field(
            field.name,
            _describe(field.type),
            field.type,
            field.required,
            msgspec.json.Decoder(field.type),
        )
        for field in msgspec.structs.fields(type_)
    }


def _convert(value: Any, type_: Any, kind: inspect.Type, param: str, ignored: IgnoredFields | None) -> Any:
    try:
        return msgspec.convert(coerce(value, kind, param, ignored) if ignored else value, type_)
    except msgspec.ValidationError as error:
        raise _explain(error, kind, param) from None
    except RecursionError:
        raise BadRequest(f"'{param}' is nested too deeply.", param=param, code="invalid_value") from None


def coerce(value: Any, kind: inspect.Type, param: str, ignored: IgnoredFields) -> Any:
    """Convert a value to the type if only one meaning is possible: `16.0` and `"16"` are the integer 16.

    Null means unset in every object of a type. Unknown fields are dropped, unless they must be rejected.
    """
    kind = _option(value, kind)
    if isinstance(kind, inspect.StructType) and isinstance(value, dict):
        return _fit_object(value, kind, param, ignored)
    if isinstance(kind, inspect.ListType) and isinstance(value, list):
        item = kind.item_type
        if isinstance(item, inspect.IntType):
            return [entry if type(entry) is int else _fit_number(entry, item) for entry in value]
        return [coerce(entry, item, f"{param}[{number}]", ignored) for number, entry in enumerate(value)]
    if isinstance(kind, inspect.DictType) and isinstance(value, dict):
        inner = kind.value_type
        if isinstance(inner, inspect.AnyType):
            return value
        return {
            key: coerce(entry, inner, param, ignored) for key, entry in value.items() if entry is not None
        }
    if isinstance(kind, inspect.IntType | inspect.FloatType | inspect.LiteralType):
        return _fit_number(value, kind)
    if isinstance(kind, inspect.BoolType) and isinstance(value, str | int | float):
        return _TRUTHS.get(value.lower() if isinstance(value, str) else value, value)
    return value


def _option(value: Any, kind: inspect.Type) -> inspect.Type:
    """Return the type of a union that fits this value."""
    options = [*_alternatives(kind)]
    if len(options) == 1:
        return options[0]
    wanted = next((kinds for type_, kinds in _KINDS.items() if isinstance(value, type_)), ())
    fitting = [option for option in options if isinstance(option, wanted)]
    if isinstance(value, dict):
        fitting.sort(key=lambda option: not _is_tagged(value, option))
    others = [option for option in options if not isinstance(option, inspect.NoneType)]
    return (fitting or others)[0]


def _is_tagged(value: dict[str, Any], kind: inspect.Type) -> bool:
    if not isinstance(kind, inspect.StructType) or kind.tag_field is None:
        return False
    return bool(value.get(kind.tag_field) == kind.tag)


_KINDS: Mapping[type, tuple[type[inspect.Type], ...]] = {
    dict: (inspect.StructType, inspect.DictType),
    list: (inspect.ListType,),
    str: (inspect.StrType,),
    bool: (inspect.BoolType,),
    int: (inspect.IntType, inspect.FloatType),
    float: (inspect.IntType, inspect.FloatType),
}


def _fit_number(value: Any, kind: inspect.Type) -> Any:
    whole = isinstance(kind, inspect.IntType) or (
        isinstance(kind, inspect.LiteralType) and all(isinstance(option, int) for option in kind.values)
    )
    if isinstance(value, str) and (whole or isinstance(kind, inspect.FloatType)):
        if not _NUMBER.fullmatch(value):
            return value
        value = float(value) if not value.lstrip("+-").isdigit() else int(value)
    return int(value) if whole and isinstance(value, float) and value.is_integer() else value


def _fit_object(
    value: dict[str, Any], kind: inspect.StructType, param: str, ignored: IgnoredFields
) -> dict[str, Any]:
    kinds = _kinds_in(kind.cls)
    echoed: frozenset[str] = getattr(kind.cls, "echoed", frozenset())
    fields: dict[str, Any] = {}
    for name, inner in value.items():
        if inner is None or name in echoed:
            continue
        if name in kinds:
            fields[name] = coerce(inner, kinds[name], f"{param}.{name}", ignored)
        elif name == kind.tag_field or not kind.forbid_unknown_fields:
            fields[name] = inner
        else:
            exact = getattr(kind.cls, "exact", False)
            _check_unknown(name, param, (*kinds, *echoed), ignored, exact=exact)
    return fields


@cache
def _kinds_in(type_: Any) -> Mapping[str, inspect.Type]:
    return {name: field.kind for name, field in _fields_of(type_).items()}


def _check_unknown(
    name: str, param: str, known: Sequence[str], ignored: IgnoredFields, *, exact: bool = False
) -> None:
    """Report an unknown field: a typo is always an error, others if the operator or the type requires it."""
    if ignored.seen(param, name):
        return
    full = _full_name(param, name)
    if near := next((other for other in known if is_typo_of(name, other)), None):
        raise UnknownField(f"Unknown field '{full}'. Did you mean '{near}'?", param=full)
    if exact or ignored.unknown == "error":
        raise UnknownField(f"Unknown field '{full}'.", param=full)
    ignored.add(full)


def _full_name(param: str, name: str) -> str:
    name = shorten(name, 128)
    return f"{param}.{name}" if param else name


def _explain(error: msgspec.ValidationError, kind: inspect.Type, param: str = "") -> BadRequest:
    text = shorten(str(error), LONGEST_TEXT)
    if unknown := _UNKNOWN.match(text):
        full = _full_name(_param(unknown["path"], param) or "", unknown["name"])
        return UnknownField(f"Unknown field '{full}'.", param=full)
    invalid = _INVALID.match(text)
    what, path = (invalid["what"], invalid["path"]) if invalid else (text, None)
    path_param = _param(path, param)
    if missing := re.match(r"Object missing required field `([^`]*)`", what):
        name = f"{path_param}.{missing[1]}" if path_param else missing[1]
        return BadRequest(f"'{name}' is required.", param=name, code="missing_field")
    named = f"'{path_param}'" if path_param else "the body"
    allowed = ", ".join(_values(kind, path or ""))
    remedy = f"; allowed are: {allowed}" if allowed else ""
    message = f"Invalid value for {named}: {_lower(what)}{remedy}."
    return BadRequest(message, param=path_param, code="invalid_value")


def _param(path: str | None, param: str) -> str | None:
    """Return the field: `$.messages[0].role` is `messages[0].role`; the root is `place`, or None."""
    return (param + (path or "").removeprefix("$")).removeprefix(".") or None


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:].replace("`", "")


def _values(kind: inspect.Type, path: str) -> list[str]:
    """Return the allowed values at `$.messages[0].role`, if the type there is a list of literals."""
    positions = [*_alternatives(kind)]
    for step in _STEPS.findall(path):
        positions = [
            kind
            for position in positions
            for inner in _inside(position, step)
            for kind in _alternatives(inner)
        ]
    words = [location.values for location in positions if isinstance(location, inspect.LiteralType)]
    return [*dict.fromkeys(str(word) for some in words for word in some)]


def _alternatives(kind: inspect.Type) -> Iterator[inspect.Type]:
    if isinstance(kind, inspect.Metadata):
        yield from _alternatives(kind.type)
    elif isinstance(kind, inspect.UnionType):
        for option in kind.types:
            yield from _alternatives(option)
    else:
        yield kind


def _inside(kind: inspect.Type, step: str) -> Iterator[inspect.Type]:
    if isinstance(kind, inspect.StructType):
        if kind.tag_field == step and isinstance(kind.tag, str):
            yield inspect.LiteralType((kind.tag,))
        yield from (field.type for field in kind.fields if field.encode_name == step)
    elif isinstance(kind, inspect.ListType):
        yield kind.item_type
    elif isinstance(kind, inspect.DictType):
        yield kind.value_type
