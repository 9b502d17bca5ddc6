"""The shape of a body before anything is made of it: how deep its JSON is, how much, how long its numbers.

A few counts tell that most bodies are fine; the others are looked at without their strings.
"""

import json
import re
from typing import Any

import numpy as np

from dragoman.errors import BadRequest
from dragoman.json_amount import check_amount, outside_of_strings, too_much
from dragoman.limits import Limits

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
