"""Ollama's API: the fields of chat, generate and embed requests, and replies as lines of JSON.

A request is read as a Chat Completions request, whose reader knows Ollama's names (`compat_fields`), so that
`options`, `think` and `format` have one meaning in all APIs. This module has what only Ollama's API has.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct
from msgspec.structs import replace

from dragoman.api.chat import request as chat
from dragoman.api.chat.request import ChatRequest, MessageBody
from dragoman.api.compat_fields import OLLAMA, OLLAMA_VECTORS
from dragoman.api.content_parts import read_images
from dragoman.api.reply import LogprobSerializer, encode, format_error, to_dragoman_error
from dragoman.api.request_decoder import IgnoredFields, RequestDecoder
from dragoman.api.sampling_fields import IDLE
from dragoman.api.shared_fields import TokenId, check_longest, check_shared, sampling, turn_spec
from dragoman.errors import CONVERSATION, OUTPUT, PROMPT, TOP_LOGPROBS, BadRequest, DragomanError
from dragoman.limits import Limits, check_count
from dragoman.turns.spec import TurnSpec
from dragoman.types import Answer, Conversation, Event, TextPrompt, TokenLogprob, ToolCall, Usage

API_LEVEL = "0.12.11"
"""The version of Ollama's API; clients compare it with the version that they need."""
LATEST = ":latest"
"""The suffix that Ollama adds to a model name without a tag."""
MEDIA = b"application/x-ndjson"


# Requests.


class OllamaChatRequest(ChatRequest, kw_only=True, forbid_unknown_fields=True):
    """A request to /api/chat; it streams unless the client disables that."""

    keep_alive: Any = None


class OllamaGenerateRequest(OllamaChatRequest, kw_only=True, forbid_unknown_fields=True):
    """A request to /api/generate: a prompt for the chat template or, with `raw` or a suffix, text to
    continue."""

    prompt: str | None = None
    system: str | None = None
    suffix: str | None = None
    raw: bool | None = None
    context: list[TokenId] | None = None
    """The token ids of the conversation so far, as returned by an earlier reply."""
    images: list[Any] | None = None


class OllamaEmbedRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    model: str
    input: str | list[str] | None = None
    prompt: str | None = None
    truncate: bool | None = None
    """Whether texts over the limit are truncated; the default is true."""
    dimensions: Annotated[int, Meta(ge=1, le=65536)] | None = None
    keep_alive: Any = None
    options: dict[str, Any] | None = None


class OllamaModelRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """A request about a model; older clients send `name`."""

    model: str | None = None
    name: str | None = None
    stream: bool | None = None
    verbose: bool | None = None
    insecure: bool | None = None

    @property
    def meant(self) -> str:
        if not (text := self.model or self.name):
            raise BadRequest("'model' is required.", param="model", code="missing_field")
        return text


_IDLE = (*IDLE, "keep_alive")
_chat = RequestDecoder.for_type(OllamaChatRequest, OLLAMA, _IDLE)
_prompt = RequestDecoder.for_type(OllamaGenerateRequest, OLLAMA, _IDLE)
_texts = RequestDecoder.for_type(OllamaEmbedRequest, OLLAMA_VECTORS, ("keep_alive", "options"))
_model = RequestDecoder.for_type(OllamaModelRequest)


def read_chat(body: bytes, limits: Limits, ignored: IgnoredFields | None = None) -> OllamaChatRequest:
    request: OllamaChatRequest = _chat.read(body, ignored)
    if request.messages:
        chat.check_request(request, limits)
    _check_single(request)
    return request


def _check_single(request: OllamaChatRequest) -> None:
    if (request.n or 1) > 1:
        raise BadRequest("n must be 1; leave it out.", param="n", code="invalid_value")


def read_prompt(body: bytes, limits: Limits, ignored: IgnoredFields | None = None) -> OllamaGenerateRequest:
    request: OllamaGenerateRequest = _prompt.read(body, ignored)
    if request.messages is not None:
        raise BadRequest("Send a prompt, or messages to /api/chat.", param="messages", code="invalid_value")
    if request.images:
        request.images = read_images(request.images, limits, "images")
        if request.context:
            message = (
                "Images cannot be combined with context; leave out context, or send messages to /api/chat."
            )
            raise BadRequest(message, param="context", code="invalid_value")
    for name in ("system", "context", "images") if is_raw(request) else ():
        if getattr(request, name):
            message = f"'{name}' needs the chat template, which raw and suffix bypass; send one of the two."
            raise BadRequest(message, param=name, code="invalid_value")
    check_shared(request)
    check_longest(request.max_tokens, "max_tokens")
    _check_single(request)
    check_count(len(request.context or ()), limits.told_ids, "context", "ids")
    if request.prompt and not is_raw(request):
        chat.check_request(as_chat(request), limits)
    return request


def read_texts(body: bytes, limits: Limits, ignored: IgnoredFields | None = None) -> OllamaEmbedRequest:
    request: OllamaEmbedRequest = _texts.read(body, ignored)
    items = texts(request)
    check_count(len(items), limits.prompts, "input", "inputs")
    if "" in items:
        raise BadRequest("A text of 'input' must not be empty.", param="input", code="invalid_value")
    return request


def read_model(body: bytes, ignored: IgnoredFields | None = None) -> OllamaModelRequest:
    request: OllamaModelRequest = _model.read(body, ignored)
    return request


def texts(request: OllamaEmbedRequest) -> list[str]:
    """Return the texts; an empty list asks only to load the model."""
    value = request.input if request.input is not None else request.prompt
    return [value] if isinstance(value, str) and value else value if isinstance(value, list) else []


def is_raw(request: OllamaGenerateRequest) -> bool:
    return bool(request.raw or request.suffix)


def as_chat(request: OllamaGenerateRequest) -> OllamaGenerateRequest:
    """Return the request with its prompt as messages."""
    bodies = [MessageBody("system", request.system)] if request.system else []
    asked = MessageBody("user", request.prompt, images=request.images)
    return replace(request, messages=[*bodies, asked])


def spec(request: OllamaChatRequest) -> TurnSpec:
    if isinstance(request, OllamaGenerateRequest):
        if is_raw(request):
            return _raw_spec(request)
        request = as_chat(request)
    return chat.spec(request)


def _raw_spec(request: OllamaGenerateRequest) -> TurnSpec:
    alternatives = (request.top_logprobs or 0) if request.logprobs else None
    asked = sampling(request, max_tokens=request.max_tokens, logprobs=alternatives)
    prompt = TextPrompt(request.prompt or "", request.suffix)
    return turn_spec(request, (prompt,), asked, 1)


def streams(request: OllamaChatRequest | OllamaModelRequest) -> bool:
    return request.stream is not False


def asks_nothing(request: OllamaChatRequest) -> bool:
    """Return whether the request only loads or unloads the model."""
    value = (
        request.prompt or request.suffix if isinstance(request, OllamaGenerateRequest) else request.messages
    )
    return not value


def conversation(request: OllamaGenerateRequest) -> Conversation:
    return chat.conversation(as_chat(request))


# Replies.


_WORDS: Mapping[str, str] = {
    CONVERSATION: "messages",
    PROMPT: "prompt",
    OUTPUT: "format",
    TOP_LOGPROBS: "top_logprobs",
}

_FORMATS = ("guided_json", "structured_outputs")
"""The fields that `format` is converted to."""


class OllamaErrorSerializer:
    def status(self, error: DragomanError) -> int:
        return error.status

    def body(self, error: DragomanError) -> dict[str, str | None]:
        """Build the error body: clients read the text; OpenAI's fields are added."""
        message, param = format_error(error, _WORDS)
        if param in _FORMATS:
            message, param = message.replace(f"'{param}'", "'format'"), "format"
        return {"error": message, "type": error.type, "param": param, "code": error.code}

    def event(self, error: Exception) -> bytes:
        return line(self.body(to_dragoman_error(error)))


ERRORS = OllamaErrorSerializer()


def line(payload: Any) -> bytes:
    return encode(payload) + b"\n"


def stamp(seconds: float) -> str:
    """Format a time as `2026-01-31T12:00:00.123456Z`."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def now() -> str:
    return stamp(time.time())


class OllamaSerializer:
    """Writes answers in Ollama's format; `chats` puts them into `message` instead of `response`."""

    def __init__(self, speller: LogprobSerializer, *, chats: bool, logprobs: bool, reasoning: bool) -> None:
        self._speller = speller
        self._chats = chats
        self._logprobs = logprobs
        self._reasoning = reasoning

    def fields(
        self,
        text: str,
        reasoning: str = "",
        calls: Sequence[ToolCall] = (),
        logprobs: Sequence[TokenLogprob] | None = None,
    ) -> dict[str, Any]:
        mapping: dict[str, Any] = {"content" if self._chats else "response": text}
        if reasoning and self._reasoning:
            mapping["thinking"] = reasoning
        if calls:
            mapping["tool_calls"] = [_call(call, index) for index, call in enumerate(calls)]
        fields: dict[str, Any] = {"message": {"role": "assistant", **mapping}} if self._chats else mapping
        if self._logprobs and logprobs:
            fields["logprobs"] = self._speller.chat(logprobs)
        return fields

    def answer(self, answer: Answer) -> dict[str, Any]:
        """Return the fields of an answer; calls whose arguments are not an object become text, as the model
        wrote them."""
        text = answer.text + "".join(call.arguments for call in answer.calls if not _is_object(call))
        calls = [call for call in answer.calls if _is_object(call)]
        return self.fields(text, answer.reasoning, calls, answer.logprobs)


def _is_object(call: ToolCall) -> bool:
    try:
        msgspec.json.decode(call.arguments or "{}", type=dict[str, Raw])
    except msgspec.DecodeError:
        return False
    return True


def _call(call: ToolCall, index: int) -> dict[str, Any]:
    # The model's own bytes, as a JSON value: clients of this API expect an object.
    arguments = Raw((call.arguments or "{}").encode())
    return {"id": call.id, "function": {"index": index, "name": call.name, "arguments": arguments}}


class Timing(Struct):
    """Durations in seconds, which replies have in nanoseconds."""

    total: float
    prompt: float
    answer: float

    def fields(self, used: Usage) -> dict[str, int]:
        return {
            "total_duration": _nanoseconds(self.total),
            "load_duration": 0,
            "prompt_eval_count": used.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(self.prompt),
            "eval_count": used.completion_tokens,
            "eval_duration": _nanoseconds(self.answer),
        }


def _nanoseconds(seconds: float) -> int:
    return int(max(seconds, 0.0) * 1e9)


class OllamaLineWriter:
    """Writes events as lines. A call is written once it is complete; `ends` returns the fields of the last
    line."""

    def __init__(
        self, model: str, spelling: OllamaSerializer, ends: Callable[[], dict[str, Any]], *, plain: bool
    ) -> None:
        self._head = {"model": model, "created_at": now()}
        self._spelling = spelling
        self._ends = ends
        self._plain = plain
        self._open: dict[int, ToolCall] = {}
        self._parts: dict[int, list[str]] = {}
        self._told = 0
        self._around: tuple[bytes, ...] = ()

    @property
    def idle(self) -> bytes:
        """The line sent while there is no output; it must be JSON, because clients parse every line."""
        return self._line("")

    def write(self, events: Sequence[Event]) -> bytes:
        return b"".join([self._one(event) for event in events])

    def _one(self, event: Event) -> bytes:
        if event.kind == "text":
            return self._text(event)
        if event.kind == "reasoning":
            return self._line("", event.text, logprobs=event.logprobs)
        if event.kind == "call_open":
            self._open[event.call] = ToolCall(id=event.call_id, name=event.text, arguments="")
            self._parts[event.call] = []
        elif event.kind == "call_arguments":
            self._parts[event.call].append(event.text)
        elif event.kind == "call_close":
            return self._close(event.call, event.logprobs)
        elif event.error is not None:
            return ERRORS.event(event.error)
        elif event.kind == "finish":
            return self._finish(event)
        return self._line("", logprobs=event.logprobs) if event.logprobs and not self._plain else b""

    def _text(self, event: Event) -> bytes:
        if not self._plain:
            return self._line(event.text, logprobs=event.logprobs)
        if not self._around:
            hole = "\x00"
            self._around = tuple(self._line(hole).split(encode(hole)))
        return encode(event.text).join(self._around)

    def _line(
        self,
        text: str,
        reasoning: str = "",
        calls: Sequence[ToolCall] = (),
        logprobs: Sequence[TokenLogprob] | None = None,
    ) -> bytes:
        fields = self._spelling.fields(text, reasoning, calls, logprobs)
        return line({**self._head, **fields, "done": False})

    def _close(self, number: int, logprobs: Sequence[TokenLogprob] | None = None) -> bytes:
        call = replace(self._open.pop(number), arguments="".join(self._parts.pop(number)))
        if not _is_object(call):
            return self._line(call.arguments, logprobs=logprobs)
        self._told += 1
        return self._line("", calls=[call], logprobs=logprobs)

    def _finish(self, event: Event) -> bytes:
        cut_off = b"".join([self._close(number) for number in list(self._open)])
        fields = self._spelling.fields("", logprobs=event.logprobs)
        ends = {"done": True, "done_reason": done_reason(event.finish), **self._ends()}
        return cut_off + line({**self._head, "created_at": now(), **fields, **ends})

    def end(self) -> bytes:
        return b""


def done_reason(finish: str | None) -> str:
    return "length" if finish == "length" else "stop"


def whole(model: str, spelling: OllamaSerializer, answer: Answer, ends: dict[str, Any]) -> dict[str, Any]:
    fields = {"done": True, "done_reason": done_reason(answer.finish), **ends}
    return {"model": model, "created_at": now(), **spelling.answer(answer), **fields}


def loaded(request: OllamaChatRequest, model: str) -> dict[str, Any]:
    """Build the reply to a request without a prompt."""
    reason = "unload" if request.keep_alive in (0, "0", "0s", "0m") else "load"
    fields: dict[str, Any] = {"message": {"role": "assistant", "content": ""}}
    if isinstance(request, OllamaGenerateRequest):
        fields = {"response": ""}
    return {"model": model, "created_at": now(), **fields, "done": True, "done_reason": reason}


def vectors_reply(
    model: str, vectors: Sequence[Sequence[float]], tokens: int, seconds: float
) -> dict[str, Any]:
    timing = {"total_duration": _nanoseconds(seconds), "load_duration": 0, "prompt_eval_count": tokens}
    return {"model": model, "embeddings": vectors, **timing}


# Models.


def describe_details(details: Mapping[str, str]) -> dict[str, Any]:
    family = details.get("architecture", "")
    return {
        "parent_model": "",
        "format": "gguf",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": count_parameters(details.get("parameters", "")),
        "quantization_level": details.get("description", "").rpartition(" ")[2],
    }


def count_parameters(text: str) -> str:
    """Format a number of parameters.

    >>> count_parameters("134515008"), count_parameters("8030261248"), count_parameters("")
    ('134.52M', '8.03B', '')
    """
    if not text.isdigit():
        return ""
    return f"{int(text) / 1e9:.2f}B" if int(text) >= 10**9 else f"{int(text) / 1e6:.2f}M"


def describe_model(
    name: str, created: int, size: int, numerics: str, details: Mapping[str, str]
) -> dict[str, Any]:
    tagged = name if ":" in name else name + LATEST
    return {
        "name": tagged,
        "model": tagged,
        "modified_at": stamp(created),
        "size": size,
        # A digest of what determines the answers; clients cannot download by it.
        "digest": sha256(f"{name} {numerics}".encode()).hexdigest(),
        "details": describe_details(details),
    }
