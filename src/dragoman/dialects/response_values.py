"""What stands in a region of a `response_template`, and the tool calls that are made of it.

JSON is carried as the text that the model wrote, and only looked into where a name is to be found: the
arguments of a call stay as they are written.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import msgspec
from msgspec import Raw

from dragoman.dialects.pattern import Pattern
from dragoman.dialects.schema import ArgumentPlace, Tools, quote_json
from dragoman.types import ToolCall

Value: TypeAlias = Any
"""Text, `JsonText`, or dicts and lists of these."""
Arguments: TypeAlias = Mapping[str, Any]

PLACEHOLDER = re.compile(r"\{(\w+(?:\.\w+)*)\}")
_BARE_KEY = re.compile(r"([{,]\s*)(\w+)(\s*:)")


_UNREADABLE = (msgspec.DecodeError, msgspec.ValidationError, RecursionError, UnicodeError)


class Malformed(Exception):
    """A region that is not what its template says. Its text is given as text."""


class JsonText(str):
    """Text that is to be read as JSON."""

    __slots__ = ()


def read_value(text: str, content: str, args: Arguments, tags: Pattern | None = None) -> Value:
    """`read_value("a: 1", "kv-lines", {})` is `{"a": "1"}`."""
    return _READERS[content](text, args, tags)


def _text(text: str, args: Arguments, _: Pattern | None = None) -> Value:
    return text.strip() if args.get("strip", True) else text


def _json(text: str, args: Arguments, _: Pattern | None = None) -> Value:
    plain = not (args.get("unquoted_keys") or args.get("string_delims"))
    if plain and not args.get("allow_non_json"):
        return JsonText(text.strip())
    try:
        strict = text.strip() if plain else _strict(text, args)
        msgspec.json.decode(strict)
    except (*_UNREADABLE, Malformed):
        if args.get("allow_non_json"):
            return _text(text, args)
        raise Malformed from None
    return JsonText(strict)


def _strict(text: str, args: Arguments) -> str:
    """`{a:<|"|>x<|"|>}` as `{"a":"x"}`. What is in strings is left alone."""
    delimiters = dict(args.get("string_delims", ())) | {'"': '"'}
    opener = re.compile("|".join(map(re.escape, sorted(delimiters, key=len, reverse=True))))
    made, at = [], 0
    while found := opener.search(text, at):
        made.append(_quoted_keys(text[at : found.start()], args))
        if found[0] == '"':
            end = _end_of_string(text, found.end())
            made.append(text[found.start() : end])
        else:
            close = delimiters[found[0]]
            end = text.find(close, found.end())
            if end < 0:
                raise Malformed
            made.append(quote_json(text[found.end() : end]))
            end += len(close)
        at = end
    return "".join([*made, _quoted_keys(text[at:], args)])


def _quoted_keys(text: str, args: Arguments) -> str:
    return _BARE_KEY.sub(r'\1"\2"\3', text) if args.get("unquoted_keys") else text


def _end_of_string(text: str, at: int) -> int:
    while (quote := text.find('"', at)) >= 0:
        escapes = quote - len(text[at:quote].rstrip("\\")) - at
        if escapes % 2 == 0:
            return quote + 1
        at = quote + 1
    raise Malformed


def _pairs(text: str, args: Arguments, tags: Pattern | None = None) -> Value:
    """xml-inline: what the pattern finds, as a dict."""
    found: dict[str, Any] = {}
    for match in tags.find_all(text) if tags else ():
        if "key" not in match.groups:
            raise Malformed
        key, value = (text[slice(*match.groups.get(name, (0, 0)))] for name in ("key", "value"))
        parsed = _parse_value(value, args)
        if key in found and args.get("merge_duplicates"):
            found[key] = [*(found[key] if isinstance(found[key], list) else [found[key]]), parsed]
        else:
            found[key] = parsed
    return found


def _lines(text: str, args: Arguments, tags: Pattern | None = None) -> Value:
    found: dict[str, Any] = {}
    for line in text.split(args.get("line_sep", "\n")):
        key, separator, value = _text(line, args).partition(args.get("kv_sep", ":"))
        if separator:
            found[_text(key, args)] = _parse_value(_text(value, args), args)
    return found


class Typed(msgspec.Struct, frozen=True):
    """A value of a tag, as it was written and as the template reads it; a schema may know better."""

    written: str
    value: Value


def _parse_value(written: str, args: Arguments) -> Typed:
    parser = args.get("value_parser")
    if not parser:
        return Typed(written, written)
    return Typed(written, read_value(written, parser.get("name", "text"), parser.get("args", {})))


_READERS: Mapping[str, Callable[[str, Arguments, Pattern | None], Value]] = {
    "text": _text,
    "int": lambda text, args, _: JsonText(text.strip()),
    "float": lambda text, args, _: JsonText(text.strip()),
    "bool": lambda text, args, _: JsonText("true" if text.strip().lower() in ("true", "1") else "false"),
    "json": _json,
    "xml-inline": _pairs,
    "kv-lines": _lines,
}
CONTENTS = frozenset(_READERS)
STREAMED = frozenset({"text", "int", "float", "bool"})
"""Their text is their value, so that it can be told as it comes."""


def open_json(value: Value) -> Value:
    """One level of JSON: `open_json(JsonText('{"a": [1]}'))` is `{"a": JsonText("[1]")}`."""
    if not isinstance(value, JsonText):
        return value
    try:
        found = msgspec.json.decode(str(value), type=dict[str, Raw] | list[Raw] | str | float | bool | None)
    except _UNREADABLE:
        raise Malformed from None
    if isinstance(found, dict):
        return {key: JsonText(bytes(raw).decode()) for key, raw in found.items()}
    if isinstance(found, list):
        return [JsonText(bytes(raw).decode()) for raw in found]
    return found


def fill_in(shape: Any, scope: Mapping[str, Value]) -> Value:
    """`fill_in({"name": "{content.f}"}, {"content": {"f": "x"}})` is `{"name": "x"}`."""
    if isinstance(shape, dict):
        return {key: fill_in(part, scope) for key, part in shape.items()}
    if isinstance(shape, list):
        return [fill_in(part, scope) for part in shape]
    whole = PLACEHOLDER.fullmatch(shape) if isinstance(shape, str) else None
    if not whole:
        return shape
    value: Value = scope
    for key in whole[1].split("."):
        value = open_json(value)
        if not isinstance(value, Mapping) or key not in value:
            raise Malformed
        value = value[key]
    return value


def read_call_list(value: Value, tools: Tools) -> list[ToolCall]:
    """The calls of a value in OpenAI's shape, or in that of its `function`; one, or a list."""
    value = open_json(value)
    return [_call(open_json(one), tools) for one in (value if isinstance(value, list) else [value])]


def _call(value: Value, tools: Tools) -> ToolCall:
    inner = open_json(value["function"]) if isinstance(value, dict) and "function" in value else value
    if not isinstance(inner, dict):
        raise Malformed
    name, id_ = open_json(inner.get("name")), open_json(value.get("id"))
    if not isinstance(name, str) or not name:
        raise Malformed
    arguments = _arguments(inner.get("arguments", inner.get("parameters")), tools.arguments(name))
    return ToolCall(id=id_ if isinstance(id_, str) else None, name=name, arguments=arguments)


def _arguments(value: Value, place: ArgumentPlace) -> str:
    if isinstance(value, dict):
        pairs = (f"{quote_json(key)}: {_write(one, place.member(key))}" for key, one in value.items())
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, str):
        return str(value).strip() or "{}"
    if value is None:
        return "{}"
    raise Malformed


def _write(value: Value, place: ArgumentPlace) -> str:
    """A value as JSON; the type of one that stood in a tag is what the tool's schema says."""
    if isinstance(value, Typed):
        return place.json(value.written) if place.types else _write(value.value, place)
    if isinstance(value, list):
        item = place.item() if "array" in place.types else place
        return "[" + ", ".join(_write(one, item) for one in value) + "]"
    if isinstance(value, dict):
        return _arguments(value, place)
    if isinstance(value, str):
        return str(value) if isinstance(value, JsonText) else quote_json(value)
    return msgspec.json.encode(value).decode()
