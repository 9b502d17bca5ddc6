"""Size of a JSON text (values, lists and objects, members), counted before it is decoded.

A JSON decoder runs as one call that blocks the whole process, so the size bounds how long all other requests
wait. The counting here works in chunks, or is as quick as a copy.
"""

import re
from collections.abc import Iterator
from typing import TypeAlias

from dragoman.errors import BadRequest
from dragoman.limits import Limits

CHUNK_BYTES = 128 * 1024
_ESCAPED = re.compile(rb"\\.", re.DOTALL)


Amount: TypeAlias = tuple[int, int, int]
"""The number of values, of lists and objects together, and of members of objects."""


def count_amount(bare: bytes) -> Amount:
    """Count values, lists and objects, and members in JSON without its strings; with strings it counts too
    many.
    """
    return _values(bare), bare.count(b"[") + bare.count(b"{"), bare.count(b":")


def check_json_size(bare: bytes, limits: Limits, whose: str, param: str | None = None) -> None:
    """Raise if there is more than a request may have; `bare` is the JSON without its strings."""
    names = "values", "lists and objects", "members of objects"
    for what, count, most in zip(names, count_amount(bare), most_amount(limits), strict=True):
        if count > most:
            raise too_much(whose, most, what, param)


def most_amount(limits: Limits) -> Amount:
    return limits.json_values, limits.json_lists, limits.json_names


def values(body: bytes) -> int:
    """Count the values in the JSON of an object or a list."""
    return _values(strip_strings(body))


def _values(bare: bytes) -> int:
    # One value begins the text; every other one follows one of these characters.
    return sum(map(bare.count, (b"[", b"{", b",")))


def too_much(whose: str, most: int, what: str, param: str | None = None) -> BadRequest:
    return BadRequest(f"The JSON of {whose} has more than {most} {what}.", param=param, code="limit_exceeded")


def strip_strings(body: bytes) -> bytes:
    """Return a JSON text without its strings and their quotation marks."""
    chunks: list[bytes] = []
    in_string = False
    for piece in _pieces(body):
        # Once escaped characters are removed, every quotation mark begins or ends a string.
        parts = _ESCAPED.sub(b"", piece).split(b'"')
        chunks += parts[in_string::2]
        in_string ^= len(parts) % 2 == 0
    return b"".join(chunks)


def _pieces(body: bytes) -> Iterator[bytes]:
    """Yield the text in chunks, none of which ends between a backslash and the character it escapes."""
    start = 0
    while start < len(body):
        end = start + CHUNK_BYTES
        piece = body[start:end]
        backslashes = len(piece) - len(piece.rstrip(b"\\"))
        if backslashes % 2:
            end += 1
            piece = body[start:end]
        yield piece
        start = end
