"""Bytes to a request struct, in one pass. Whatever is wrong becomes a 400 that names the place.

Before that, the shape of a body is looked at: how deep its JSON is, how much, how long its numbers. A few
counts tell that most bodies are fine; the others are looked at without their strings.
"""

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec import inspect

from dragoman.errors import BadRequest, UnknownField, shorten
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


T = TypeVar("T", bound=msgspec.Struct)

UNSUPPORTED: Mapping[str, str] = {
    name: reason
    for reason, names in {
        "say it in response_format": "response_schema",
        "whitespace and the way to a mask are the server's own": "guided_whitespace_pattern "
        "guided_decoding_backend",
        "this server has text models only": "audio mm_processor_kwargs prompt_embeds",
        "it belongs to a hosted service": "web_search_options moderation",
        "templates come from the model or the server's settings": "chat_template",
    }.items()
    for name in names.split()
}
"""Fields other servers know and we cannot honour: a 400 is better than an answer that ignores them."""

LONGEST_TEXT = 512
"""Of what msgspec says, which may quote a value or a name of any length; the place comes last."""
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>[^`]*)`(?: - at `(?P<path>[^`]*)`)?")
_INVALID = re.compile(r"(?P<what>.*?)(?: - at (?:`key` in )?`(?P<path>[^`]*)`)?$", re.DOTALL)


class Reader(msgspec.Struct, frozen=True):
    """Decodes one request type; made once per type, because building a decoder costs more than using it."""

    decoder: msgspec.json.Decoder[Any]
    names: tuple[str, ...]
    unsupported: Mapping[str, str]
    """What others know and we do not, and why."""

    @classmethod
    def of(cls, type_: type[msgspec.Struct], unsupported: Mapping[str, str] = UNSUPPORTED) -> "Reader":
        names = tuple(f.encode_name for f in msgspec.structs.fields(type_))
        return cls(msgspec.json.Decoder(type_), names, unsupported)

    def read(self, body: bytes) -> Any:
        if not body:
            raise BadRequest("The request has no body; send a JSON object.", code="empty_body")
        try:
            return self.decoder.decode(body)
        except msgspec.ValidationError as error:
            raise self._explain(shorten(str(error), LONGEST_TEXT)) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadRequest(f"The body is not valid JSON: {error}.", code="invalid_json") from None
        except RecursionError:
            raise BadRequest("The JSON of the body is nested too deeply.", code="invalid_json") from None

    def convert(self, value: Any, place: str) -> Any:
        """The same for a part of a body that was decoded before: `tools[2]`."""
        try:
            return msgspec.convert(value, self.decoder.type)
        except msgspec.ValidationError as error:
            raise self._explain(shorten(str(error), LONGEST_TEXT), place) from None
        except RecursionError:
            raise BadRequest(f"'{place}' is nested too deeply.", param=place, code="invalid_value") from None

    def _explain(self, text: str, place: str = "") -> BadRequest:
        if unknown := _UNKNOWN.match(text):
            return self._unknown(unknown["name"], _param(unknown["path"], place))
        invalid = _INVALID.match(text)
        what, path = (invalid["what"], invalid["path"]) if invalid else (text, None)
        param = _param(path, place)
        if missing := re.match(r"Object missing required field `([^`]*)`", what):
            name = f"{param}.{missing[1]}" if param else missing[1]
            return BadRequest(f"'{name}' is required.", param=name, code="missing_field")
        named = f"'{param}'" if param else "the body"
        known = ", ".join(_values(self.decoder.type, path or ""))
        may_be = f"; it may be: {known}" if known else ""
        message = f"Invalid value for {named}: {_lower(what)}{may_be}."
        return BadRequest(message, param=param, code="invalid_value")

    def _unknown(self, name: str, parent: str | None) -> BadRequest:
        name = shorten(name, 128)
        full = f"{parent}.{name}" if parent else name
        if parent is None and name in self.unsupported:
            message = f"'{name}' is not supported: {self.unsupported[name]}."
            return BadRequest(message, param=name, code="unsupported_field")
        near = difflib.get_close_matches(name, self.names, n=1) if parent is None else []
        hint = f" Did you mean '{near[0]}'?" if near else ""
        return UnknownField(f"Unknown field '{full}'.{hint}", param=full)


def _param(path: str | None, place: str) -> str | None:
    """`$.messages[0].role` gives `messages[0].role`; the root gives the place, or None."""
    return (place + (path or "").removeprefix("$")).removeprefix(".") or None


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:].replace("`", "")


_STEPS = re.compile(r"\[[^\]]*\]|[^.\[\]$]+")
_describe = cache(inspect.type_info)


def _values(type_: type, path: str) -> list[str]:
    """What may stand at `$.messages[0].role`, where that is one of a few words."""
    places = [*_alternatives(_describe(type_))]
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
