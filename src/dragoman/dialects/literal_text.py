"""JSON text written over as the literals of other syntaxes. Numbers keep their spelling."""

import json
import re
from collections.abc import Callable, Iterator

from dragoman.dialects.schema import whole_characters

_decode = json.JSONDecoder(strict=False, parse_int=len, parse_float=len).raw_decode
SPACE = re.compile(r"[\s,:]*")
PYTHON_WORDS = {"true": "True", "false": "False", "null": "None"}
BARE_KEY = re.compile(r"[\w.\-]+")


def written(write: Callable[[str], str], arguments: str) -> str:
    """The arguments as `write` writes them, or as they are where they are no JSON object: a call may have
    been cut off, and a client may send anything."""
    try:
        return write(arguments)
    except (ValueError, RecursionError):
        return arguments


def text_of(text: str) -> str:
    """What a JSON string says."""
    return whole_characters(json.loads(text, strict=False))


def members(text: str) -> Iterator[tuple[str, str]]:
    """The keys and values of an object, or the values of a list with "" for keys; values as JSON text."""
    text = text.strip()
    if text[:1] not in ("{", "["):
        raise ValueError(f"arguments must be a JSON object, not {text[:20]!r}")
    is_object, at = text[0] == "{", 1
    while True:
        at = _skipped(text, at)
        if at >= len(text) or text[at] in "}]":
            return
        key = ""
        if is_object:
            key, at = _decode(text, at)
            if not isinstance(key, str):
                raise ValueError("a key must be a string")
            at = _skipped(text, at)
        _, end = _decode(text, at)
        yield key, text[at:end]
        at = end


def _skipped(text: str, at: int) -> int:
    found = SPACE.match(text, at)
    return found.end() if found else at


def python_value(text: str) -> str:
    """`{"a": true}` as `{'a': True}`."""
    if text.startswith('"'):
        return repr(json.loads(text, strict=False))
    if text.startswith("{"):
        return "{" + ", ".join(f"{key!r}: {python_value(value)}" for key, value in members(text)) + "}"
    if text.startswith("["):
        return "[" + ", ".join(python_value(value) for _, value in members(text)) + "]"
    return PYTHON_WORDS.get(text, text)


def brace_value(text: str, quote: str) -> str:
    """`{"a": "x"}` as `{a:<|"|>x<|"|>}`."""
    if text.startswith('"'):
        return f"{quote}{text_of(text)}{quote}"
    if text.startswith("{"):
        pairs = (
            (key if BARE_KEY.fullmatch(key) else quote + key + quote, value) for key, value in members(text)
        )
        return "{" + ",".join(f"{key}:{brace_value(value, quote)}" for key, value in pairs) + "}"
    if text.startswith("["):
        return "[" + ",".join(brace_value(value, quote) for _, value in members(text)) + "]"
    return text
