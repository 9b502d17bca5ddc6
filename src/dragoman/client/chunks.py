"""Turns the chunks of a chat or completions stream into events."""

import re
from collections.abc import Iterator, Sequence

from msgspec import Struct, field

from dragoman.client.errors import ErrorEventReceived
from dragoman.client.events import (
    ArgumentsDelta,
    CallEnd,
    CallStart,
    FinishEvent,
    MarkerTokens,
    ReasoningDelta,
    RefusalDelta,
    StreamEvent,
    TextDelta,
    Token,
    UsageEvent,
)
from dragoman.client.wire import (
    CallDelta,
    CallPayload,
    ChunkChoice,
    ChunkDelta,
    Logprobs,
    WireLogprob,
    problem_of,
    read_chunk,
)
from dragoman.types import ToolCall

# The tokens of one chunk, joined from ids, log probabilities and text.


_SPELLED_ID = re.compile(r"token_id:(\d{1,10})")


def tokens_of(ids: Sequence[int] | None, entries: Sequence[Token], text: str) -> list[Token]:
    """Join ids with `entries` from `entries_of`. If their numbers differ, only ids are kept: log
    probabilities at the wrong tokens would be worse than none.
    """
    if not ids:
        tokens = list(entries)
    elif len(entries) == len(ids):
        tokens = [
            Token(id_, entry.text, entry.logprob, entry.top) for id_, entry in zip(ids, entries, strict=True)
        ]
    else:
        tokens = [Token(id_) for id_ in ids]
    divide_text(tokens, text)
    return tokens


def divide_text(tokens: Sequence[Token], text: str) -> None:
    """Ensure that the token texts add up to `text`; if they do not, all of it goes to the last token."""
    if tokens and "".join([token.text for token in tokens]) != text:
        for token in tokens:
            token.text = ""
        tokens[-1].text = text


def entries_of(logprobs: Logprobs | None) -> list[Token]:
    if logprobs is None:
        return []
    if logprobs.content is not None:
        return spell_tokens(logprobs.content)
    values = logprobs.token_logprobs or []
    tops = logprobs.top_logprobs or [None] * len(values)
    return [
        _token(text, logprob, [_token(other, value) for other, value in (top or {}).items()])
        for text, logprob, top in zip(logprobs.tokens or [], values, tops, strict=False)
    ]


def spell_tokens(entries: Sequence[WireLogprob]) -> list[Token]:
    return [
        _token(entry.token, entry.logprob, spell_tokens(entry.top_logprobs or ()), entry.id)
        for entry in entries
    ]


def _token(text: str, logprob: float | None, top: list[Token] | None = None, id: int | None = None) -> Token:
    """Build a token; some servers can format its text as `token_id:N`."""
    spelled = _SPELLED_ID.fullmatch(text)
    return Token(int(spelled[1]) if spelled else id, "" if spelled else text, logprob, top or [])


# Tool calls of a chat stream. The API does not mark the end of a call, so it is found in the arguments.


_MARK = re.compile(r'["\\{}\[\]]')
CUT_SHORT = frozenset({"length", "content_filter", "abort", "error"})
"""Finish reasons of an answer that was interrupted."""


class CallAlreadyComplete(ValueError):
    """A call that was complete, and may have been executed, got more arguments."""


class JsonEndFinder:
    """Finds the end of a JSON object or list that arrives in chunks.

    >>> end = JsonEndFinder()
    >>> end.feed('{"a": "}'), end.feed('"}')
    (False, True)
    """

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = self._escaped = self._over = False

    def feed(self, text: str) -> bool:
        """Whether the value is complete. Raises if more follows its end."""
        at = int(self._escaped and bool(text))
        self._escaped = self._escaped and not text
        while not self._over and (match := _MARK.search(text, at)):
            at, mark = match.end(), match[0]
            if mark == '"':
                self._quoted = not self._quoted
            elif mark == "\\":
                self._escaped, at = at == len(text), at + 1
            elif not self._quoted:
                self._depth += 1 if mark in "{[" else -1
                self._over = self._depth == 0
        if self._over and text[at:].strip():
            raise CallAlreadyComplete("the arguments of a call continue after their end")
        return self._over


class _OpenCall(Struct):
    number: int
    index: int
    id: str | None
    name: str
    custom: bool
    pieces: list[str] = field(default_factory=list)
    end: JsonEndFinder = field(default_factory=JsonEndFinder)
    done: bool = False


class CallAssembler:
    """The calls of one choice."""

    def __init__(self, choice: int) -> None:
        self._choice = choice
        self._calls: list[_OpenCall] = []

    def take(self, delta: CallDelta, tokens: list[Token]) -> Iterator[CallStart | ArgumentsDelta | CallEnd]:
        payload = delta.function or delta.custom or CallPayload()
        call = self._find_call(delta, payload)
        if call is None:
            # A call without arguments, or with plain text, does not show its own end. A call inside an object
            # may continue beside the next one.
            yield from self._close([old for old in self._calls if old.custom or not "".join(old.pieces)])
            call = self._begin(delta, payload)
            yield CallStart(id=call.id, name=call.name, call=call.number, tokens=tokens, choice=self._choice)
            tokens = []
        if payload.said or tokens:
            yield ArgumentsDelta(text=payload.said, call=call.number, tokens=tokens, choice=self._choice)
            call.pieces.append(payload.said)
            if not call.custom and call.end.feed(payload.said):
                yield from self._close([call])

    def finish(self, reason: str) -> Iterator[CallEnd]:
        if reason not in CUT_SHORT:
            yield from self._close(self._calls)

    def _find_call(self, delta: CallDelta, payload: CallPayload) -> _OpenCall | None:
        """Return the call that a delta continues. Some servers give every call the index 0, or none."""
        same = [call for call in self._calls if delta.index is None or call.index == delta.index]
        call = same[-1] if same else None
        is_new = call is not None and payload.name and delta.id is not None and delta.id != call.id
        return None if is_new else call

    def _begin(self, delta: CallDelta, payload: CallPayload) -> _OpenCall:
        number = len(self._calls)
        index = number if delta.index is None else delta.index
        call = _OpenCall(number, index, delta.id, payload.name or "", delta.custom is not None)
        self._calls.append(call)
        return call

    def _close(self, calls: list[_OpenCall]) -> Iterator[CallEnd]:
        for call in calls:
            if not call.done:
                call.done = True
                value = ToolCall(id=call.id, name=call.name, arguments="".join(call.pieces))
                yield CallEnd(value=value, call=call.number, choice=self._choice)


# Complete chunks.


class ChunkReader:
    """Reads chunks. `is_done` is true when all choices have finished, for servers that omit the [DONE]
    mark.
    """

    def __init__(self) -> None:
        self._calls: dict[int, CallAssembler] = {}
        self._unfinished: set[int] = set()

    @property
    def is_done(self) -> bool:
        return bool(self._calls) and not self._unfinished

    def read(self, data: bytes) -> Iterator[StreamEvent]:
        chunk = read_chunk(data)
        if chunk.error is not None:
            raise ErrorEventReceived(problem_of(chunk.error))
        for choice in chunk.choices:
            yield from self._choice(choice)
        if chunk.usage is not None:
            yield UsageEvent(chunk.usage.usage())

    def _choice(self, choice: ChunkChoice) -> Iterator[StreamEvent]:
        number, delta = choice.index, choice.said
        if number not in self._calls:
            self._calls[number] = CallAssembler(number)
            self._unfinished.add(number)
        text = delta.thought or delta.content or delta.refusal or ""
        tokens = tokens_of(choice.token_ids, entries_of(choice.logprobs), text)
        yield from self._pieces(number, delta, tokens)
        if choice.finish_reason is not None:
            self._unfinished.discard(number)
            yield from self._calls[number].finish(choice.finish_reason)
            yield FinishEvent(reason=choice.finish_reason, stop=choice.stop_reason, choice=number)

    def _pieces(self, number: int, delta: ChunkDelta, tokens: list[Token]) -> Iterator[StreamEvent]:
        """Assign the chunk's tokens to its first part; nearly every chunk has only one."""
        for kind, text in (
            (ReasoningDelta, delta.thought),
            (TextDelta, delta.content),
            (RefusalDelta, delta.refusal),
        ):
            if text:
                yield kind(text, tokens, number)
                tokens = []
        calls = delta.tool_calls or (
            [CallDelta(0, function=delta.function_call)] if delta.function_call else []
        )
        for offset, call in enumerate(calls):
            if call.index is None and len(calls) > 1:
                call.index = offset
            yield from self._calls[number].take(call, tokens)
            tokens = []
        if tokens:
            yield MarkerTokens("", tokens, number)
