"""Public parsers: text or tokens in, events out. A full answer is the fold of its events."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from dragoman.dialects.declarations import Dialect, prompt_opened_reasoning
from dragoman.dialects.marker_tables import compile_dialect
from dragoman.dialects.registry import get_dialect, own_dialect
from dragoman.dialects.scan import assign_tokens
from dragoman.dialects.schema import ToolDeclarations
from dragoman.dialects.state_machine import AnswerStateMachine
from dragoman.errors import SettingsError
from dragoman.types import Answer, Event, EventFold

PIECE = 64 * 1024


class AnswerReader(Protocol):
    """Parser that takes text as it arrives. What it holds back must come out of a later `feed`, or of
    `finish`.
    """

    @property
    def waiting(self) -> int:
        """Number of characters held back at the end."""

    def feed(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]: ...


class PlainReader:
    """Parser for models that write only text: everything passes through."""

    waiting = 0

    def feed(self, text: str) -> list[Event]:
        return [Event("text", 0, text)]

    def finish(self) -> list[Event]:
        return []


class Parser:
    """Parser of one answer, fed as the answer arrives.

    `feed` takes text, or pairs of token id and text. With ids, a marker in `special_tokens` is recognised by
    id alone, its spelling in ordinary text is text, and each id is on an event of the part that it belongs
    to. `dialect` is a name, a Dialect, or a model's own `response_template`; only the last needs the
    `prompt`.
    """

    def __init__(
        self,
        dialect: str | Dialect | Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
        starts_in_reasoning: bool = False,
        *,
        calls: bool = True,
        reasoning: bool = True,
        json_answer: bool = False,
        special_tokens: Mapping[int, str] | None = None,
        prompt: str = "",
    ) -> None:
        self.dialect = _find_declaration(dialect)
        self._special = dict(special_tokens or {})
        self._sentinels: Mapping[str, str] = {}
        self._ids: list[int] = []
        self._sizes: list[int] = []
        self._reader: AnswerReader
        if self.dialect.response_template is not None:
            self._reader = self.dialect.response_template.reader(prompt, tools)
            self._sentinels = {token: token for token in self._special.values()}
            return
        compiled = compile_dialect(
            self.dialect,
            frozenset(self._special.values()),
            calls=calls,
            reasoning=reasoning,
            json_answer=json_answer,
        )
        self._sentinels = compiled.sentinels
        self._reader = AnswerStateMachine(
            compiled, ToolDeclarations(tools), starts_in_reasoning=starts_in_reasoning and reasoning
        )

    def feed(self, text: str | Sequence[tuple[int, str]]) -> list[Event]:
        if isinstance(text, str):
            return self._reader.feed(text) if text else []
        events: list[Event] = []
        for id_, piece in text:
            value = self._token(id_, piece)
            self._ids.append(id_)
            self._sizes.append(len(value))
            if value:
                events += self._share(self._reader.feed(value))
        return events

    def _share(self, events: list[Event]) -> list[Event]:
        """Return the events with the pending ids assigned to them."""
        if not events or not self._ids:
            return events
        unseen, *shares = assign_tokens(events, self._sizes, self._reader.waiting)
        before = [Event("unseen", 0, "", self._take(unseen))] if unseen else []
        for event, share in zip(events, shares, strict=True):
            event.ids = self._take(share)
        return before + events

    def _take(self, count: int) -> list[int]:
        taken, self._ids, self._sizes = self._ids[:count], self._ids[count:], self._sizes[count:]
        return taken

    def _token(self, id_: int, piece: str) -> str:
        """Return a special token as its private character if it is a marker, otherwise as nothing."""
        special = self._special.get(id_)
        return piece if special is None else self._sentinels.get(special, "")

    def finish(self) -> list[Event]:
        events = self._share(self._reader.finish())
        return [*events, Event("unseen", 0, "", self._take(len(self._ids)))] if self._ids else events


def _find_declaration(dialect: str | Dialect | Mapping[str, Any]) -> Dialect:
    if isinstance(dialect, Dialect):
        return dialect
    return get_dialect(dialect) if isinstance(dialect, str) else own_dialect(dialect)


def parse(
    text: str,
    dialect: str | Dialect | Mapping[str, Any] = "hermes",
    tools: Sequence[Mapping[str, Any]] = (),
    starts_in_reasoning: bool = False,
    *,
    calls: bool = True,
    reasoning: bool = True,
    json_answer: bool = False,
) -> Answer:
    """Parse a full answer: `parse('<tool_call>{"name": "f", "arguments": {}}</tool_call>').calls[0].name` is
    "f".
    """
    parser = Parser(
        dialect, tools, starts_in_reasoning, calls=calls, reasoning=reasoning, json_answer=json_answer
    )
    folded = EventFold()
    # In chunks, so that the number of events and the length of a search stay bounded.
    for at in range(0, len(text), PIECE):
        folded.add(parser.feed(text[at : at + PIECE]))
    folded.add(parser.finish())
    return folded.done()[0]


# Parsers of whole texts by parser name, with the return values that engine authors know from smg.


def parse_tool_call_complete(text: str, parser_name: str) -> dict[str, Any]:
    """Return `{"normal_text": "...", "tool_calls": [{"name": "f", "arguments": "{...}"}]}`.

    Reasoning stays in the text. Raises ValueError for an unknown name.
    """
    answer = parse(text, _get_named(parser_name, "tool"), reasoning=False)
    calls = [{"name": call.name, "arguments": call.arguments} for call in answer.calls]
    return {"normal_text": answer.text, "tool_calls": calls}


def parse_reasoning_complete(text: str, parser_name: str) -> dict[str, Any]:
    """Return `{"normal_text": "...", "reasoning_text": "..."}`.

    Calls stay in the text. Raises ValueError for an unknown name.
    """
    dialect = _get_named(parser_name, "reasoning")
    answer = parse(text, dialect, (), prompt_opened_reasoning(dialect, text), calls=False)
    return {"normal_text": answer.text, "reasoning_text": answer.reasoning}


def _get_named(name: str, kind: str) -> Dialect:
    try:
        return get_dialect(name)
    except SettingsError as error:
        raise ValueError(f"unknown {kind} parser {name!r}. {error.message}") from None
