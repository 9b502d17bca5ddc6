"""The parsers as a library: text or tokens in, events out, and the whole answer as their fold."""

from collections.abc import Mapping, Sequence
from typing import Any

from dragoman.dialects.declare import Dialect
from dragoman.dialects.registry import get
from dragoman.fold import fold
from dragoman.types import Answer, Event


class Parser:
    """Reads one answer as it comes.

    `feed("text")`, or `feed([(id, "text"), ...])` with the ids of the tokens: then a marker that is one of
    `special_tokens` is recognised by its id alone, and its spelling in ordinary text is text.
    """

    def __init__(
        self,
        dialect: str | Dialect,
        tools: Sequence[Mapping[str, Any]] = (),
        starts_in_reasoning: bool = False,
        *,
        calls: bool = True,
        reasoning: bool = True,
        special_tokens: Mapping[int, str] | None = None,
    ) -> None:
        self.dialect = get(dialect) if isinstance(dialect, str) else dialect

    def feed(self, text: str | Sequence[tuple[int, str]]) -> list[Event]:
        raise NotImplementedError

    def finish(self) -> list[Event]:
        raise NotImplementedError


def parse(
    text: str,
    dialect: str | Dialect = "hermes",
    tools: Sequence[Mapping[str, Any]] = (),
    starts_in_reasoning: bool = False,
    *,
    calls: bool = True,
    reasoning: bool = True,
) -> Answer:
    """`parse('<tool_call>{"name": "f", "arguments": {}}</tool_call>').calls[0].name` is "f"."""
    parser = Parser(dialect, tools, starts_in_reasoning, calls=calls, reasoning=reasoning)
    return fold(parser.feed(text) + parser.finish())
