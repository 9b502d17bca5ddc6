"""Turns the events of a Responses stream into the common stream events."""

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Struct

from dragoman.client.chunks import spell_tokens, tokens_of
from dragoman.client.errors import ErrorEventReceived
from dragoman.client.events import (
    ArgumentsDelta,
    CallEnd,
    CallStart,
    FinishEvent,
    MarkerTokens,
    OtherEvent,
    ReasoningDelta,
    RefusalDelta,
    StreamEvent,
    TextDelta,
    Token,
    UsageEvent,
)
from dragoman.client.wire import ErrorBody, UsageCounts, WireLogprob, problem_of
from dragoman.types import ToolCall

PIECES: dict[str, type[TextDelta] | type[ReasoningDelta] | type[RefusalDelta]] = {
    "response.output_text": TextDelta,
    "response.reasoning_text": ReasoningDelta,
    "response.reasoning_summary_text": ReasoningDelta,
    "response.refusal": RefusalDelta,
}
ARGUMENTS = frozenset({"response.function_call_arguments", "response.custom_tool_call_input"})
CALL_ITEMS = frozenset({"function_call", "custom_tool_call"})
REASONS = {"max_output_tokens": "length"}


class OutputItem(Struct):
    type: str = ""
    id: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None
    status: str | None = None


class IncompleteDetails(Struct):
    reason: str | None = None


class Response(Struct):
    usage: UsageCounts | None = None
    error: Any = None
    incomplete_details: IncompleteDetails | None = None


class ResponseEvent(Struct):
    type: str = ""
    item_id: str | None = None
    output_index: int | None = None
    delta: str | None = None
    text: str | None = None
    arguments: str | None = None
    input: str | None = None
    refusal: str | None = None
    logprobs: list[WireLogprob] | None = None
    token_ids: list[int] | None = None
    item: OutputItem | None = None
    response: Response | None = None
    error: Any = None
    message: str | None = None

    def tokens(self, text: str) -> list[Token]:
        return tokens_of(self.token_ids, spell_tokens(self.logprobs or ()), text)

    @property
    def whole(self) -> str:
        """The complete text, which a `.done` event repeats."""
        return self.text or self.arguments or self.input or self.refusal or ""


_read = msgspec.json.Decoder(ResponseEvent).decode


class ResponseReader:
    """Reads the events of one response. `is_done` is true after the event that ends it."""

    def __init__(self) -> None:
        self.is_done = False
        self._heard: set[tuple[str, str | int | None]] = set()
        """Parts that had deltas; the text of others comes complete with their end."""
        self._calls: dict[str | int, int] = {}
        """The numbers of calls by every name that servers use: item id, call id, output index."""
        self._said: list[list[str]] = []
        """The arguments of each call so far."""

    def read(self, data: bytes) -> Iterator[StreamEvent]:
        event = _read(data)
        if event.type == "error" or event.error is not None or event.type == "response.failed":
            raise ErrorEventReceived(_problem(event, data))
        items = list(self._tell(event, data))
        if event.token_ids and not any(getattr(one, "tokens", ()) for one in items):
            # Ids without text come with events that end a part.
            yield MarkerTokens("", event.tokens(""))
        yield from items

    def _tell(self, event: ResponseEvent, data: bytes) -> Iterator[StreamEvent]:
        about, _, step = event.type.rpartition(".")
        if about in PIECES and step in ("delta", "done"):
            yield from self._piece(event, about, step)
        elif about in ARGUMENTS and step in ("delta", "done"):
            yield from self._arguments(event, about, step)
        elif event.item is not None and event.item.type in CALL_ITEMS:
            yield from self._call(event, event.item, step)
        elif event.type in ("response.completed", "response.incomplete", "response.cancelled"):
            yield from self._end(event.response or Response(), step)
        else:
            yield OtherEvent(event.type, msgspec.json.decode(data))

    def _text(self, event: ResponseEvent, about: str, step: str) -> str:
        key = (about, event.item_id or event.output_index)
        if step == "done":
            return "" if key in self._heard else event.whole
        self._heard.add(key)
        return event.delta or ""

    def _piece(self, event: ResponseEvent, about: str, step: str) -> Iterator[StreamEvent]:
        if text := self._text(event, about, step):
            yield PIECES[about](text, event.tokens(text))

    def _arguments(self, event: ResponseEvent, about: str, step: str) -> Iterator[StreamEvent]:
        number = self._number(event.item_id, event.output_index)
        if number is not None and (text := self._text(event, about, step)):
            self._said[number].append(text)
            yield ArgumentsDelta(text=text, call=number, tokens=event.tokens(text))

    def _number(self, *names: str | int | None) -> int | None:
        return next((self._calls[name] for name in names if name is not None and name in self._calls), None)

    def _call(self, event: ResponseEvent, item: OutputItem, step: str) -> Iterator[StreamEvent]:
        names = (item.id, item.call_id, event.output_index)
        number = self._number(*names)
        if number is None:
            number = len(self._said)
            self._said.append([])
            self._calls |= {name: number for name in names if name is not None}
            yield CallStart(id=item.call_id or item.id, name=item.name or "", call=number)
        if step != "done":
            return
        whole = item.arguments or item.input or ""
        if whole and not self._said[number]:
            yield ArgumentsDelta(text=whole, call=number)
        if item.status in (None, "completed"):
            arguments = whole or "".join(self._said[number])
            value = ToolCall(id=item.call_id or item.id, name=item.name or "", arguments=arguments)
            yield CallEnd(value=value, call=number)

    def _end(self, response: Response, step: str) -> Iterator[StreamEvent]:
        self.is_done = True
        if response.usage is not None:
            yield UsageEvent(response.usage.usage())
        text = (response.incomplete_details or IncompleteDetails()).reason
        usual = ("tool_calls" if self._calls else "stop") if step == "completed" else step
        yield FinishEvent(reason=REASONS.get(text, text) if text else usual)


def _problem(event: ResponseEvent, data: bytes) -> ErrorBody | None:
    inside = event.error or (event.response and event.response.error)
    return problem_of(inside) or problem_of(msgspec.json.decode(data))
