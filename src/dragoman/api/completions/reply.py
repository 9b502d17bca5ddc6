"""Completions: the reply, whole or as a stream."""

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from dragoman.api.error_spelling import FIELDS, OpenAIErrors
from dragoman.api.logprobs import Speller
from dragoman.api.reply import Head, StreamWriter, usage
from dragoman.api.weights import weight_field
from dragoman.errors import ALTERNATIVES, OUTPUT
from dragoman.types import Answer, Event, TokenLogprob, Usage

ERRORS = OpenAIErrors({**FIELDS, OUTPUT: "response_format", ALTERNATIVES: "logprobs"})


class Echo(Struct, frozen=True):
    """A prompt that is repeated in front of its answers."""

    text: str = ""
    ids: tuple[int, ...] = ()
    logprobs: Sequence[TokenLogprob | None] | None = None


class CompletionSpelling:
    object = "text_completion"
    errors = ERRORS

    def __init__(self, speller: Speller, choices: int, *, logprobs: bool) -> None:
        self._speller = speller
        self._logprobs = logprobs
        self._offsets = [0] * choices

    def silent(self, event: Event) -> bool:
        return False

    def delta(self, event: Event) -> dict[str, Any]:
        logprobs = None
        if self._logprobs and event.logprobs:
            entries = event.logprobs
            ids = [entry.id for entry in entries]
            logprobs = self._speller.completions(entries, ids, self._offsets[event.choice])
        self._offsets[event.choice] += len(event.text)
        return {"text": event.text, "logprobs": logprobs}

    def finish_reason(self, event: Event) -> str | None:
        return event.finish

    def whole(self, answer: Answer, echo: Echo) -> dict[str, Any] | None:
        """All of a choice's log probabilities, the echoed prompt's first."""
        if not self._logprobs:
            return None
        entries = [*(echo.logprobs or ()), *answer.logprobs]
        ids = [*(echo.ids if echo.logprobs else ()), *(entry.id for entry in answer.logprobs)]
        return self._speller.completions(entries, ids, 0)


def opening(
    writer: StreamWriter,
    choices: int,
    echoes: Sequence[Echo],
    prompt_ids: Sequence[Sequence[int]] | None,
) -> bytes:
    """With `echo`, each choice begins with its prompt; where ids are returned, with the prompt's ids."""
    chunks = []
    for choice in range(choices):
        if prompt_ids is not None:
            ids = prompt_ids[choice * len(prompt_ids) // choices]
            fields = {"text": "", "logprobs": None, "prompt_token_ids": ids}
            chunks.append(writer.chunk(Event("text", choice), fields))
        if echoes:
            echo = echoes[choice * len(echoes) // choices]
            chunks.append(writer.write([Event("text", choice, echo.text)]))
    return b"".join(chunks)


def whole(
    head: Head,
    answers: Sequence[Answer],
    counted: Usage,
    spelling: CompletionSpelling,
    prompts: int,
    echoes: Sequence[Echo] = (),
    prompt_ids: Sequence[Sequence[int]] | None = None,
    weight_version: str | None = None,
) -> dict[str, Any]:
    """`prompt_ids`, one per prompt, are given where ids are to be returned."""
    choices = []
    for number, answer in enumerate(answers):
        prompt = number * prompts // len(answers)
        echo = echoes[prompt] if echoes else Echo()
        choice: dict[str, Any] = {
            "index": number,
            "text": echo.text + answer.text,
            "logprobs": spelling.whole(answer, echo),
            "finish_reason": answer.finish,
            "stop_reason": answer.stop,
        }
        if prompt_ids is not None:
            choice["token_ids"] = answer.ids
            choice["prompt_token_ids"] = prompt_ids[prompt]
        choices.append(choice)
    return {
        "id": head.id,
        "object": "text_completion",
        "created": head.created,
        "model": head.model,
        "choices": choices,
        "usage": usage(counted),
        "system_fingerprint": head.fingerprint,
        **weight_field(weight_version),
    }


def best(answers: Sequence[Answer], computed: int, wanted: int) -> list[Answer]:
    """Of every `computed` answers to one prompt, the `wanted` most likely ones, likeliest first."""
    chosen: list[Answer] = []
    for start in range(0, len(answers), computed):
        group = sorted(answers[start : start + computed], key=Answer.mean_logprob, reverse=True)
        chosen += group[:wanted]
    return chosen
