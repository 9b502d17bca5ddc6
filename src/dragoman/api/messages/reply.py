"""Messages: writes answers as content blocks and stream events, and errors in this API's format.

One writer does both: the full message is the fold of the stream's events.
"""

from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeAlias

import msgspec
from msgspec import Struct

from dragoman.api.messages.blocks import Seal, sign
from dragoman.api.reply import FIELDS, ReplyEnvelope, encode, format_error, to_dragoman_error
from dragoman.errors import CONVERSATION, OUTPUT, PROMPT, STOP, ContextOverflow, DragomanError, ServerFull
from dragoman.mcp import CallResult
from dragoman.media import Media
from dragoman.media.headers import MEDIA_TYPES, mention
from dragoman.turns.tool_loop import CallOutcome
from dragoman.types import Event, ToolCall, Usage

# Errors.


TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}
"""Error types by status; other statuses are `invalid_request_error` below 500 and `api_error` from 500 on."""
OVERLOADED = 529


class MessagesErrorSerializer(Struct, frozen=True):
    field_names: Mapping[str, str] = {}

    def status(self, error: DragomanError) -> int:
        """Return the status: 529 for a server at capacity, 429 for a key over its own limit."""
        return OVERLOADED if isinstance(error, ServerFull) else error.status

    def body(self, error: DragomanError) -> dict[str, Any]:
        """Build the error body, with `param` and `code` as in OpenAI's API, which Anthropic's lacks."""
        message, param = format_error(error, self.field_names)
        if isinstance(error, ContextOverflow):
            # Claude Code compacts a conversation when it reads this message.
            counted = (
                f"{str(error.tokens).split()[-1]} tokens > {error.most} maximum" if error.tokens else message
            )
            message = f"prompt is too long: {counted}"
        status = self.status(error)
        kind = TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        fields = {"type": kind, "message": message, "param": param, "code": error.code}
        details = {"details": {"error_code": error.code}} if error.code else {}
        return {"type": "error", "error": {**fields, **details}}

    def event(self, error: Exception) -> bytes:
        return _event("error", self.body(to_dragoman_error(error)))


ERRORS = MessagesErrorSerializer(
    {
        **FIELDS,
        CONVERSATION: "messages",
        PROMPT: "messages",
        OUTPUT: "output_config.format",
        STOP: "stop_sequences",
    }
)


HEADER = b"anthropic-version"
"""A header that all of Anthropic's clients send."""


def spell_head(head: Mapping[bytes, bytes], now: float) -> dict[bytes, bytes]:
    """Return reply headers under the names that Anthropic's clients read."""
    mapping = {b"request-id": head[b"x-request-id"]}
    for of in (b"requests", b"tokens"):
        for name in (b"limit", b"remaining"):
            if (value := head.get(b"x-ratelimit-%b-%b" % (name, of))) is not None:
                mapping[b"anthropic-ratelimit-%b-%b" % (of, name)] = value
        if (wait := head.get(b"x-ratelimit-reset-%b" % of)) is not None:
            when = _spell_time(now + int(wait.rstrip(b"s")))
            mapping[b"anthropic-ratelimit-%b-reset" % of] = when.encode()
    return mapping


def describe_model(name: str, created: float, context: int | None) -> dict[str, Any]:
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": _spell_time(created),
        "lifecycle": "active",
        "max_input_tokens": context,
        "max_tokens": context,
    }


def list_page(items: Sequence[Mapping[str, Any]], *, more: bool = False) -> dict[str, Any]:
    ends = (
        {"first_id": items[0]["id"], "last_id": items[-1]["id"]}
        if items
        else {"first_id": None, "last_id": None}
    )
    return {"data": items, "has_more": more, **ends}


def _spell_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


# The answer.


PING = b'event: ping\ndata: {"type":"ping"}\n\n'
STOP_EVENT = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
DELTAS: Mapping[str, tuple[str, str]] = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call_arguments": ("input_json_delta", "partial_json"),
}
Fields: TypeAlias = dict[str, Any]
_decode = msgspec.json.Decoder().decode


def _event(kind: str, payload: Fields) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode(payload))


class MessageOptions(Struct, frozen=True, kw_only=True):
    """How to write an answer for a request."""

    seal: Seal
    shows_thinking: bool = True
    stops: Sequence[str] = ()
    """The client's stop sequences; any other stop is reported as the model's own end."""
    whole_length: bool = True
    """Whether the answer may have the requested length; if not, the context limit ends it."""
    silent: bool = False
    """Whether to write nothing of the answer."""
    edits: Sequence[Fields] | None = None
    """The context edits applied, or None if the request asked for none."""
    summary: str | None = None
    """The summary that replaces the conversation."""
    summed: Usage | None = None
    """Usage of generating the summary."""
    pauses: bool = False
    """Whether to return only the summary."""
    server_tools: Mapping[str, tuple[str, str]] = {}
    """Tools that the server runs: each with its MCP server's label and its name there."""


class MessageWriter:
    """Writes events as content blocks and their stream events.

    A fragment that continues the open block encodes no JSON but its text.
    """

    idle = PING

    def __init__(
        self, head: ReplyEnvelope, options: MessageOptions, used: Callable[[], Usage], *, keeps: bool = False
    ) -> None:
        """Create a writer; `keeps` collects the blocks for a full message."""
        self._head = head
        self._told = options
        self._used = used
        self._keeps = keeps
        self.content: list[Fields] = []
        """The finished blocks, if the full message is wanted."""
        self.amount = 0
        """Number of characters in `content`."""
        self._index = -1
        self._kind = ""
        self._block: Fields = {}
        self._texts: list[str] | None = None
        """Texts of the open block, if its end needs them."""
        self._before = b""
        """Bytes before each fragment of the open block; empty if the block is hidden."""
        self._blank: list[Event] = []
        self._called = False
        self._waits = False
        """Whether tool results were written last, which the model has not seen yet."""
        self._finish = Event("finish", 0)

        if options.summary is not None:
            self._index = 0
            self.content.append({"type": "compaction", "content": options.summary})

    def opening(self) -> bytes:
        message = self._message([], None, None)
        opened = _event("message_start", {"type": "message_start", "message": message})
        if self._told.summary is None:
            return opened
        delta = {"type": "compaction_delta", "content": self._told.summary}
        return opened + b"".join(
            [
                self._block_event("start", content_block={"type": "compaction", "content": None}),
                self._block_event("delta", delta=delta),
                self._block_event("stop"),
            ]
        )

    def _block_event(self, what: str, **fields: Any) -> bytes:
        kind = f"content_block_{what}"
        return _event(kind, {"type": kind, "index": self._index, **fields})

    def write(self, events: Sequence[Event]) -> bytes:
        if len(events) == 1:
            return self._one(events[0])
        return b"".join([self._one(event) for event in events])

    def _one(self, event: Event) -> bytes:
        kind = event.kind
        if kind == self._kind:
            if self._texts is not None:
                self._texts.append(event.text)
                if not self._before:
                    return b""
            return b"%b%b}}\n\n" % (self._before, encode(event.text))
        if kind == "finish":
            return self._end(event)
        if self._told.silent:
            return b""
        if kind == "text":
            return self._begin_text(event)
        if kind == "reasoning":
            opened = self._close() + self._open(kind, {"type": "thinking", "thinking": "", "signature": ""})
            return opened + self._one(event)
        if kind == "call_open":
            return self._close() + self._open("call_arguments", self._begin_call(event))
        return self._close() if kind == "call_close" else b""

    def _begin_call(self, event: Event) -> Fields:
        if event.text in self._told.server_tools:
            label, name = self._told.server_tools[event.text]
            return {
                "type": "mcp_tool_use",
                "id": event.call_id,
                "name": name,
                "server_name": label,
                "input": {},
            }
        self._called = True
        return {"type": "tool_use", "id": event.call_id, "name": event.text, "input": {}}

    def write_results(self, calls: Sequence[ToolCall], outcomes: Sequence[CallOutcome]) -> bytes:
        """Write the results of calls that the server made."""
        written = [self._close()]
        for call, outcome in zip(calls, outcomes, strict=True):
            failed = not isinstance(outcome, CallResult) or outcome.is_error
            text = outcome.text if isinstance(outcome, CallResult) else outcome.message
            parts = outcome.parts if isinstance(outcome, CallResult) else ()
            block = {
                "type": "mcp_tool_result",
                "tool_use_id": call.id,
                "is_error": failed,
                "content": [_spell_part(part) for part in parts or (text,)],
            }
            self._index += 1
            written += self._block_event("start", content_block=block), self._block_event("stop")
            if self._keeps:
                self.content.append(block)
                self.amount += len(text) + sum(
                    2 * len(part.data) for part in parts if isinstance(part, Media)
                )
        self._waits = True
        return b"".join(written)

    def _begin_text(self, event: Event) -> bytes:
        closed = self._close()
        if not event.text.strip():
            # Whitespace between blocks is dropped, unless text follows or the answer has nothing else.
            self._blank.append(event)
            return closed
        before, self._blank = self._blank, []
        opened = closed + self._open("text", {"type": "text", "text": ""})
        return opened + self.write((*before, event))

    def _open(self, kind: str, block: Fields) -> bytes:
        self._index += 1
        self._waits = False
        self._kind, self._block = kind, block
        hidden = kind == "reasoning" and not self._told.shows_thinking
        self._texts = [] if self._keeps or kind == "reasoning" else None
        delta, field = DELTAS[kind]
        start = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,' % self._index
        self._before = (
            b""
            if hidden
            else start
            + b'"delta":{"type":"%b","%b":'
            % (
                delta.encode(),
                field.encode(),
            )
        )
        return self._block_event("start", content_block=block)

    def _close(self) -> bytes:
        if not self._kind:
            return b""
        kind, text = self._kind, "".join(self._texts or ())
        written = b""
        if kind == "reasoning":
            signature = sign(text, self._told.seal, shown=bool(self._before))
            self._block |= {"thinking": text if self._before else "", "signature": signature}
            written = self._block_event("delta", delta={"type": "signature_delta", "signature": signature})
        elif self._keeps:
            self._block |= {"text": text} if kind == "text" else {"input": read_input(text)}
        if self._keeps:
            self.content.append(self._block)
            self.amount += len(text)
        self._kind, self._texts = "", None
        return written + self._block_event("stop")

    def _end(self, event: Event) -> bytes:
        """End the last block. Its closing events wait for `end`: the answer can still fail."""
        self._finish = event
        if event.error is not None:
            return ERRORS.event(event.error)
        written = self._close()
        if self._index < 0 and not self._told.silent:
            # An empty answer gets an empty text block: clients read the first block without checking that
            # there is one.
            before, self._blank = self._blank, []
            written += self._open("text", {"type": "text", "text": ""}) + self.write(before) + self._close()
        return written

    def end(self) -> bytes:
        reason, sequence = self._stop()
        ending: Fields = {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": sequence},
            "usage": self.usage(),
            **self._edits(),
        }
        return _event("message_delta", ending) + STOP_EVENT

    def whole(self) -> Fields:
        """Return the full message, after all events were written."""
        return self._message(self.content, *self._stop())

    def _message(self, content: list[Fields], reason: str | None, sequence: str | None) -> Fields:
        return {
            "id": self._head.id,
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": self.usage(),
            **(self._edits() if reason else {}),
        }

    def _edits(self) -> Fields:
        edits = self._told.edits
        return {} if edits is None else {"context_management": {"applied_edits": edits}}

    def _stop(self) -> tuple[str, str | None]:
        """Return the stop reason and the stop sequence."""
        finish, stop = self._finish.finish, self._finish.stop
        if self._told.pauses:
            return "compaction", None
        if finish == "length" or self._told.silent:
            return ("max_tokens" if self._told.whole_length else "model_context_window_exceeded"), None
        if isinstance(stop, str) and stop in self._told.stops:
            return "stop_sequence", stop
        return ("tool_use" if self._called else "pause_turn" if self._waits else "end_turn"), None

    def usage(self) -> Fields:
        used = self._used()
        number = 0 if self._told.silent else used.completion_tokens
        now = {**_usage(used), "output_tokens": number}
        iterations = {}
        if (summed := self._told.summed) is not None:
            rows = [] if self._told.pauses else [{"type": "message", **now}]
            iterations = {"iterations": [{"type": "compaction", **_usage(summed)}, *rows]}
        thought = {"thinking_tokens": min(used.reasoning_tokens, number)}
        return {**now, "output_tokens_details": thought, "service_tier": "standard", **iterations}


def _spell_part(part: str | Media) -> Fields:
    """Format a part of a tool result; audio becomes a text, because this API has no block for it."""
    if isinstance(part, Media) and part.kind == "image":
        data = b64encode(part.data).decode()
        source = {"type": "base64", "media_type": MEDIA_TYPES[part.format], "data": data}
        return {"type": "image", "source": source}
    return {"type": "text", "text": part if isinstance(part, str) else mention(part)}


def _usage(used: Usage) -> Fields:
    return {
        "input_tokens": used.prompt_tokens - used.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": used.cached_tokens,
        "output_tokens": used.completion_tokens,
        **({"restored_reasoning_tokens": used.restored_tokens} if used.restored_tokens else {}),
    }


def read_input(arguments: str) -> Fields:
    """Return the arguments of a call as an object, even if the model wrote none or an incomplete one."""
    try:
        value = _decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        value = arguments
    return value if isinstance(value, dict) else {"arguments": value}
