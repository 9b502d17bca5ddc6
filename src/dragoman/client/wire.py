"""Chunks of chat and completions streams from many servers: any field may be missing or null."""

from typing import Any

import msgspec
from msgspec import Struct, field

from dragoman.types import Usage


class CallPayload(Struct):
    """Name and input of a call: `arguments` of a function (text, although some servers send an object), or
    `input`.
    """

    name: str | None = None
    arguments: str | dict[str, Any] | None = None
    input: str | None = None

    @property
    def said(self) -> str:
        value = self.input if self.arguments is None else self.arguments
        return value or "" if isinstance(value, str | None) else msgspec.json.encode(value).decode()


class CallDelta(Struct):
    index: int | None = None
    id: str | None = None
    function: CallPayload | None = None
    custom: CallPayload | None = None


class ChunkDelta(Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None
    """Reasoning under another name; some routers send an object, which is ignored."""
    refusal: str | None = None
    tool_calls: list[CallDelta] | None = None
    function_call: CallPayload | None = None

    @property
    def thought(self) -> str:
        return self.reasoning_content or (self.reasoning if isinstance(self.reasoning, str) else "")


class WireLogprob(Struct):
    """One token in the log probabilities of chat and responses."""

    token: str
    id: int | None = None
    """Sent by llama-server."""
    logprob: float | None = None
    top_logprobs: "list[WireLogprob] | None" = None


class Logprobs(Struct):
    """Log probabilities: `content` is chat's format, the other three are the parallel lists of
    completions.
    """

    content: list[WireLogprob] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None


class ChunkChoice(Struct):
    index: int = 0
    delta: ChunkDelta | None = None
    message: ChunkDelta | None = None
    """Used by servers that do not stream."""
    text: str | None = None
    token_ids: list[int] | None = None
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    @property
    def said(self) -> ChunkDelta:
        return self.delta or self.message or ChunkDelta(content=self.text)


class Details(Struct):
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class UsageCounts(Struct):
    """Usage under the field names of chat and completions, and of responses."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: Details | None = None
    completion_tokens_details: Details | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: Details | None = None
    output_tokens_details: Details | None = None

    def usage(self) -> Usage:
        before = self.prompt_tokens_details or self.input_tokens_details or Details()
        after = self.completion_tokens_details or self.output_tokens_details or Details()
        return Usage(
            prompt_tokens=self.prompt_tokens or self.input_tokens or 0,
            completion_tokens=self.completion_tokens or self.output_tokens or 0,
            cached_tokens=before.cached_tokens or 0,
            reasoning_tokens=after.reasoning_tokens or 0,
        )


class Chunk(Struct):
    choices: list[ChunkChoice] = field(default_factory=list)
    usage: UsageCounts | None = None
    error: Any = None


class ErrorBody(Struct):
    """An error as a server describes it."""

    message: str
    type: str | None = None
    code: str | None = None
    param: str | None = None


read_chunk = msgspec.json.Decoder(Chunk).decode


def problem_in(body: bytes) -> ErrorBody | None:
    """Extract the error of a reply or an event: OpenAI's format, plain text, or a format between."""
    try:
        result = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return (
        problem_of(result.get("error") or result.get("detail") or result)
        if isinstance(result, dict)
        else None
    )


def problem_of(result: Any) -> ErrorBody | None:
    """Build a problem: `problem_of({"message": "No."})` and `problem_of("No.")` are equal."""
    if isinstance(result, str):
        return ErrorBody(result)
    if not isinstance(result, dict) or not isinstance(result.get("message"), str):
        return None
    rest = {name: str(result[name]) for name in ("type", "code", "param") if result.get(name) is not None}
    return ErrorBody(result["message"], **rest)
