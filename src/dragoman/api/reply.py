"""Building blocks of replies for all APIs: events, JSON, errors, log probabilities.

Also the common part of Chat Completions and Completions: the envelope of a reply, and `StreamWriter`, which
writes the events of a turn as chunks.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from os import urandom
from typing import Any, Protocol

import msgspec
from msgspec import Raw, Struct

from dragoman.errors import DragomanError, EngineFailed, ParamKey
from dragoman.store import Record, StoredItem
from dragoman.turns.choice_reader import TokenTable
from dragoman.types import Answer, Event, TokenLogprob, Usage

# Server-sent events. Payloads are JSON, which has no line breaks, so no text can forge the end of an event.


DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

encode = msgspec.json.Encoder().encode


def event(payload: Any) -> bytes:
    return b"data: " + encode(payload) + b"\n\n"


def split_at_placeholder(payload: dict[str, Any], hole: str) -> tuple[bytes, ...]:
    """Encode an event and split it at the placeholder `hole`: only the text between changes from token to
    token.

    >>> around({"a": 1, "b": "HOLE"}, "HOLE")
    (b'data: {"a":1,"b":', b'}\\n\\n')
    """
    return tuple(event(payload).split(encode(hole)))


# Large replies as JSON. Encoded in one call, they would block all other threads of the process meanwhile.


PIECE = 64 * 1024
"""Characters of a text, or entries of a list of plain values, encoded in one call."""
BIG = 1024 * 1024
AT_ONCE = 4096
"""Chunks joined in one call."""
_encode = msgspec.json.Encoder().encode
_PLAIN = (str, int, float, bool, type(None))


def writer(size: int) -> Callable[[Any], bytes]:
    """Return the encoder for values of about `size` bytes: encoding in chunks is slower, so it is for large
    ones."""
    return encode_json if size > BIG else _encode


def encode_json(value: Any) -> bytes:
    """Return what `msgspec.json.encode` returns: `encode_json({"a": [1]})` is `b'{"a":[1]}'`."""
    return b"".join(_join_pieces(_pieces(value)))


def _join_pieces(pieces: Iterator[bytes]) -> Iterator[bytes]:
    # Joining and freeing a million small chunks at once would be a long call too.
    while some := list(islice(pieces, AT_ONCE)):
        yield b"".join(some)


def _pieces(value: Any) -> Iterator[bytes]:
    if isinstance(value, dict):
        yield from _object(value)
    elif isinstance(value, list | tuple) and value:
        yield from _list(value)
    elif isinstance(value, str) and len(value) > PIECE:
        yield b'"'
        yield from (_encode(value[at : at + PIECE])[1:-1] for at in range(0, len(value), PIECE))
        yield b'"'
    else:
        yield _encode(value)


def _object(value: dict[Any, Any]) -> Iterator[bytes]:
    yield b"{"
    for number, (name, each) in enumerate(value.items()):
        yield b"%b%b:" % (b"," if number else b"", _encode(name))
        yield from _pieces(each)
    yield b"}"


def _list(value: list[Any] | tuple[Any, ...]) -> Iterator[bytes]:
    # Lists that begin with a plain value mostly have only such values, all of them short.
    plain = isinstance(value[0], _PLAIN) and not (isinstance(value[0], str) and len(value[0]) > PIECE)
    step = PIECE if plain else 1
    for at in range(0, len(value), step):
        yield b"," if at else b"["
        if plain:
            yield _encode(value[at : at + step])[1:-1]
        else:
            yield from _pieces(value[at])
    yield b"]"


def page(stored: Sequence[StoredItem | Record], has_more: bool) -> list[bytes]:
    """Build a page of stored objects. They are JSON already, so they are neither parsed nor copied."""
    ends: dict[str, Any] = {"first_id": None, "last_id": None, "has_more": has_more}
    if stored:
        ends |= {"first_id": stored[0].id, "last_id": stored[-1].id}
    parts = [part for one in stored for part in (b",", one.body)][1:]
    return [b'{"object":"list","data":[', *parts, b"]," + _encode(ends)[1:]]


# Errors, with the field names and the body format of an API.


FIELDS: Mapping[str, str] = {"reuse_prefix": "cache_prompt"}
"""Our fields that all generating requests have under another name."""


class ErrorSerializer(Protocol):
    def status(self, error: DragomanError) -> int: ...

    def body(self, error: DragomanError) -> Any:
        """Build the JSON body of an error reply."""

    def event(self, error: Exception) -> bytes:
        """Write the last event of a stream that fails after its headers were sent."""


class OpenAIErrorSerializer(Struct, frozen=True):
    """Errors in OpenAI's format; `field_names` maps parts of a request to field names of the API."""

    field_names: Mapping[str, str] = {}

    def status(self, error: DragomanError) -> int:
        return error.status

    def body(self, error: DragomanError) -> dict[str, dict[str, str | None]]:
        """Build the body, which always has all four keys."""
        message, param = format_error(error, self.field_names)
        return {"error": {"message": message, "type": error.type, "param": param, "code": error.code}}

    def event(self, error: Exception) -> bytes:
        return event(self.body(to_dragoman_error(error)))


def format_error(error: DragomanError, field_names: Mapping[str, str]) -> tuple[str, str | None]:
    """Return the message and the field of an error, with the API's field names.

    >>> spell_error(BadRequest("'prompt' is empty.", param=Part("prompt")), {"prompt": "input"})
    ("'input' is empty.", 'input')
    """
    part = error.param
    if not isinstance(part, ParamKey):
        return error.message, part
    word = str(field_names.get(part, part))
    return error.message.replace(f"'{part}'", f"'{word}'"), word


def to_dragoman_error(error: Exception) -> DragomanError:
    """Return our own errors unchanged; texts of other exceptions belong in the log."""
    return error if isinstance(error, DragomanError) else EngineFailed("The server failed; see its log.")


# Log probabilities in the formats of the two APIs.


LEAST = -9999.0
"""Replaces minus infinity, which JSON does not have; OpenAI uses the same number."""


class LogprobSerializer:
    """Formats tokens as the client requested: as text, or as `token_id:N`."""

    def __init__(self, pieces: TokenTable, *, as_ids: bool = False, skip_special: bool = True) -> None:
        self._pieces = pieces
        self._as_ids = as_ids
        self._unseen = pieces.special if skip_special else frozenset()
        self._around: dict[int, tuple[str, str]] = {}
        """The JSON before and after the number of an entry, by token id."""

    def token(self, id_: int) -> str:
        if self._as_ids:
            return f"token_id:{id_}"
        return self._text(id_)

    def _text(self, id_: int) -> str:
        return self._pieces.bytes[id_].decode("utf-8", "replace")

    def chat(self, entries: Iterable[TokenLogprob]) -> list[Raw]:
        """Encode the entries at once: a long answer has a million, and as objects they would block the event
        loop.

        `{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}`
        """
        return [Raw(self._written(entry).encode()) for entry in entries]

    def _written(self, entry: TokenLogprob) -> str:
        top = ",".join([self._entry(id_, logprob) + "}" for id_, logprob in entry.top])
        return f'{self._entry(entry.id, entry.logprob)},"top_logprobs":[{top}]}}'

    def _entry(self, id_: int, logprob: float) -> str:
        """Return an entry without its closing brace."""
        around = self._around.get(id_)
        if around is None:
            token, numbers = encode(self.token(id_)).decode(), encode(list(self._pieces.bytes[id_])).decode()
            around = self._around[id_] = f'{{"token":{token},"logprob":', f',"bytes":{numbers}'
        return f"{around[0]}{float(finite(logprob))!r}{around[1]}"

    def completions(
        self, entries: Sequence[TokenLogprob | None], ids: Sequence[int], offset: int
    ) -> dict[str, Any]:
        """Build Completions' format; `entries` may begin with None, because nothing precedes a prompt's first
        id."""
        offsets = []
        for id_ in ids:
            offsets.append(offset)
            offset += 0 if id_ in self._unseen else len(self._text(id_))
        return {
            "tokens": [self.token(id_) for id_ in ids],
            "token_logprobs": [None if entry is None else finite(entry.logprob) for entry in entries],
            "top_logprobs": [None if entry is None else self._top(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprob) -> Raw:
        top = {self.token(id_): finite(logprob) for id_, logprob in entry.top}
        return Raw(encode({**top, self.token(entry.id): finite(entry.logprob)}))

    def prompt(self, entries: Sequence[TokenLogprob | None] | None) -> list[Raw | None] | None:
        """Build vLLM's format: for each prompt id, the alternatives at its position, by id."""
        if entries is None:
            return None
        return [None if entry is None else self._ranked(entry) for entry in entries]

    def _ranked(self, entry: TokenLogprob) -> Raw:
        ranked = {id_: (logprob, rank) for rank, (id_, logprob) in enumerate(entry.top, 1)}
        ranked.setdefault(entry.id, (entry.logprob, 0))
        fields = {
            str(id_): {"logprob": finite(logprob), "rank": rank or None, "decoded_token": self.token(id_)}
            for id_, (logprob, rank) in ranked.items()
        }
        return Raw(encode(fields))


def finite(logprob: float) -> float:
    # NaN compares false with everything, so this also keeps it out of the JSON.
    return logprob if logprob > LEAST else LEAST


# The common envelope of Chat Completions and Completions, encoded once per stream.
#
# Only the escaped delta and requested extra fields go between the parts of an envelope.


def weight_field(version: str | None) -> dict[str, str]:
    """Return the field with the version of the weights, if the engine reports one."""
    return {} if version is None else {"weight_version": version}


def prompt_details(counted: Usage) -> dict[str, int]:
    """Return the prompt tokens from the cache, and those of restored reasoning, if any."""
    restored = {"restored_reasoning_tokens": counted.restored_tokens} if counted.restored_tokens else {}
    return {"cached_tokens": counted.cached_tokens, **restored}


def usage(counted: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": counted.prompt_tokens,
        "completion_tokens": counted.completion_tokens,
        "total_tokens": counted.prompt_tokens + counted.completion_tokens,
        "prompt_tokens_details": prompt_details(counted),
        "completion_tokens_details": {"reasoning_tokens": counted.reasoning_tokens},
    }


ID_BYTES, LOGPROB_BYTES = 8, 64
"""Approximate size in JSON of a token id and of a log probability."""
PLACEHOLDER = "\x00"
FRAGMENTS = frozenset({"text", "reasoning", "call_arguments"})
"""Events that are only a fragment of text: almost all of a stream."""


class ReplyEnvelope(Struct, frozen=True):
    """The fields that stay the same in all chunks of a reply."""

    id: str
    created: int
    model: str
    fingerprint: str


def new_head(prefix: str, model: str, fingerprint: str) -> ReplyEnvelope:
    return ReplyEnvelope(prefix + urandom(16).hex(), int(time.time()), model, fingerprint)


class ChunkOptions(Struct, frozen=True):
    usage: bool = False
    running_usage: bool = False
    token_ids: bool = False


class ChunkSerializer(Protocol):
    """How an API writes the fields in which streams differ."""

    object: str

    @property
    def errors(self) -> ErrorSerializer: ...

    def is_empty(self, event: Event) -> bool:
        """Return whether an event has no content; it is written only if it has requested extras."""

    def delta(self, event: Event) -> dict[str, Any]:
        """Return the choice's fields for an event, without index and finish_reason."""

    def finish_reason(self, event: Event) -> str | None: ...


def estimate_bytes(answers: Iterable[Answer], told_ids: int = 0, beside_each: int = 0) -> int:
    """Estimate the size of a reply with these answers, and `told_ids` prompt ids with log probabilities."""
    size = (ID_BYTES + LOGPROB_BYTES * beside_each) * told_ids
    for answer in answers:
        size += len(answer.text) + len(answer.reasoning) + sum(len(call.arguments) for call in answer.calls)
        size += ID_BYTES * len(answer.ids)
        if answer.logprobs:
            size += LOGPROB_BYTES * len(answer.logprobs) * (1 + len(answer.logprobs[0].top))
    return size


class StreamWriter:
    """Writes events as chunks; a plain fragment encodes no JSON but its text.

    `plain` means that deltas have only text, and no log probabilities. `weights` is called where a choice
    ends, and returns the version of the weights.
    """

    idle = KEEP_ALIVE

    def __init__(
        self,
        head: ReplyEnvelope,
        spelling: ChunkSerializer,
        options: ChunkOptions,
        get_usage: Callable[[], Usage],
        *,
        plain: bool,
        weights: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._envelope = {
            "id": head.id,
            "object": spelling.object,
            "created": head.created,
            "model": head.model,
            "system_fingerprint": head.fingerprint,
        }
        self._spelling = spelling
        self._options = options
        self._used = get_usage
        self._weights = weights
        self._logprobs = not plain
        self._plain = plain and not options.token_ids and not options.running_usage
        self._parts: dict[tuple[str, int, int], tuple[bytes, ...]] = {}

    def write(self, events: Sequence[Event]) -> bytes:
        if len(events) == 1:
            return self._one(events[0])
        return b"".join([self._one(event) for event in events])

    def _one(self, event: Event) -> bytes:
        if self._plain and event.kind in FRAGMENTS:
            key = (event.kind, event.choice, event.call)
            parts = self._parts.get(key)
            if parts is None:
                parts = self._parts[key] = self._cut(event)
            return encode(event.text).join(parts)
        if event.error is not None:
            return self._spelling.errors.event(event.error)
        if self._spelling.is_empty(event) and not self._beside(event):
            return b""
        return self.chunk(event, self._spelling.delta(event))

    def _beside(self, event: Event) -> bool:
        """Return whether an event has ids or log probabilities that the client requested."""
        return bool((self._options.token_ids and event.ids) or (self._logprobs and event.logprobs))

    def _cut(self, event: Event) -> tuple[bytes, ...]:
        example = Event(event.kind, event.choice, PLACEHOLDER, call=event.call)
        if self._spelling.is_empty(example):
            return ()
        return split_at_placeholder(self._payload(example, self._spelling.delta(example)), PLACEHOLDER)

    def chunk(self, about: Event, fields: dict[str, Any], extra: dict[str, Any] | None = None) -> bytes:
        return event({**self._payload(about, fields), **(extra or {})})

    def _payload(self, about: Event, fields: dict[str, Any]) -> dict[str, Any]:
        choice = {
            "index": about.choice,
            **fields,
            "finish_reason": self._spelling.finish_reason(about),
        }
        if about.kind == "finish":
            choice["stop_reason"] = about.stop
        if self._options.token_ids:
            choice["token_ids"] = about.ids
        ends = weight_field(self._weights()) if about.kind == "finish" else {}
        return {**self._envelope, "choices": [choice], **self._usage_field(), **ends}

    def _usage_field(self) -> dict[str, Any]:
        if self._options.running_usage:
            return {"usage": usage(self._used())}
        return {"usage": None} if self._options.usage else {}

    def end(self) -> bytes:
        """Write the end of the stream: the usage, if requested, and the end marker."""
        if not self._options.usage:
            return DONE
        counted = {"usage": usage(self._used()), **weight_field(self._weights())}
        return event({**self._envelope, "choices": [], **counted}) + DONE
