"""Bytes to a request struct, in one pass. Whatever is wrong becomes a 400 that names the place.

Before that, the shape of a body is looked at: how deep its JSON is, how much, how long its numbers. A few
counts tell that most bodies are fine; the others are looked at without their strings.
"""

import json
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Literal, TypeAlias, cast

import msgspec
import numpy as np
from msgspec import inspect

from dragoman.errors import BadRequest, UnknownField, is_near, shorten
from dragoman.json_amount import check_amount, outside_of_strings, too_much
from dragoman.limits import Limits

# The shape of a body, before anything is made of it.


_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_DIGITS_AS_ZERO = bytes(0x30 if 0x30 <= byte <= 0x39 else byte for byte in range(256))
_LONG = b"0" * 19
_LONG_INTEGER = re.compile(rb"(?<![0-9.eE+])-?[0-9]{19,}(?![0-9.eE])")
_LEAST, _MOST = -(2**63), 2**64 - 1


def check_shape(body: bytes, limits: Limits) -> None:
    """Raises where the body is of a shape that no request has. What is not JSON at all is found later."""
    if (
        len(body) > 2 * limits.json_values
        or body.count(b"[") + body.count(b"{") > min(limits.json_depth, limits.json_lists)
        or body.count(b":") > limits.json_names
        or _LONG in body.translate(_DIGITS_AS_ZERO)
    ):
        _check_bare(outside_of_strings(body), limits)
    _check_names(body)


def _check_bare(bare: bytes, limits: Limits) -> None:
    check_amount(bare, limits, "the body")
    if _depth(bare) > limits.json_depth:
        raise too_much("the body", limits.json_depth, "values within each other")
    zeros = bare.translate(_DIGITS_AS_ZERO)
    if _LONG not in zeros:
        return
    if b"0" * (limits.json_digits + 1) in zeros:
        message = f"The JSON of the body has a number of more than {limits.json_digits} digits."
        raise BadRequest(message, code="limit_exceeded")
    for found in _LONG_INTEGER.finditer(bare):
        if not _LEAST <= int(found[0]) <= _MOST:
            raise BadRequest("An integer of the body has more than 64 bits.", code="invalid_value")


def _depth(bare: bytes) -> int:
    brackets = np.frombuffer(bare.translate(None, _NOT_BRACKETS), np.uint8)
    # In ASCII what opens has the second bit, [ 0x5B and { 0x7B, and what closes has not, ] 0x5D and } 0x7D.
    return int(np.cumsum((brackets & 2).astype(np.int64) - 1).max(initial=0))


def _check_names(body: bytes) -> None:
    try:
        _NAMES.decode(body.decode())
    except _Twice as twice:
        raise BadRequest(
            f"The name {str(twice)[:64]!r} comes twice in one object.", code="invalid_json"
        ) from None
    except (ValueError, RecursionError):
        pass  # It is no JSON: who decodes it says where.


class _Twice(Exception):
    """A name that an object has two times: which of them counts, every reader decides for itself."""


def _no_name_twice(members: list[tuple[str, Any]]) -> None:
    if len(dict(members)) == len(members):
        return
    seen: set[str] = set()
    for name, _ in members:
        if name in seen:
            raise _Twice(name)
        seen.add(name)


# What a number is does not matter here, and nothing is quicker than its length.
_NAMES = json.JSONDecoder(object_pairs_hook=_no_name_twice, parse_int=len, parse_float=len)


# Its contents.
#
# A body that is not just right is read once more, field by field: what was right is decoded as before, and
# the rest is read the way that other servers and clients mean it (`fit`, and the names of `foreign_fields`).


Members: TypeAlias = Mapping[str, msgspec.Raw]
Unknown: TypeAlias = Literal["error", "warn"]

LONGEST_TEXT = 512
"""Of what msgspec says, which may quote a value or a name of any length; the place comes last."""
MOST_IGNORED = 32
"""Different fields of a body that may be left out of account; who sends more does not mean this server."""
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>[^`]*)`(?: - at `(?P<path>[^`]*)`)?")
_INVALID = re.compile(r"(?P<what>.*?)(?: - at (?:`key` in )?`(?P<path>[^`]*)`)?$", re.DOTALL)
_STEPS = re.compile(r"\[[^\]]*\]|[^.\[\]$]+")
_INDEX = re.compile(r"\[\d+\]")
_UNTOLD = re.compile(r"[^A-Za-z0-9_.\[\]-]")
_NUMBER = re.compile(r"[+-]?[0-9]{1,18}(\.[0-9]{0,18})?([eE][+-]?[0-9]{1,3})?", re.ASCII)
_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_any = msgspec.json.Decoder().decode
_describe: Callable[[Any], inspect.Type] = cache(inspect.type_info)


class Ignored:
    """The fields of a body that were accepted without effect; `unknown`: whether unknown ones may be."""

    __slots__ = ("_names", "_seen", "unknown")

    def __init__(self, unknown: Unknown = "warn") -> None:
        self.unknown = unknown
        self._names: dict[str, None] = {}
        self._seen: set[tuple[str, str]] = set()

    def add(self, place: str) -> None:
        if len(self._names) < MOST_IGNORED:
            self._names[_UNTOLD.sub("?", _INDEX.sub("[]", shorten(place, 64)))] = None

    def seen(self, place: str, name: str) -> bool:
        """Whether this unknown field was there before, in an object like this one."""
        known = (_INDEX.sub("[]", place), name)
        if known in self._seen:
            return True
        if len(self._seen) == MOST_IGNORED:
            full = _full_name(place, name)
            raise UnknownField(f"'{full}' is one of more than {MOST_IGNORED} unknown fields.", param=full)
        self._seen.add(known)
        return False

    @property
    def told(self) -> str:
        """`user, messages[].colour`, as a header or a log may have it; empty if there is nothing to tell."""
        return ", ".join(self._names)


class Foreign(msgspec.Struct, frozen=True):
    """What others call the fields of one type of request, and fields that only others have."""

    meant: Mapping[str, Callable[[Any, Members], Mapping[str, Any]]] = {}
    """The fields that are meant by one of another name, or by a value that only others have for it."""
    harmless: frozenset[str] = frozenset()
    """Without effect on the answer."""
    refused: Mapping[str, tuple[str, tuple[Any, ...]]] = {}
    """Why not, and the values that ask for nothing. What would change the answer is never left out."""
    wrapping: frozenset[str] = frozenset()
    """Fields that hold others, which count as if they stood beside them."""
    overrules: frozenset[str] = frozenset()
    """Names of `meant` that count more than the field they are about."""


NOTHING_FOREIGN = Foreign()
_OFF: tuple[Any, ...] = (False, "", [])
_TRUTHS: Mapping[Any, bool] = {"true": True, "false": False, 1: True, 0: False}


class _Field(msgspec.Struct, frozen=True):
    name: str
    kind: inspect.Type
    type: Any
    required: bool
    decoder: msgspec.json.Decoder[Any]


class Reader(msgspec.Struct, frozen=True):
    """Decodes one request type; made once per type, because building a decoder costs more than using it."""

    decoder: msgspec.json.Decoder[Any]
    foreign: Foreign
    idle: tuple[str, ...]
    """Its own fields that have no effect."""

    @classmethod
    def of(
        cls, type_: type[msgspec.Struct], foreign: Foreign = NOTHING_FOREIGN, idle: Sequence[str] = ()
    ) -> "Reader":
        return cls(msgspec.json.Decoder(type_), foreign, tuple(idle))

    @property
    def kind(self) -> inspect.Type:
        return _describe(self.decoder.type)

    def read(self, body: bytes, ignored: Ignored | None = None) -> Any:
        """`ignored` is told what of the body had no effect."""
        if not body:
            raise BadRequest("The request has no body; send a JSON object.", code="empty_body")
        ignored = ignored or Ignored("error")
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

    def _decode(self, body: bytes, ignored: Ignored) -> Any:
        try:
            return self.decoder.decode(body)
        except msgspec.ValidationError as error:
            try:
                members = _members(body)
            except msgspec.ValidationError:
                raise _explain(error, self.kind) from None
        return _LenientReading(self, members, ignored).request()

    def convert(self, value: Any, place: str, ignored: Ignored | None = None) -> Any:
        """The same for a part of a body that was decoded before: `tools[2]`.

        Without `ignored` nothing is fitted: for parts that are kept as they came.
        """
        return _convert(value, self.decoder.type, self.kind, place, ignored)


class _LenientReading:
    """One body, field by field."""

    def __init__(self, reader: Reader, members: Members, ignored: Ignored) -> None:
        self._type: Any = reader.decoder.type
        self._fields = _fields_of(cast(Hashable, self._type))
        self._foreign = reader.foreign
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
        """Whether the field is right as it stands; null is unset, whatever its name."""
        if name in self._fields:
            try:
                self._given[name] = self._fields[name].decoder.decode(raw)
                return True
            except msgspec.ValidationError as error:
                self._errors[name] = error.with_traceback(None)  # Its frames hold the body, and this.
        return bytes(memoryview(raw)[:5]) == b"null"

    def _value(self, name: str) -> Any:
        try:
            return _any(self._members[name])
        except msgspec.DecodeError:
            if name not in self._errors:
                raise
            # A number of too many digits: what the field has against it is clearer.
            raise _explain(self._errors[name], self._fields[name].kind, name) from None

    def _take(self, name: str, value: Any, parent: str = "", by: str = "") -> None:
        """`parent` is the field that it stands in, `by` what it was called there."""
        foreign = self._foreign
        if value is None:
            return
        if name in foreign.wrapping and isinstance(value, dict):
            for inner, one in value.items():
                self._take(inner, one, _full_name(parent, name))
        elif name in foreign.meant:
            for own, meant in foreign.meant[name](value, self._members).items():
                take = self._set if own == name else self._take
                take(own, meant, parent, by or name)
        elif name in self._fields:
            self._set(name, value, parent, by)
        elif name in foreign.harmless:
            self._ignored.add(name)
        elif name in foreign.refused:
            self._check_off(name, value)
        else:
            known = (*self._fields, *foreign.meant, *foreign.harmless, *foreign.refused)
            _check_unknown(name, parent, known, self._ignored)

    def _set(self, name: str, value: Any, parent: str, by: str) -> None:
        field, place = self._fields[name], _full_name(parent, by or name)
        made = _convert(value, field.type, field.kind, place, self._ignored)
        if made is None:
            return
        before = self._given.get(name)
        if before is None or by in self._foreign.overrules:
            self._given[name], self._places[name] = made, place
        elif isinstance(made, dict) and isinstance(before, dict):
            self._given[name] = {**made, **before}
        elif made != before:
            first = self._places.get(name, name)
            message = f"'{place}' and '{first}' say different things; send one of them."
            raise BadRequest(message, param=place, code="invalid_value")

    def _check_off(self, name: str, value: Any) -> None:
        reason, off = self._foreign.refused[name]
        if value not in _OFF and value not in off:
            message = f"'{name}' is not supported: {reason}."
            raise BadRequest(message, param=name, code="unsupported_field")


@cache
def _fields_of(type_: Any) -> Mapping[str, _Field]:
    """By the names that they have in JSON."""
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


def _convert(value: Any, type_: Any, kind: inspect.Type, place: str, ignored: Ignored | None) -> Any:
    try:
        return msgspec.convert(fit(value, kind, place, ignored) if ignored else value, type_)
    except msgspec.ValidationError as error:
        raise _explain(error, kind, place) from None
    except RecursionError:
        raise BadRequest(f"'{place}' is nested too deeply.", param=place, code="invalid_value") from None


def fit(value: Any, kind: inspect.Type, place: str, ignored: Ignored) -> Any:
    """The value as the type has it, where it can mean one thing only: `16.0` and `"16"` are the integer 16.

    Null is unset in every object of a type. What nobody knows is left out, unless it must not be.
    """
    kind = _option(value, kind)
    if isinstance(kind, inspect.StructType) and isinstance(value, dict):
        return _fit_object(value, kind, place, ignored)
    if isinstance(kind, inspect.ListType) and isinstance(value, list):
        item = kind.item_type
        if isinstance(item, inspect.IntType):
            return [one if type(one) is int else _fit_number(one, item) for one in value]
        return [fit(one, item, f"{place}[{number}]", ignored) for number, one in enumerate(value)]
    if isinstance(kind, inspect.DictType) and isinstance(value, dict):
        inner = kind.value_type
        if isinstance(inner, inspect.AnyType):
            return value
        return {key: fit(one, inner, place, ignored) for key, one in value.items() if one is not None}
    if isinstance(kind, inspect.IntType | inspect.FloatType | inspect.LiteralType):
        return _fit_number(value, kind)
    if isinstance(kind, inspect.BoolType) and isinstance(value, str | int | float):
        return _TRUTHS.get(value.lower() if isinstance(value, str) else value, value)
    return value


def _option(value: Any, kind: inspect.Type) -> inspect.Type:
    """Of several types, the one for such a value."""
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
        isinstance(kind, inspect.LiteralType) and all(isinstance(one, int) for one in kind.values)
    )
    if isinstance(value, str) and (whole or isinstance(kind, inspect.FloatType)):
        if not _NUMBER.fullmatch(value):
            return value
        value = float(value) if not value.lstrip("+-").isdigit() else int(value)
    return int(value) if whole and isinstance(value, float) and value.is_integer() else value


def _fit_object(
    value: dict[str, Any], kind: inspect.StructType, place: str, ignored: Ignored
) -> dict[str, Any]:
    kinds = _kinds_in(kind.cls)
    echoed: frozenset[str] = getattr(kind.cls, "echoed", frozenset())
    made: dict[str, Any] = {}
    for name, inner in value.items():
        if inner is None or name in echoed:
            continue
        if name in kinds:
            made[name] = fit(inner, kinds[name], f"{place}.{name}", ignored)
        elif name == kind.tag_field or not kind.forbid_unknown_fields:
            made[name] = inner
        else:
            exact = getattr(kind.cls, "exact", False)
            _check_unknown(name, place, (*kinds, *echoed), ignored, exact=exact)
    return made


@cache
def _kinds_in(type_: Any) -> Mapping[str, inspect.Type]:
    return {name: field.kind for name, field in _fields_of(type_).items()}


def _check_unknown(
    name: str, place: str, known: Sequence[str], ignored: Ignored, *, exact: bool = False
) -> None:
    """A slip is an error, and so is all else where the operator or the type wants that."""
    if ignored.seen(place, name):
        return
    full = _full_name(place, name)
    if near := next((other for other in known if is_near(name, other)), None):
        raise UnknownField(f"Unknown field '{full}'. Did you mean '{near}'?", param=full)
    if exact or ignored.unknown == "error":
        raise UnknownField(f"Unknown field '{full}'.", param=full)
    ignored.add(full)


def _full_name(place: str, name: str) -> str:
    name = shorten(name, 128)
    return f"{place}.{name}" if place else name


def _explain(error: msgspec.ValidationError, kind: inspect.Type, place: str = "") -> BadRequest:
    text = shorten(str(error), LONGEST_TEXT)
    if unknown := _UNKNOWN.match(text):
        full = _full_name(_param(unknown["path"], place) or "", unknown["name"])
        return UnknownField(f"Unknown field '{full}'.", param=full)
    invalid = _INVALID.match(text)
    what, path = (invalid["what"], invalid["path"]) if invalid else (text, None)
    param = _param(path, place)
    if missing := re.match(r"Object missing required field `([^`]*)`", what):
        name = f"{param}.{missing[1]}" if param else missing[1]
        return BadRequest(f"'{name}' is required.", param=name, code="missing_field")
    named = f"'{param}'" if param else "the body"
    known = ", ".join(_values(kind, path or ""))
    may_be = f"; it may be: {known}" if known else ""
    message = f"Invalid value for {named}: {_lower(what)}{may_be}."
    return BadRequest(message, param=param, code="invalid_value")


def _param(path: str | None, place: str) -> str | None:
    """`$.messages[0].role` gives `messages[0].role`; the root gives the place, or None."""
    return (place + (path or "").removeprefix("$")).removeprefix(".") or None


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:].replace("`", "")


def _values(kind: inspect.Type, path: str) -> list[str]:
    """What may stand at `$.messages[0].role`, where that is one of a few words."""
    places = [*_alternatives(kind)]
    for step in _STEPS.findall(path):
        places = [kind for place in places for inner in _inside(place, step) for kind in _alternatives(inner)]
    words = [place.values for place in places if isinstance(place, inspect.LiteralType)]
    return [*dict.fromkeys(str(word) for some in words for word in some)]


def _alternatives(kind: inspect.Type) -> Iterator[inspect.Type]:
    if isinstance(kind, inspect.Metadata):
        yield from _alternatives(kind.type)
    elif isinstance(kind, inspect.UnionType):
        for one in kind.types:
            yield from _alternatives(one)
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
