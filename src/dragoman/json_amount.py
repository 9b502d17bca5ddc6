"""How much a JSON text holds, before it is decoded.

Whatever decodes JSON does it in one call that nothing else in the process can interrupt, so how much there is
says how long all others may have to wait. What is done here is done in pieces, or is as quick as a copy.
"""

import re
from collections.abc import Iterator
from typing import TypeAlias

from dragoman.errors import BadRequest
from dragoman.limits import Limits

PIECE_BYTES = 128 * 1024
_ESCAPED = re.compile(rb"\\.", re.DOTALL)


Amount: TypeAlias = tuple[int, int, int]
"""How many values there are, lists and objects, and members of objects."""


def count_amount(bare: bytes) -> Amount:
    """Of what stands outside of strings; with strings, it is more than there is."""
    return _values(bare), bare.count(b"[") + bare.count(b"{"), bare.count(b":")


def check_amount(bare: bytes, limits: Limits, whose: str, param: str | None = None) -> None:
    """Raises where there is more than a request may have; `bare` is what stands outside of strings."""
    names = "values", "lists and objects", "members of objects"
    for what, count, most in zip(names, count_amount(bare), most_amount(limits), strict=True):
        if count > most:
            raise too_much(whose, most, what, param)


def most_amount(limits: Limits) -> Amount:
    return limits.json_values, limits.json_lists, limits.json_names


def values(body: bytes) -> int:
    """How many values there are in the JSON of an object or a list."""
    return _values(outside_of_strings(body))


def _values(bare: bytes) -> int:
    # One begins the text, and the others stand after one of these.
    return sum(map(bare.count, (b"[", b"{", b",")))


def too_much(whose: str, most: int, what: str, param: str | None = None) -> BadRequest:
    return BadRequest(f"The JSON of {whose} has more than {most} {what}.", param=param, code="limit_exceeded")


def outside_of_strings(body: bytes) -> bytes:
    """What of a JSON text stands outside of its strings, quotation marks not included."""
    found: list[bytes] = []
    in_string = False
    for piece in _pieces(body):
        # Without escaped ones, every quotation mark begins a string or ends it.
        parts = _ESCAPED.sub(b"", piece).split(b'"')
        found += parts[in_string::2]
        in_string ^= len(parts) % 2 == 0
    return b"".join(found)


def _pieces(body: bytes) -> Iterator[bytes]:
    """None of them ends between a backslash and what it escapes."""
    start = 0
    while start < len(body):
        end = start + PIECE_BYTES
        piece = body[start:end]
        backslashes = len(piece) - len(piece.rstrip(b"\\"))
        if backslashes % 2:
            end += 1
            piece = body[start:end]
        yield piece
        start = end
