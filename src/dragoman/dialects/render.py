"""An answer written as a model would write it: the way back from what `parse` gives."""

from collections.abc import Sequence
from html import escape

from dragoman.dialects.declare import (
    BraceCalls,
    Calls,
    Dialect,
    JsonCalls,
    NamedCalls,
    PythonCalls,
    TaggedCalls,
)
from dragoman.dialects.literal_text import brace_value, members, python_value, text_of, written
from dragoman.dialects.registry import get_dialect
from dragoman.dialects.schema import quoted
from dragoman.types import Answer, ToolCall

PYTHON_CALL = "{name}({arguments})"


def render(dialect: str | Dialect, answer: Answer) -> str:
    """`render("hermes", Answer(text="Hi"))` is "Hi". Reasoning comes first, then text, then calls.

    What a syntax cannot hold is written as it is: a tag in the value of a tagged argument ends that value.
    So are arguments that are no JSON object.
    """
    dialect = get_dialect(dialect) if isinstance(dialect, str) else dialect
    if dialect.channels is not None:
        return _blocks(dialect, answer)
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


def _blocks(dialect: Dialect, answer: Answer) -> str:
    channels = dialect.channels
    assert channels is not None
    reasoning, text, call = channels.written
    blocks = [reasoning.format(body=answer.reasoning)] if answer.reasoning and reasoning else []
    blocks += [text.format(body=answer.text)] if answer.text else []
    for made in answer.calls:
        body = render_calls(dialect.calls[0], [made]) if dialect.calls else made.arguments
        blocks.append(call.format(name=made.name, body=body))
    return channels.start[0].join(blocks)


def render_calls(shape: Calls, calls: Sequence[ToolCall]) -> str:
    """The calls of one answer, with what stands around and between them."""
    if isinstance(shape, JsonCalls | PythonCalls):
        return _together(shape, calls)
    section = shape.section
    written = [_one(shape, call, index) for index, call in enumerate(calls)]
    if section is not None and section.each:
        written = [section.open[0] + one + section.close[0] for one in written]
    joined = shape.between.join(written)
    if section is None or section.each:
        return joined
    return (
        section.open[0] + joined.rstrip("\n" if section.close[0].startswith("\n") else "") + section.close[0]
    )


def _one(shape: NamedCalls | TaggedCalls | BraceCalls, call: ToolCall, index: int) -> str:
    if isinstance(shape, NamedCalls):
        return _named(shape, call, index)
    return _tagged(shape, call, index) if isinstance(shape, TaggedCalls) else _brace(shape, call)


def _together(shape: JsonCalls | PythonCalls, calls: Sequence[ToolCall]) -> str:
    """Calls that share one list, or else one marker each."""
    opening, closing = shape.open[0] if shape.open else "", shape.closing
    if isinstance(shape, PythonCalls):
        inside = shape.separator.join(map(_python, calls))
        return opening + (f"[{inside}]" if shape.brackets else inside) + closing
    objects = [_object(shape, call) for call in calls]
    if shape.list == "must" or (shape.list == "may" and len(calls) > 1):
        return opening + _list(shape, objects) + closing
    if shape.several:
        return opening + shape.separator.join(objects) + closing
    section = shape.section
    wrapped = [opening + one + closing for one in objects]
    if section is not None and section.each:
        wrapped = [section.open[0] + one + "".join(section.close[:1]) for one in wrapped]
    return shape.between.join(wrapped)


def _list(shape: JsonCalls, objects: list[str]) -> str:
    if not shape.indent:
        return "[" + shape.separator.join(objects) + "]"
    return "[\n" + ",\n".join(shape.indent + one for one in objects) + "\n]"


def _object(shape: JsonCalls, call: ToolCall) -> str:
    if shape.name_is_key:
        return f"{{{quoted(call.name)}: {call.arguments}}}"
    fields = [(shape.name[0], quoted(call.name)), (shape.arguments[0], call.arguments)]
    if shape.id and call.id:
        fields.insert(0, (shape.id[0], quoted(call.id)))
    if shape.python:
        return "{" + ", ".join(f"{key!r}: {written(python_value, value)}" for key, value in fields) + "}"
    return "{" + ", ".join(f'"{key}": {value}' for key, value in fields) + "}"


def _named(shape: NamedCalls, call: ToolCall, index: int) -> str:
    head = call.name
    if shape.prefixed:
        own = call.id is not None and call.id.rpartition(":")[0] in (call.name, shape.prefixed + call.name)
        head = call.id if own and call.id else f"{shape.prefixed}{call.name}:{index}"
    elif shape.id_first:
        head = f"{call.id or format(index, '010')}{shape.id_first}{call.name}"
    elif shape.id_after and call.id:
        head = f"{call.name}{shape.id_after}{call.id}"
    return shape.open[0] + head + shape.then[0] + call.arguments + shape.closing


def _tagged(shape: TaggedCalls, call: ToolCall, index: int) -> str:
    name = escape(call.name) if shape.entities else call.name
    opening = shape.open[0] + name + shape.rest.format(index=index + 1) + shape.then[0]
    write = _tag if shape.nested else _argument
    tags = written(lambda text: "".join(write(shape, *member) for member in members(text)), call.arguments)
    return opening + tags + shape.close[0]


def _argument(shape: TaggedCalls, key: str, value: str) -> str:
    is_text = value.startswith('"')
    stated = ""
    if shape.types == "string":
        stated = "true" if is_text else "false"
    elif shape.types == "name":
        stated = _type_name(value)
    inside = text_of(value) if is_text else value
    if shape.cdata and is_text and ("<" in inside or inside != inside.strip()):
        inside = f"<![CDATA[{inside}]]>"
    typed = stated + shape.type_end[0] if shape.type_end else ""
    key = escape(key) if shape.entities else key
    return shape.key[0] + key + shape.key_end[0] + typed + shape.value + inside + shape.value_end[0]


def _type_name(value: str) -> str:
    names = {'"': "string", "{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null"}
    return names.get(value[0], "number")


def _tag(shape: TaggedCalls, key: str, value: str) -> str:
    """A value as a tag with tags in it."""
    if value.startswith('"'):
        inside = text_of(value)
    elif value.startswith("{"):
        inside = "".join(_tag(shape, *member) for member in members(value))
    elif value.startswith("["):
        inside = "".join(_tag(shape, "item", item) for _, item in members(value))
    else:
        inside = value
    return f"{shape.nested}<{key}>{inside}{shape.nested}</{key}>"


def _python(call: ToolCall) -> str:
    return PYTHON_CALL.format(name=call.name, arguments=written(_keywords, call.arguments))


def _keywords(arguments: str) -> str:
    return ", ".join(f"{key}={python_value(value)}" for key, value in members(arguments))


def _brace(shape: BraceCalls, call: ToolCall) -> str:
    arguments = written(lambda text: brace_value(text, shape.quote), call.arguments)
    return shape.open[0] + call.name + arguments + shape.close[0]
