"""Chat Completions: the reply, whole or as a stream."""

from collections.abc import Iterable, Sequence
from typing import Any

from dragoman.api.logprobs import Speller
from dragoman.api.reply import Head, StreamWriter
from dragoman.api.usage import usage
from dragoman.types import Answer, Event, TokenLogprob, Usage


class ChatSpelling:
    object = "chat.completion.chunk"

    def __init__(self, speller: Speller, *, logprobs: bool) -> None:
        self._speller = speller
        self._logprobs = logprobs

    def delta(self, event: Event) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if event.kind == "text":
            delta = {"content": event.text}
        elif event.kind == "reasoning":
            # Two names for one text: half of the clients read the one, half the other.
            delta = {"reasoning_content": event.text, "reasoning": event.text}
        return {"delta": delta, "logprobs": self.logprobs(event.logprobs)}

    def logprobs(self, entries: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
        if not self._logprobs or not entries:
            return None
        return {"content": self._speller.chat(entries), "refusal": None}

    def finish_reason(self, event: Event) -> str | None:
        return event.finish


def opening(writer: StreamWriter, choices: int, echoed: str, prompt_ids: Sequence[int] | None) -> bytes:
    """The first chunk of each choice has the role; with `echo`, what the client began follows."""
    extra = {} if prompt_ids is None else {"prompt_token_ids": prompt_ids}
    chunks = []
    for choice in range(choices):
        role = {"delta": {"role": "assistant", "content": ""}, "logprobs": None}
        chunks.append(writer.chunk(Event("text", choice), role, extra))
        if echoed:
            chunks.append(writer.write([Event("text", choice, echoed)]))
    return b"".join(chunks)


def whole(
    head: Head,
    answers: Iterable[Answer],
    counted: Usage,
    spelling: ChatSpelling,
    *,
    echoed: str = "",
    prompt_ids: Sequence[int] | None = None,
) -> dict[str, Any]:
    """`prompt_ids` are given where ids are to be returned."""
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
    }


def _choice(answer: Answer, spelling: ChatSpelling, echoed: str, token_ids: bool) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": echoed + answer.text,
        "refusal": None,
    }
    if answer.reasoning:
        message["reasoning_content"] = message["reasoning"] = answer.reasoning
    choice: dict[str, Any] = {
        "index": answer.choice,
        "message": message,
        "logprobs": spelling.logprobs(answer.logprobs),
        "finish_reason": answer.finish,
        "stop_reason": answer.stop,
    }
    if token_ids:
        choice["token_ids"] = answer.ids
    return choice
