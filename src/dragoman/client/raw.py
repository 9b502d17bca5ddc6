"""Parses raw completions into reasoning, text and calls in the model's dialect.

The server sends only text and ids. They are parsed here, as they arrive, by the same parsers that the server
uses for chats, so the tree is the same: calls as soon as they end, and each token on the part that it belongs
to. Missing information, such as the dialect, is requested from the server.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from msgspec import Struct

from dragoman.client.chunks import ChunkReader, divide_text
from dragoman.client.events import (
    ArgumentsDelta,
    CallEnd,
    CallStart,
    FinishEvent,
    MarkerTokens,
    ReasoningDelta,
    StreamEvent,
    TextDelta,
    Token,
)
from dragoman.dialects.declarations import Dialect, starts_in_reasoning
from dragoman.dialects.parser import Parser
from dragoman.dialects.registry import get_dialect, match_name, with_reasoning_of
from dragoman.errors import SettingsError
from dragoman.types import Event, ToolCall

AUTO = "auto"
MOST_IDS = 1024
"""Last ids of a prompt that are checked for an opened reasoning."""
NO_ID = -1
FIELDS = {"return_token_ids": True, "skip_special_tokens": False}
"""Request fields that add ids, and markers that are special tokens, to the reply."""
Question: TypeAlias = tuple[str, str, dict[str, Any] | None]
"""Method, path and body."""


class RawParseOptions(Struct, frozen=True, kw_only=True):
    """How to parse a completion."""

    dialect: str | Dialect
    tools: Sequence[Mapping[str, Any]] = ()
    starts_in_reasoning: bool | None = None
    special_tokens: Mapping[int, str] | None = None


class RawReader:
    """Like `ChunkReader`, but splits the text into parts."""

    def __init__(self, raw: RawParseOptions, asked: Mapping[str, Any]) -> None:
        self._raw = raw
        self._asked = asked
        self._chunks = ChunkReader()
        self._choices: dict[int, RawChoice] = {}
        self._inside = bool(raw.starts_in_reasoning)
        named = get_dialect(raw.dialect) if isinstance(raw.dialect, str) and raw.dialect != AUTO else None
        self._dialect = raw.dialect if isinstance(raw.dialect, Dialect) else named or get_dialect("plain")

    @property
    def is_done(self) -> bool:
        return self._chunks.is_done

    def questions(self) -> Generator[Question, Any, None]:
        """Yield the requests to send first. Their replies are sent in: decoded JSON, or None."""
        if self._raw.dialect == AUTO:
            self._dialect = _find_dialect((yield "GET", "/v1/models", None), self._asked.get("model"))
        if self._raw.starts_in_reasoning is not None or self._dialect.reasoning is None:
            return
        prompt = self._asked["prompt"]
        if not isinstance(prompt, str) and prompt and isinstance(prompt[0], int):
            named = {"model": self._asked["model"]} if "model" in self._asked else {}
            result = yield "POST", "/detokenize", {"tokens": prompt[-MOST_IDS:], **named}
            prompt = result.get("prompt") if isinstance(result, dict) else None
        self._inside = isinstance(prompt, str) and starts_in_reasoning(self._dialect, prompt)

    def read(self, data: bytes) -> Iterator[StreamEvent]:
        for event in self._chunks.read(data):
            if isinstance(event, TextDelta | MarkerTokens):
                yield from self._choice(event.choice).feed(event.text, event.tokens)
            elif isinstance(event, FinishEvent):
                yield from self._choice(event.choice).finish(event)
            else:
                yield event

    def _choice(self, number: int) -> "RawChoice":
        if number not in self._choices:
            raw = self._raw
            parser = Parser(self._dialect, raw.tools, self._inside, special_tokens=raw.special_tokens)
            self._choices[number] = RawChoice(parser, number)
        return self._choices[number]


class RawChoice:
    """The parts of one choice."""

    def __init__(self, parser: Parser, number: int) -> None:
        self._parser = parser
        self._number = number
        self._tokens: list[Token] = []
        """Tokens that are not assigned to a part yet."""
        self._calls: list[tuple[str, str, list[str]]] = []
        """Ids, names, and fragments of arguments."""

    def feed(self, text: str, tokens: Sequence[Token]) -> Iterator[StreamEvent]:
        self._tokens += tokens
        pairs = [(NO_ID if token.id is None else token.id, token.text) for token in tokens]
        for event in self._parser.feed(pairs or text):
            yield from self._tell(event)

    def finish(self, finished: FinishEvent) -> Iterator[StreamEvent]:
        for event in self._parser.finish():
            yield from self._tell(event)
        if self._calls and finished.reason == "stop":
            finished.reason = "tool_calls"
        yield finished

    def _tell(self, event: Event) -> Iterator[StreamEvent]:
        count, kind, choice = len(event.ids), event.kind, self._number
        tokens, self._tokens = self._tokens[:count], self._tokens[count:]
        divide_text(tokens, "" if kind == "call_open" else event.text)
        if kind in ("text", "reasoning"):
            yield (TextDelta if kind == "text" else ReasoningDelta)(event.text, tokens, choice)
        elif kind == "call_open":
            self._calls.append((event.call_id, event.text, []))
            yield CallStart(id=event.call_id, name=event.text, call=event.call, tokens=tokens, choice=choice)
        elif kind == "call_arguments":
            self._calls[event.call][2].append(event.text)
            yield ArgumentsDelta(text=event.text, call=event.call, tokens=tokens, choice=choice)
        elif tokens:
            yield MarkerTokens("", tokens, choice)
        if kind == "call_close":
            id_, name, pieces = self._calls[event.call]
            value = ToolCall(id=id_, name=name, arguments="".join(pieces))
            yield CallEnd(value=value, call=event.call, choice=choice)


def _find_dialect(listed: Any, model: str | None) -> Dialect:
    """Find the dialect in the server's model list (dragoman reports it), else by the model's name."""
    entries = listed.get("data") if isinstance(listed, dict) else None
    known = [entry for entry in entries or () if isinstance(entry, dict)]
    entry = next((one for one in known if model in (None, one.get("id"))), {})
    try:
        # Calls of one dialect with reasoning of another: `hermes+qwen3`.
        calls, _, reasoning = str(entry["dialect"]).partition("+")
        dialect = get_dialect(calls)
        return with_reasoning_of(dialect, get_dialect(reasoning)) if reasoning else dialect
    except (KeyError, SettingsError):
        named = match_name(str(model or "")) or match_name(str(entry.get("root") or entry.get("id") or ""))
        return get_dialect(named[1] if named else "plain")
