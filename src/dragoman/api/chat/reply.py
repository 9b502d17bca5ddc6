"""Chat Completions: the reply, full or streamed."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from dragoman.api.reply import (
    FIELDS,
    LogprobSerializer,
    OpenAIErrorSerializer,
    ReplyEnvelope,
    StreamWriter,
    usage,
    weight_field,
)
from dragoman.errors import CONVERSATION, OUTPUT, PROMPT, TOP_LOGPROBS
from dragoman.types import Answer, Event, TokenLogprob, ToolCall, Usage

ERRORS = OpenAIErrorSerializer(
    {
        **FIELDS,
        CONVERSATION: "messages",
        PROMPT: "messages",
        OUTPUT: "response_format",
        TOP_LOGPROBS: "top_logprobs",
    }
)


NO_THOUGHT = {"reasoning_content": None}
"""Clients written for vLLM and SGLang read this field of a message even if it is absent."""


class ChatSerializer:
    """Writes answers in the Chat Completions format.

    `legacy` writes a call as `function_call`, for clients that sent `functions`; `reasoning` includes
    reasoning. `everywhere` adds the reasoning field to each delta, null included: clients that were written
    for SGLang, and request reasoning by SGLang's field, read it in all of them. Clients for vLLM check
    whether it is present, and treat a delta that has it as one without text. `named` says that the client
    named the tool: it knows that there is a call, and the finish reason is `stop`. `custom` has the names of
    the tools with free-text input.
    """

    object = "chat.completion.chunk"
    errors = ERRORS

    def __init__(
        self,
        speller: LogprobSerializer,
        *,
        logprobs: bool = False,
        legacy: bool = False,
        reasoning: bool = True,
        everywhere: bool = False,
        named: bool = False,
        custom: Collection[str] = (),
    ) -> None:
        self._speller = speller
        self._logprobs = logprobs
        self._legacy = legacy
        self._reasoning = reasoning
        self._begun: dict[str, Any] = NO_THOUGHT if everywhere else {}
        self._named = named
        self._custom = custom
        self._custom_calls: set[tuple[int, int]] = set()
        self._called: set[int] = set()

    def is_empty(self, event: Event) -> bool:
        return event.kind in ("call_close", "unseen") or (event.kind == "reasoning" and not self._reasoning)

    def delta(self, event: Event) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if event.kind == "text":
            delta = {"content": event.text}
        elif event.kind == "reasoning":
            delta = self.thought(event.text)
        elif event.kind == "call_arguments":
            custom = (event.choice, event.call) in self._custom_calls
            delta = self._call(event, {"input" if custom else "arguments": event.text})
        elif event.kind == "call_open":
            delta = self._open(event)
        return {"delta": self._begun | delta, "logprobs": self.logprobs(event.logprobs)}

    def role(self) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": "", **self._begun}, "logprobs": None}

    def _open(self, event: Event) -> dict[str, Any]:
        self._called.add(event.choice)
        if event.text in self._custom:
            self._custom_calls.add((event.choice, event.call))
            head = {"id": event.call_id, "type": "custom"}
            return self._call(event, {"name": event.text, "input": ""}, head)
        head = {"id": event.call_id, "type": "function"}
        return self._call(event, {"name": event.text, "arguments": ""}, head)

    def _call(
        self, event: Event, fields: dict[str, str], head: dict[str, str] | None = None
    ) -> dict[str, Any]:
        if self._legacy:
            return {"function_call": fields}
        kind = "custom" if "input" in fields else "function"
        return {"tool_calls": [{"index": event.call, **(head or {}), kind: fields}]}

    def thought(self, text: str) -> dict[str, Any]:
        # The same text under two names: some clients read the first, some the second.
        return {"reasoning_content": text, "reasoning": text} if text and self._reasoning else {}

    def calls(self, calls: Sequence[ToolCall]) -> dict[str, Any]:
        """Return the fields for the tool calls of a full message."""
        if self._legacy:
            return {"function_call": _function(calls[0])} if calls else {}
        return {"tool_calls": [self._written(call) for call in calls]} if calls else {}

    def _written(self, call: ToolCall) -> dict[str, Any]:
        if call.name in self._custom:
            return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": call.arguments}}
        return {"id": call.id, "type": "function", "function": _function(call)}

    def logprobs(self, entries: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
        if not self._logprobs or not entries:
            return None
        return {"content": self._speller.chat(entries), "refusal": None}

    def finish_reason(self, event: Event) -> str | None:
        return self.reason(event.finish, called=event.choice in self._called)

    def reason(self, finish: str | None, *, called: bool) -> str | None:
        """Return the finish reason; a call that was cut off by the token limit does not count as a call."""
        if finish != "stop" or not called or self._named:
            return finish
        return "function_call" if self._legacy else "tool_calls"


def _function(call: ToolCall) -> dict[str, str]:
    return {"name": call.name, "arguments": call.arguments}


def opening(
    writer: StreamWriter,
    spelling: ChatSerializer,
    choices: int,
    echoed: str,
    prompt_ids: Sequence[int] | None,
) -> bytes:
    """Write the first chunk of each choice, with the role; `echo` adds the text that the client began."""
    once = {} if prompt_ids is None else {"prompt_token_ids": prompt_ids}
    chunks = []
    for choice in range(choices):
        chunks.append(writer.chunk(Event("text", choice), spelling.role(), {} if choice else once))
        if echoed:
            chunks.append(writer.write([Event("text", choice, echoed)]))
    return b"".join(chunks)


def whole(
    head: ReplyEnvelope,
    answers: Iterable[Answer],
    counted: Usage,
    spelling: ChatSerializer,
    *,
    echoed: str = "",
    prompt_ids: Sequence[int] | None = None,
    weight_version: str | None = None,
) -> dict[str, Any]:
    """Build the full reply; `prompt_ids` are set if the request wants token ids returned."""
    extra = {} if prompt_ids is None else {"prompt_token_ids": prompt_ids}
    return {
        "id": head.id,
        "object": "chat.completion",
        "created": head.created,
        "model": head.model,
        "choices": [_choice(answer, spelling, echoed, prompt_ids is not None) for answer in answers],
        "usage": usage(counted),
        "system_fingerprint": head.fingerprint,
        "service_tier": None,
        **extra,
        **weight_field(weight_version),
    }


def _choice(answer: Answer, spelling: ChatSerializer, echoed: str, token_ids: bool) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        # Null means no content beside the calls.
        "content": echoed + answer.text or (None if answer.calls else ""),
        "refusal": None,
        # Clients written for vLLM read this field even if it is absent.
        "reasoning": None,
        **NO_THOUGHT,
        **spelling.thought(answer.reasoning),
        **spelling.calls(answer.calls),
    }
    choice: dict[str, Any] = {
        "index": answer.choice,
        "message": message,
        "logprobs": spelling.logprobs(answer.logprobs),
        "finish_reason": spelling.reason(answer.finish, called=bool(answer.calls)),
        "stop_reason": answer.stop,
    }
    if token_ids:
        choice["token_ids"] = answer.ids
    return choice
