"""Rendering: an answer as a model would write it, the inverse of `parse`."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from html import escape

from dragoman.dialects.declarations import (
    AttributedCalls,
    BraceCalls,
    Calls,
    Dialect,
    JsonCalls,
    KeyedCalls,
    NamedCalls,
    PythonCalls,
    PythonObjects,
    TaggedCalls,
    TreeCalls,
)
from dragoman.dialects.registry import get_dialect
from dragoman.dialects.schema import quote_json, whole_characters
from dragoman.types import Answer, ToolCall

PYTHON_CALL = "{name}({arguments})"


def render(dialect: str | Dialect, answer: Answer) -> str:
    """Render an answer: `render("hermes", Answer(text="Hi"))` is "Hi". Reasoning, then text, then calls.

    What a syntax cannot represent is written unchanged: a tag inside a tagged argument's value ends that
    value. Arguments that are not a JSON object are also written unchanged.
    """
    dialect = get_dialect(dialect) if isinstance(dialect, str) else dialect
    if dialect.channels is not None:
        return _write_blocks(dialect, answer)
    parts = []
    if answer.reasoning and dialect.reasoning is not None:
        preface = dialect.reasoning.preface
        written = answer.reasoning.removeprefix(preface) if preface else answer.reasoning
        parts.append(dialect.reasoning.open[0] + written + dialect.reasoning.close[0])
    if answer.text:
        text = answer.text.removeprefix(dialect.prepends)
        parts.append(dialect.text_open + text + dialect.text_close)
    if answer.calls and dialect.calls:
        shape = dialect.calls[0]
        parts.append(shape.before if answer.text and not dialect.text_close else "")
        parts.append(render_calls(shape, answer.calls))
    return "".join(parts)


def _write_blocks(dialect: Dialect, answer: Answer) -> str:
    channels = dialect.channels
    assert channels is not None
    reasoning, text, call = channels.written
    blocks = [reasoning.format(body=answer.reasoning)] if answer.reasoning and reasoning else []
    blocks += [text.format(body=answer.text)] if answer.text else []
    for tool_call in answer.calls:
        body = render_calls(dialect.calls[0], [tool_call]) if dialect.calls else tool_call.arguments
        blocks.append(call.format(name=tool_call.name, body=body))
    return channels.start[0].join(blocks)


def render_calls(shape: Calls, calls: Sequence[ToolCall]) -> str:
    """Render the calls of one answer, with the text around and between them."""
    if isinstance(shape, JsonCalls | PythonCalls):
        return _write_together(shape, calls)
    section = shape.section
    written = [_write_one(shape, call, index) for index, call in enumerate(calls)]
    if section is not None and section.each:
        written = [section.open[0] + one + section.close[0] for one in written]
    joined = shape.between.join(written)
    if section is None or section.each:
        return joined
    return (
        section.open[0] + joined.rstrip("\n" if section.close[0].startswith("\n") else "") + section.close[0]
    )


def _write_one(shape: NamedCalls | TaggedCalls | BraceCalls, call: ToolCall, index: int) -> str:
    if isinstance(shape, NamedCalls):
        return _write_named(shape, call, index)
    return _write_tagged(shape, call, index) if isinstance(shape, TaggedCalls) else _write_brace(shape, call)


def _write_together(shape: JsonCalls | PythonCalls, calls: Sequence[ToolCall]) -> str:
    """Render calls that share one list, or have one marker each."""
    opening, closing = shape.open[0] if shape.open else "", shape.closing
    if isinstance(shape, PythonCalls):
        inside = shape.separator.join(map(_write_python, calls))
        return opening + (f"[{inside}]" if shape.brackets else inside) + closing
    objects = [_write_object(shape, call) for call in calls]
    if shape.list == "must" or (shape.list == "may" and len(calls) > 1):
        return opening + _write_list(shape, objects) + closing
    if shape.several:
        return opening + shape.separator.join(objects) + closing
    section = shape.section
    wrapped = [opening + one + closing for one in objects]
    if section is not None and section.each:
        wrapped = [section.open[0] + one + "".join(section.close[:1]) for one in wrapped]
    return shape.between.join(wrapped)


def _write_list(shape: JsonCalls, objects: list[str]) -> str:
    if not shape.indent:
        return "[" + shape.separator.join(objects) + "]"
    return "[\n" + ",\n".join(shape.indent + one for one in objects) + "\n]"


def _write_object(shape: JsonCalls, call: ToolCall) -> str:
    if isinstance(shape, KeyedCalls):
        return f"{{{quote_json(call.name)}: {call.arguments}}}"
    fields = [(shape.name[0], quote_json(call.name)), (shape.arguments[0], call.arguments)]
    if shape.id and call.id:
        fields.insert(0, (shape.id[0], quote_json(call.id)))
    if isinstance(shape, PythonObjects):
        return (
            "{" + ", ".join(f"{key!r}: {write_or_keep(python_value, value)}" for key, value in fields) + "}"
        )
    return "{" + ", ".join(f'"{key}": {value}' for key, value in fields) + "}"


def _write_named(shape: NamedCalls, call: ToolCall, index: int) -> str:
    head = call.name
    if shape.prefixed:
        own = call.id is not None and call.id.rpartition(":")[0] in (call.name, shape.prefixed + call.name)
        head = call.id if own and call.id else f"{shape.prefixed}{call.name}:{index}"
    elif shape.id_first:
        head = f"{call.id or format(index, '010')}{shape.id_first}{call.name}"
    elif shape.id_after and call.id:
        head = f"{call.name}{shape.id_after}{call.id}"
    return shape.open[0] + head + shape.then[0] + call.arguments + shape.closing


def _write_tagged(shape: TaggedCalls, call: ToolCall, index: int) -> str:
    name = call.name
    if isinstance(shape, AttributedCalls):
        name = escape(name) + shape.rest.format(index=index + 1)
    opening = shape.open[0] + name + shape.then[0]
    tags = write_or_keep(
        lambda text: "".join(_write_argument(shape, *member) for member in members(text)), call.arguments
    )
    return opening + tags + shape.close[0]


def _write_argument(shape: TaggedCalls, key: str, value: str) -> str:
    if isinstance(shape, TreeCalls):
        return _write_tag(shape, key, value)
    is_text = value.startswith('"')
    stated = ""
    if shape.types == "string":
        stated = "true" if is_text else "false"
    elif shape.types == "name":
        stated = _type_name(value)
    inside = string_of(value) if is_text else value
    if shape.cdata and is_text and ("<" in inside or inside != inside.strip()):
        inside = f"<![CDATA[{inside}]]>"
    typed = stated + shape.type_end[0] if shape.type_end else ""
    key = escape(key) if isinstance(shape, AttributedCalls) else key
    return shape.key[0] + key + shape.key_end[0] + typed + shape.value + inside + shape.value_end[0]


def _type_name(value: str) -> str:
    names = {'"': "string", "{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null"}
    return names.get(value[0], "number")


def _write_tag(shape: TreeCalls, key: str, value: str) -> str:
    """Render a value as a tag with nested tags."""
    if value.startswith('"'):
        inside = string_of(value)
    elif value.startswith("{"):
        inside = "".join(_write_tag(shape, *member) for member in members(value))
    elif value.startswith("["):
        inside = "".join(_write_tag(shape, "item", item) for _, item in members(value))
    else:
        inside = value
    return f"{shape.lead}<{key}>{inside}{shape.lead}</{key}>"


def _write_python(call: ToolCall) -> str:
    return PYTHON_CALL.format(name=call.name, arguments=write_or_keep(_write_keywords, call.arguments))


def _write_keywords(arguments: str) -> str:
    return ", ".join(f"{key}={python_value(value)}" for key, value in members(arguments))


def _write_brace(shape: BraceCalls, call: ToolCall) -> str:
    arguments = write_or_keep(lambda text: brace_value(text, shape.quote), call.arguments)
    return shape.open[0] + call.name + arguments + shape.close[0]


# Conversion of JSON text to literals of other syntaxes. Numbers keep their spelling.

_decode = json.JSONDecoder(strict=False, parse_int=len, parse_float=len).raw_decode
SPACE = re.compile(r"[\s,:]*")
PYTHON_WORDS = {"true": "True", "false": "False", "null": "None"}
BARE_KEY = re.compile(r"[\w.\-]+")


def write_or_keep(write: Callable[[str], str], arguments: str) -> str:
    """Return the arguments as `write` renders them, or unchanged if they are not a JSON object: a call may
    have been cut off, and a client may send anything.
    """
    try:
        return write(arguments)
    except (ValueError, RecursionError):
        return arguments


def string_of(text: str) -> str:
    """Return the contents of a JSON string."""
    return whole_characters(json.loads(text, strict=False))


def members(text: str) -> Iterator[tuple[str, str]]:
    """Yield keys and values of an object, or values of a list with "" as keys; values as JSON text."""
    text = text.strip()
    if text[:1] not in ("{", "["):
        raise ValueError(f"arguments must be a JSON object, not {text[:20]!r}")
    is_object, at = text[0] == "{", 1
    while True:
        at = _skip_layout(text, at)
        if at >= len(text) or text[at] in "}]":
            return
        key = ""
        if is_object:
            key, at = _decode(text, at)
            if not isinstance(key, str):
                raise ValueError("a key must be a string")
            at = _skip_layout(text, at)
        _, end = _decode(text, at)
        yield key, text[at:end]
        at = end


def _skip_layout(text: str, at: int) -> int:
    match = SPACE.match(text, at)
    return match.end() if match else at


def python_value(text: str) -> str:
    """Convert JSON `{"a": true}` to Python's `{'a': True}`."""
    if text.startswith('"'):
        return repr(json.loads(text, strict=False))
    if text.startswith("{"):
        return "{" + ", ".join(f"{key!r}: {python_value(value)}" for key, value in members(text)) + "}"
    if text.startswith("["):
        return "[" + ", ".join(python_value(value) for _, value in members(text)) + "]"
    return PYTHON_WORDS.get(text, text)


def brace_value(text: str, quote: str) -> str:
    """Convert JSON `{"a": "x"}` to `{a:<|"|>x<|"|>}`."""
    if text.startswith('"'):
        return f"{quote}{string_of(text)}{quote}"
    if text.startswith("{"):
        pairs = (
            (key if BARE_KEY.fullmatch(key) else quote + key + quote, value) for key, value in members(text)
        )
        return "{" + ",".join(f"{key}:{brace_value(value, quote)}" for key, value in pairs) + "}"
    if text.startswith("["):
        return "[" + ",".join(brace_value(value, quote) for _, value in members(text)) + "]"
    return text
