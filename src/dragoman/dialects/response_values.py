"""Values of the regions of a `response_template`, and the tool calls made of them.

JSON is carried as the text that the model wrote and decoded only as far as a name is needed: the arguments of
a call stay as they were written.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import msgspec
from msgspec import Raw

from dragoman.dialects.schema import ArgumentSchema, ToolDeclarations, quote_json
from dragoman.dialects.streaming_regex import StreamingPattern
from dragoman.types import ToolCall

Value: TypeAlias = Any
"""Text, `JsonText`, or dicts and lists of these."""
Arguments: TypeAlias = Mapping[str, Any]

PLACEHOLDER = re.compile(r"\{(\w+(?:\.\w+)*)\}")
_BARE_KEY = re.compile(r"([{,]\s*)(\w+)(\s*:)")


_UNREADABLE = (msgspec.DecodeError, msgspec.ValidationError, RecursionError, UnicodeError)


class MalformedRegion(Exception):
    """A region that does not match its template. Its text is emitted as text."""


class JsonText(str):
    """Text that contains JSON."""

    __slots__ = ()


def read_value(text: str, content: str, args: Arguments, tags: StreamingPattern | None = None) -> Value:
    """Parse a region: `read_value("a: 1", "kv-lines", {})` is `{"a": "1"}`."""
    return _READERS[content](text, args, tags)


def _text(text: str, args: Arguments, _: StreamingPattern | None = None) -> Value:
    return text.strip() if args.get("strip", True) else text


def _json(text: str, args: Arguments, _: StreamingPattern | None = None) -> Value:
    plain = not (args.get("unquoted_keys") or args.get("string_delims"))
    if plain and not args.get("allow_non_json"):
        return JsonText(text.strip())
    try:
        strict = text.strip() if plain else _strict(text, args)
        msgspec.json.decode(strict)
    except (*_UNREADABLE, MalformedRegion):
        if args.get("allow_non_json"):
            return _text(text, args)
        raise MalformedRegion from None
    return JsonText(strict)


def _strict(text: str, args: Arguments) -> str:
    """Convert `{a:<|"|>x<|"|>}` to `{"a":"x"}`. The contents of strings stay unchanged."""
    delimiters = dict(args.get("string_delims", ())) | {'"': '"'}
    opener = re.compile("|".join(map(re.escape, sorted(delimiters, key=len, reverse=True))))
    chunks, at = [], 0
    while match := opener.search(text, at):
        chunks.append(_quoted_keys(text[at : match.start()], args))
        if match[0] == '"':
            end = _end_of_string(text, match.end())
            chunks.append(text[match.start() : end])
        else:
            close = delimiters[match[0]]
            end = text.find(close, match.end())
            if end < 0:
                raise MalformedRegion
            chunks.append(quote_json(text[match.end() : end]))
            end += len(close)
        at = end
    return "".join([*chunks, _quoted_keys(text[at:], args)])


def _quoted_keys(text: str, args: Arguments) -> str:
    return _BARE_KEY.sub(r'\1"\2"\3', text) if args.get("unquoted_keys") else text


def _end_of_string(text: str, at: int) -> int:
    while (quote := text.find('"', at)) >= 0:
        escapes = quote - len(text[at:quote].rstrip("\\")) - at
        if escapes % 2 == 0:
            return quote + 1
        at = quote + 1
    raise MalformedRegion


def _pairs(text: str, args: Arguments, tags: StreamingPattern | None = None) -> Value:
    """Parse xml-inline: return the pattern's matches as a dict."""
    pairs: dict[str, Any] = {}
    for match in tags.find_all(text) if tags else ():
        if "key" not in match.groups:
            raise MalformedRegion
        key, value = (text[slice(*match.groups.get(name, (0, 0)))] for name in ("key", "value"))
        parsed = _parse_value(value, args)
        if key in pairs and args.get("merge_duplicates"):
            pairs[key] = [*(pairs[key] if isinstance(pairs[key], list) else [pairs[key]]), parsed]
        else:
            pairs[key] = parsed
    return pairs


def _lines(text: str, args: Arguments, tags: StreamingPattern | None = None) -> Value:
    pairs: dict[str, Any] = {}
    for line in text.split(args.get("line_sep", "\n")):
        key, separator, value = _text(line, args).partition(args.get("kv_sep", ":"))
        if separator:
            pairs[_text(key, args)] = _parse_value(_text(value, args), args)
    return pairs


class TypedValue(msgspec.Struct, frozen=True):
    """A tag's value, as written and as the template parses it; a tool's schema takes precedence."""

    written: str
    value: Value


def _parse_value(written: str, args: Arguments) -> TypedValue:
    parser = args.get("value_parser")
    if not parser:
        return TypedValue(written, written)
    return TypedValue(written, read_value(written, parser.get("name", "text"), parser.get("args", {})))


_READERS: Mapping[str, Callable[[str, Arguments, StreamingPattern | None], Value]] = {
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
"""Content types whose text is their value, so that it can be emitted as it comes."""


def open_json(value: Value) -> Value:
    """Decode one level of JSON: `open_json(JsonText('{"a": [1]}'))` is `{"a": JsonText("[1]")}`."""
    if not isinstance(value, JsonText):
        return value
    try:
        decoded = msgspec.json.decode(str(value), type=dict[str, Raw] | list[Raw] | str | float | bool | None)
    except _UNREADABLE:
        raise MalformedRegion from None
    if isinstance(decoded, dict):
        return {key: JsonText(bytes(raw).decode()) for key, raw in decoded.items()}
    if isinstance(decoded, list):
        return [JsonText(bytes(raw).decode()) for raw in decoded]
    return decoded


def fill_in(shape: Any, scope: Mapping[str, Value]) -> Value:
    """Fill a template: `fill_in({"name": "{content.f}"}, {"content": {"f": "x"}})` is `{"name": "x"}`."""
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
            raise MalformedRegion
        value = value[key]
    return value


def read_call_list(value: Value, tools: ToolDeclarations) -> list[ToolCall]:
    """Return the calls of a value in OpenAI's format, or in the format of its
    `function`; one call or a list.
    """
    value = open_json(value)
    return [_call(open_json(item), tools) for item in (value if isinstance(value, list) else [value])]


def _call(value: Value, tools: ToolDeclarations) -> ToolCall:
    inner = open_json(value["function"]) if isinstance(value, dict) and "function" in value else value
    if not isinstance(inner, dict):
        raise MalformedRegion
    name, id_ = open_json(inner.get("name")), open_json(value.get("id"))
    if not isinstance(name, str) or not name:
        raise MalformedRegion
    arguments = _arguments(inner.get("arguments", inner.get("parameters")), tools.arguments(name))
    return ToolCall(id=id_ if isinstance(id_, str) else None, name=name, arguments=arguments)


def _arguments(value: Value, schema: ArgumentSchema) -> str:
    if isinstance(value, dict):
        pairs = (f"{quote_json(key)}: {_write(member, schema.member(key))}" for key, member in value.items())
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, str):
        return str(value).strip() or "{}"
    if value is None:
        return "{}"
    raise MalformedRegion


def _write(value: Value, schema: ArgumentSchema) -> str:
    """Encode a value as JSON; the type of a tag's value comes from the tool's schema."""
    if isinstance(value, TypedValue):
        return schema.json(value.written) if schema.types else _write(value.value, schema)
    if isinstance(value, list):
        item = schema.item() if "array" in schema.types else schema
        return "[" + ", ".join(_write(one, item) for one in value) + "]"
    if isinstance(value, dict):
        return _arguments(value, schema)
    if isinstance(value, str):
        return str(value) if isinstance(value, JsonText) else quote_json(value)
    return msgspec.json.encode(value).decode()
