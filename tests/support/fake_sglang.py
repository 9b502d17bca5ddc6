"""The same contract as SGLang has it: a manager inside of an engine, other names, and more of them."""

import dataclasses
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import msgspec

from tests.support.fake_asyncllm import Answering, Manner


class SamplingParams(msgspec.Struct, kw_only=True):
    max_new_tokens: int | None = 128
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
    sampling_seed: int | None = None


@dataclasses.dataclass
class GenerateReqInput:
    rid: str | None = None
    input_ids: list[int] | None = None
    sampling_params: dict[str, Any] | None = None
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    stream: bool = False
    lora_path: str | None = None
    priority: int | None = None
    extra_key: str | None = None
    require_reasoning: bool = False

    def normalize_batch_and_arguments(self) -> None:
        assert self.rid is not None


class Manager(Answering):
    def generate_request(self, obj: GenerateReqInput, request: None = None) -> AsyncIterator[dict[str, Any]]:
        return self.run(obj)

    def check(self, obj: Any) -> None:
        SamplingParams(**obj.sampling_params)


class FakeSglang:
    """`server_args` says what the engine was started with."""

    def __init__(self, manner: Manner | None = None, **server_args: Any) -> None:
        self.tokenizer_manager = Manager(manner)
        self.tokenizer_manager.server_args = SimpleNamespace(**server_args)  # type: ignore[attr-defined]
