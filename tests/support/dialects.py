"""What tests of dialects are made of: pieces of every syntax, whole, broken and mixed with noise."""

import json
import random
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from msgspec import Struct

from dragoman.dialects.declarations import Dialect
from dragoman.dialects.parser import Parser
from dragoman.dialects.registry import list_dialects
from dragoman.dialects.render import render
from dragoman.types import Answer, ToolCall, fold

NAMES = list(list_dialects())
NOISE = [
    *(
        "hello ",
        "\n",
        "\n\n",
        " ",
        "\t",
        "{",
        "}",
        "[",
        "]",
        '"',
        "'",
        "\\",
        "<",
        ">",
        "</",
        "|",
        "=",
        ":",
        ",",
    ),
    *(
        ";",
        "(",
        ")",
        '"name"',
        '"name": "f"',
        '"arguments": {"a": 1}',
        "true",
        "-1.5e3",
        "é",
        "🚀",
        "<|",
        "```",
    ),
    *("<think>", "</think>", "f", "f(a=1)", "to=", "functions.f:0", "null", "<![CDATA[", "]]>", "\x00", "Ġ"),
]
ARGUMENTS = (
    "{}",
    '{"a": 1}',
    '{"s": "Par</x>is \\" {"}',
    '{"o": {"k": [1, {"z": null}]}, "s": "é\\n"}',
    '{ "a" : -0.5e-3 ,"b":[ ] }',
)
NOT_MARKERS = {"name", "models", "aliases", "stems", "template_marks"}


def tool(name: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": properties}},
    }


TOOLS = [
    tool("f", a={"type": "integer"}, s={"type": "string"}, o={"type": "object"}),
    tool("get_weather", city={"type": "string"}),
]


def read(dialect: Dialect, pieces: Iterable[str], **how: Any) -> Answer:
    parser = Parser(dialect, how.pop("tools", TOOLS), **how)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return fold(events + parser.finish())


def told(answer: Answer) -> tuple[str, str, list[tuple[str, str]]]:
    """What an answer says, without the ids that are made up."""
    return answer.text, answer.reasoning, [(call.name, call.arguments) for call in answer.calls]


def valued(answer: Answer) -> tuple[str, str, list[tuple[str, Any]]]:
    """The same, with arguments by value and not by spelling."""
    return (
        answer.text,
        answer.reasoning,
        [(call.name, json.loads(call.arguments, strict=False)) for call in answer.calls],
    )


def call(name: str, arguments: str, id_: str | None = None) -> ToolCall:
    return ToolCall(id=id_, name=name, arguments=arguments)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, tuple | frozenset):
        for item in value:
            yield from _strings(item)
    elif isinstance(value, Struct):
        for field in value.__struct_fields__:
            inner = getattr(value, field)
            if field not in NOT_MARKERS or (isinstance(inner, tuple) and field == "name"):
                yield from _strings(inner)


@cache
def markers(dialect: Dialect) -> list[str]:
    """Everything its declaration spells out."""
    return sorted({text for text in _strings(dialect) if text.strip()})


@cache
def pieces(dialect: Dialect) -> list[str]:
    """Whole markers, their halves, calls, calls that are cut off, and noise."""
    texts = [*NOISE, *markers(dialect), *(mark.strip() for mark in markers(dialect))]
    texts += [mark[: len(mark) // 2] for mark in markers(dialect)]
    for arguments in ARGUMENTS:
        written = render(dialect, Answer(calls=[call("f", arguments), call("get_weather", '{"city": "X"}')]))
        texts += [written, written[: len(written) * 2 // 3], written[len(written) // 3 :]]
    return [piece for piece in texts if piece]


def soup(dialect: Dialect, chance: random.Random, most: int = 14) -> str:
    return "".join(chance.choice(pieces(dialect)) for _ in range(chance.randint(1, most)))


def cut(text: str, chance: random.Random) -> list[str]:
    """Into single characters, or somewhere."""
    if chance.random() < 0.3:
        return list(text)
    indices = sorted(chance.randint(0, len(text)) for _ in range(chance.randint(1, 8)))
    return [text[a:b] for a, b in zip([0, *indices], [*indices, len(text)], strict=True) if a < b]
