"""An engine with `generate_request` as tokenspeed has it, and a switch for each way that engines differ."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, ClassVar
from uuid import uuid4

from msgspec import Struct

from dragoman.engines.scripted import CHATML, END_ID, ByteTokenizer


class CommonParams(Struct, kw_only=True):
    """What the sampling parameters of all these engines have."""

    max_new_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    ignore_eos: bool = False
    logit_bias: dict[str, float] | None = None

    def verify(self) -> None:
        if self.top_k < -1 or self.top_k == 0:
            raise ValueError(f"top_k must be -1 (disable) or at least 1, got {self.top_k}.")


class SamplingParams(CommonParams, kw_only=True):
    seed: int | None = None


@dataclasses.dataclass
class GenerateReqInput:
    text: str | None = None
    input_ids: list[int] | None = None
    sampling_params: dict[str, Any] | None = None
    # The engine gives the id itself; it cannot be passed.
    rid: str | None = dataclasses.field(default=None, init=False)
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    stream: bool = False

    def normalize_batch_and_arguments(self) -> None:
        if self.input_ids is None:
            raise ValueError("Either text or input_ids should be provided.")
        self.rid = self.rid or uuid4().hex


@dataclasses.dataclass
class EmbeddingReqInput:
    text: str | None = None
    input_ids: list[int] | None = None


class Manner(Struct, frozen=True, kw_only=True):
    """How this engine answers."""

    ids: Sequence[int] = (*b"Hello", END_ID)
    cuts: Sequence[int] = ()
    """How many new ids each output has; 1 when there are no more of these."""
    whole_ids: bool = False
    """All ids in each output, although streaming was asked for."""
    whole_logprobs: bool = False
    ahead: int = 0
    """With whole lists: how many ids stand in them that are not counted yet, since the engine goes on."""
    counts: bool = True
    """Whether outputs have `completion_tokens`."""
    finish: Any = None
    """Instead of what the ids say: whatever stands in `finish_reason`."""
    fault: Exception | None = None
    fault_at: int = 0
    """After how many ids it is raised."""
    hang_at: int | None = None
    """After how many ids nothing comes any more."""
    closing_aborts: bool = True
    """Whether a generator that is closed ends its request; if not, only abort_request does."""
    logprob: float | None = -0.5
    gives_logprobs: bool = True
    weight_version: str | None = None
    interval: float = 0.0


class TemplateTokenizer(ByteTokenizer):
    templates: ClassVar[dict[str, str]] = {"default": CHATML}


class AsyncEngineBase:
    """What engines of this kind share."""

    served_model_name = "fake"
    context_len = 4096

    def __init__(self, manner: Manner | Callable[[Any], Manner] | None = None) -> None:
        self.manner = manner or Manner()
        self.tokenizer: Any = TemplateTokenizer()
        self.requests: list[Any] = []
        """Every request that came, for tests to look at."""
        self.live: set[str] = set()
        """Requests that would still be computed."""
        self.aborted: list[str] = []

    async def run(self, obj: Any) -> AsyncIterator[dict[str, Any]]:
        obj.normalize_batch_and_arguments()
        self.check(obj)
        self.requests.append(obj)
        manner = self.manner if isinstance(self.manner, Manner) else self.manner(obj)
        assert obj.rid not in self.live
        self.live.add(obj.rid)
        try:
            async for output in self._outputs(obj, manner):
                yield output
                if obj.rid not in self.live:
                    return
        finally:
            if manner.closing_aborts:
                self.live.discard(obj.rid)

    def check(self, obj: Any) -> None:
        SamplingParams(**obj.sampling_params).verify()

    def abort_request(self, rid: str) -> None:
        """By the beginning of ids, as SGLang does it."""
        self.aborted.append(rid)
        self.live = {live for live in self.live if not live.startswith(rid)}

    async def _outputs(self, obj: Any, manner: Manner) -> AsyncIterator[dict[str, Any]]:
        most = obj.sampling_params["max_new_tokens"]
        ids, cuts = list(manner.ids)[:most], list(manner.cuts)
        number = 0
        while True:
            await asyncio.sleep(manner.interval)
            if manner.fault is not None and number >= manner.fault_at:
                raise manner.fault
            if manner.hang_at is not None and number >= manner.hang_at:
                await asyncio.Event().wait()
            before, number = number, min(number + (cuts.pop(0) if cuts else 1), len(ids))
            over = number == len(ids)
            if over:
                self.live.discard(obj.rid)
            yield _output(obj, manner, ids, before, number)
            if over:
                return


class FakeAsyncLLM(AsyncEngineBase):
    """Its attributes are where tokenspeed has them."""

    def generate_request(self, obj: GenerateReqInput | EmbeddingReqInput) -> AsyncIterator[dict[str, Any]]:
        return self.run(obj)


class DuckEngine(AsyncEngineBase):
    """Takes any object that has the attributes."""

    def generate_request(self, obj):  # type: ignore[no-untyped-def]
        return self.run(obj)


def _output(obj: Any, manner: Manner, ids: list[int], before: int, said: int) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "id": obj.rid,
        "finish_reason": _finish(manner, ids) if said == len(ids) else None,
        "prompt_tokens": len(obj.input_ids),
        "cached_tokens": 2,
    }
    if manner.counts:
        meta["completion_tokens"] = said
    if manner.weight_version is not None:
        meta["weight_version"] = manner.weight_version
    if obj.return_logprob and manner.gives_logprobs:
        start, end = (0, said + manner.ahead) if manner.whole_logprobs else (before, said)
        meta |= _logprobs(obj, manner, ids, start, end)
    return {
        # A part of a character becomes another text when the rest has come: no prefix of what follows.
        "text": bytes(id_ for id_ in ids[:said] if id_ < 256).decode(errors="replace"),
        "output_ids": ids[: said + manner.ahead] if manner.whole_ids else ids[before:said],
        "meta_info": meta,
    }


def _finish(manner: Manner, ids: list[int]) -> Any:
    if manner.finish is not None:
        return manner.finish
    if len(ids) < len(manner.ids):
        return {"type": "length", "length": len(ids)}
    return {"type": "stop", "matched": ids[-1]}


def _logprobs(obj: Any, manner: Manner, ids: list[int], start: int, end: int) -> dict[str, Any]:
    own = [(manner.logprob, id_, None) for id_ in ids[start:end]]
    meta: dict[str, Any] = {"output_token_logprobs": own}
    tops = range(obj.top_logprobs_num)
    if tops:
        meta["output_top_logprobs"] = [[(-0.5 - n, id_ - n, None) for n in tops] for id_ in ids[start:end]]
    if obj.logprob_start_len == 0 and (start == 0 or manner.whole_logprobs):
        prompt = obj.input_ids
        meta["input_token_logprobs"] = [(None, prompt[0], None), *((-1.5, id_, None) for id_ in prompt[1:])]
        if tops:
            meta["input_top_logprobs"] = [
                None,
                *([(-1.5 - n, id_ ^ n, None) for n in tops] for id_ in prompt[1:]),
            ]
    return meta
