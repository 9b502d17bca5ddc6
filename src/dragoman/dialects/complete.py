"""Whole texts read by the name of a parser, in the shapes that engine authors know from smg."""

from typing import Any

from dragoman.dialects.declare import Dialect
from dragoman.dialects.parser import parse
from dragoman.dialects.registry import get_dialect
from dragoman.errors import SettingsError


def parse_tool_call_complete(text: str, parser_name: str) -> dict[str, Any]:
    """`{"normal_text": "...", "tool_calls": [{"name": "f", "arguments": "{...}"}]}`.

    Reasoning is left in the text. A name that stands for no dialect is a ValueError.
    """
    answer = parse(text, _named(parser_name, "tool"), reasoning=False)
    calls = [{"name": call.name, "arguments": call.arguments} for call in answer.calls]
    return {"normal_text": answer.text, "tool_calls": calls}


def parse_reasoning_complete(text: str, parser_name: str) -> dict[str, Any]:
    """`{"normal_text": "...", "reasoning_text": "..."}`.

    Calls are left in the text. A name that stands for no dialect is a ValueError.
    """
    dialect = _named(parser_name, "reasoning")
    answer = parse(text, dialect, (), begins_inside(dialect, text), calls=False)
    return {"normal_text": answer.text, "reasoning_text": answer.reasoning}


def begins_inside(dialect: Dialect, text: str) -> bool:
    """Whether the text closes reasoning before it opens any: then the prompt had opened it.

    `Hm.</think>Yes.` begins inside, `<think>Hm.</think>Yes.` does not.
    """
    if dialect.reasoning is None:
        return False
    closed = _first(text, dialect.reasoning.close)
    return closed is not None and _first(text[:closed], dialect.reasoning.open) is None


def _first(text: str, spellings: tuple[str, ...]) -> int | None:
    places = [text.find(spelling.strip()) for spelling in spellings]
    return min((place for place in places if place >= 0), default=None)


def _named(name: str, kind: str) -> Dialect:
    try:
        return get_dialect(name)
    except SettingsError as error:
        raise ValueError(f"unknown {kind} parser {name!r}. {error.message}") from None
