"""Engines of others that speak text: in each of the shapes that there are, without a line of ours in them."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from dragoman.engines.scripted import ByteTokenizer
from tests.support.fake_asyncllm import TemplateTokenizer

STOP = {"type": "stop"}


class TextLLM:
    """`generate_request` that yields text and no ids: all of it each time, or with `pieces` what is new."""

    def __init__(self, *said: str, pieces: bool = False, tokenizer: ByteTokenizer | None = None, **meta: Any):
        self.said = said
        self.pieces = pieces
        self.meta = meta
        self.asked: list[Any] = []
        self.aborted: list[str] = []
        if tokenizer is not None:
            self.tokenizer = tokenizer

    async def generate_request(self, obj: Any) -> AsyncIterator[dict[str, Any]]:
        self.asked.append(obj)
        for offset in range(1, len(self.said) + 1):
            await asyncio.sleep(0)
            text = self.said[offset - 1] if self.pieces else "".join(self.said[:offset])
            finish = STOP if offset == len(self.said) else None
            yield {"text": text, "meta_info": {"finish_reason": finish, **self.meta}}

    def abort_request(self, rid: str) -> None:
        self.aborted.append(rid)


class NothingLLM:
    """Ends its answers without a word in any field that is known."""

    tokenizer = TemplateTokenizer()
    context_len = 4096

    def __init__(self, output: dict[str, Any]) -> None:
        self.output = output

    async def generate_request(self, obj: Any) -> AsyncIterator[dict[str, Any]]:
        yield {**self.output, "meta_info": {"finish_reason": STOP, "completion_tokens": 3}}


class TextExecutor:
    """`generate` as trainers have it, with texts for answers."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.prompts: list[Any] = []

    def generate(self, prompts: list[Any], sampling_params: list[Any]) -> Sequence[Any]:
        self.prompts += prompts
        return [{"text": self.text, "finish_reason": "stop"} for _ in prompts]
