"""What both ways of driving vLLM need of the model that it has loaded."""

import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from dragoman.engines.hf_tokenizer import HfTokenizer
from dragoman.engines.protocol import ModelCard
from dragoman.engines.recommended import sensible
from dragoman.engines.vllm.faults import told
from dragoman.engines.vllm.params import UNSUPPORTED, adapter_requests, sampling_params, sources_of
from dragoman.errors import MODEL, BadRequest, ModelFileError
from dragoman.types import Job


class VllmModel:
    def __init__(self, llm: Any, name: str | None, adapters: Mapping[str, str]) -> None:
        config = llm.model_config
        self.writes = config.runner_type == "generate"
        self.adapters = adapter_requests(adapters)
        self.tokenizer = HfTokenizer(
            llm.get_tokenizer(), size=config.get_vocab_size(), end_ids=_end_ids(config)
        )
        self.card = ModelCard(
            name=name or Path(str(config.model)).name,
            max_model_len=config.max_model_len,
            slots=llm.vllm_config.scheduler_config.max_num_seqs,
            templates=self.tokenizer.templates,
            special_tokens=self.tokenizer.special_tokens,
            adapters=tuple(self.adapters),
            sources=sources_of(llm),
            sampling=sensible(config.try_get_generation_config() or {}),
            unsupported=UNSUPPORTED,
            created=int(time.time()),
            details=_details(llm),
        )

    async def load_adapters(self, add: Callable[[Any], Awaitable[Any]]) -> None:
        """All of them at the start, so that none fails a client."""
        for name, adapter in self.adapters.items():
            try:
                await add(adapter)
            except Exception as error:
                message = f"vLLM cannot load the adapter {name}; is it one for this model?"
                raise ModelFileError(message) from error

    def sampling_params(self, job: Job) -> Any:
        if not self.writes:
            raise BadRequest(
                "This model gives embeddings only; it cannot write.", param=MODEL, code="unsupported_model"
            )
        with told():
            return sampling_params(job, self.tokenizer.end_ids)

    def pooling_params(self) -> Any:
        if self.writes:
            raise BadRequest(
                "This model writes and gives no embeddings; vLLM does either one or the other.",
                param=MODEL,
                code="unsupported_model",
            )
        from vllm import PoolingParams

        return PoolingParams(task="embed")

    def adapter(self, job: Job) -> Any:
        return None if job.adapter is None else self.adapters[job.adapter]


def _end_ids(config: Any) -> list[int]:
    """Ids at which vLLM ends answers by itself, besides the tokenizer's own."""
    found = (config.try_get_generation_config() or {}).get("eos_token_id")
    return [found] if isinstance(found, int) else list(found or ())


def _details(llm: Any) -> dict[str, str]:
    import vllm

    config = llm.model_config
    return {
        "architecture": ", ".join(getattr(config, "architectures", None) or []),
        "dtype": str(config.dtype).removeprefix("torch."),
        "quantization": str(config.quantization or "none"),
        "slots": str(llm.vllm_config.scheduler_config.max_num_seqs),
        "runner": f"vllm {vllm.__version__}",
    }
