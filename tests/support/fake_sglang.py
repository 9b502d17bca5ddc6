"""The same contract as SGLang has it: a manager inside of an engine, other names, and more of them."""

import dataclasses
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from tests.support.fake_asyncllm import AsyncEngineBase, CommonParams, Manner


class SamplingParams(CommonParams, kw_only=True):
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


class Manager(AsyncEngineBase):
    def generate_request(self, obj: GenerateReqInput, request: None = None) -> AsyncIterator[dict[str, Any]]:
        return self.run(obj)

    def check(self, obj: Any) -> None:
        SamplingParams(**obj.sampling_params).verify()


class FakeSglang:
    """`server_args` says what the engine was started with."""

    def __init__(self, manner: Manner | None = None, **server_args: Any) -> None:
        self.tokenizer_manager = Manager(manner)
        self.tokenizer_manager.server_args = SimpleNamespace(**server_args)  # type: ignore[attr-defined]
