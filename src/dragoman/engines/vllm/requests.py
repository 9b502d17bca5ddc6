"""From jobs to vLLM's requests, and the properties of the loaded model."""

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from copy import copy
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from dragoman.engines.hf_tokenizer import HfTokenizer
from dragoman.engines.model_files import sensible
from dragoman.engines.protocol import ModelCard
from dragoman.engines.steps import seed_of
from dragoman.engines.vllm.media_processor import open_senses
from dragoman.engines.vllm.options import rank_of
from dragoman.engines.vllm.outputs import logger, telling_errors
from dragoman.errors import MODEL, BadRequest, EngineFailed, ModelFileError
from dragoman.media import Media
from dragoman.types import LARK_LINE, ConstraintFormat, ConstraintSource, Job

# Sampling.


UNSUPPORTED = frozenset({"typical_p"})
_PLAIN: tuple[ConstraintFormat, ...] = ("json_schema", "regex", "choice")
_SOURCES: Mapping[str, tuple[ConstraintFormat, ...]] = {
    "guidance": ("lark",),
    "xgrammar": (*_PLAIN, "gbnf", "structural_tag"),
    # It tries xgrammar first.
    "auto": (*_PLAIN, "gbnf", "structural_tag"),
}


def sources_of(llm: Any) -> tuple[ConstraintFormat, ...]:
    """Return the constraint formats: only llguidance reads our grammars; other backends get the client's own
    source, where that is enough.

    Forced or strict tool calls need more than that; xgrammar has structural tags for them.
    """
    backend = str(llm.vllm_config.structured_outputs_config.backend)
    return _SOURCES.get(backend, _PLAIN)


def sampling_params(job: Job, ends: frozenset[int]) -> Any:
    """Create vLLM's SamplingParams of the first continuation, without detokenization."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    asked = job.sampling
    source = job.constraint.source if job.constraint is not None else None
    params = SamplingParams(
        max_tokens=asked.max_tokens,
        min_tokens=asked.min_tokens,
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        min_p=asked.min_p,
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        repetition_penalty=asked.repetition_penalty,
        seed=asked.seed,
        # vLLM knows one end id; the model may have several.
        stop_token_ids=sorted(asked.stop_token_ids if asked.ignore_eos else asked.stop_token_ids | ends),
        ignore_eos=asked.ignore_eos,
        logit_bias=dict(asked.logit_bias) or None,
        allowed_token_ids=None if asked.allowed_token_ids is None else list(asked.allowed_token_ids),
        logprobs=asked.logprobs,
        prompt_logprobs=asked.prompt_logprobs,
        structured_outputs=None if source is None else _write_structured(source),
        skip_reading_prefix_cache=None if job.reuse_prefix else True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        skip_clone=True,
    )
    if asked.bad_words:
        # As texts they would be tokenized again; these are the ids that vLLM derives from them.
        params._bad_words_token_ids = [list(word) for word in asked.bad_words]
    return params


def sibling(params: Any, index: int) -> Any:
    """Return the parameters of another continuation: with its own seed, and without prompt log
    probabilities.
    """
    other = copy(params)
    if other.seed is not None:
        other.seed = seed_of(other.seed, index)
    other.prompt_logprobs = None
    return other


def _write_structured(source: ConstraintSource) -> Any:
    from vllm.sampling_params import StructuredOutputsParams

    match source.format:
        case "lark":
            return StructuredOutputsParams(grammar=LARK_LINE + source.text)
        case "gbnf":
            return StructuredOutputsParams(grammar=source.text)
        case "json_schema":
            return StructuredOutputsParams(json=source.text)
        case "regex":
            return StructuredOutputsParams(regex=source.text)
        case "choice":
            return StructuredOutputsParams(choice=msgspec.json.decode(source.text, type=list[str]))
        case "structural_tag":
            return StructuredOutputsParams(structural_tag=source.text)


def prompt_of(ids: Sequence[int], salt: str) -> Any:
    """Convert ids to vLLM's form of a prompt."""
    prompt: dict[str, Any] = {"type": "token", "prompt_token_ids": list(ids)}
    return prompt | {"cache_salt": salt} if salt else prompt


def adapter_request(name: str, number: int, folder: str) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name=name, lora_int_id=number, lora_path=folder)


# The loaded model, for both engines over vLLM.


class VllmModel:
    def __init__(self, llm: Any, name: str | None, adapters: Mapping[str, str]) -> None:
        config = llm.model_config
        self.writes = config.runner_type == "generate"
        self._numbers = count(1)
        self.adapters = {
            name: adapter_request(name, next(self._numbers), folder) for name, folder in adapters.items()
        }
        self._adaptable = llm.vllm_config.lora_config is not None
        self.senses = open_senses(llm)
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
            constraint_formats=sources_of(llm),
            recommended_sampling=sensible(config.try_get_generation_config() or {}),
            unsupported=UNSUPPORTED,
            modalities=frozenset() if self.senses is None else self.senses.modalities,
            created=int(time.time()),
            details=_details(llm),
        )

    def media_token_ids(self, media: Media) -> list[int]:
        if self.senses is None:
            raise EngineFailed("This model takes only text.")
        return self.senses.process(media).ids

    def prompt(self, job: Job) -> Any:
        """Convert a job's prompt for vLLM. Slow if `is_ready` is false; then call it in a thread."""
        if self.senses is None or not job.media:
            return prompt_of(job.prompt, job.cache_salt)
        return self.senses.prompt(job.prompt, job.media, job.cache_salt)

    def is_ready(self, job: Job) -> bool:
        return self.senses is None or not job.media or self.senses.known(job.media)

    def close(self) -> None:
        if self.senses is not None:
            self.senses.close()

    async def load_adapters(self, add: Callable[[Any], Awaitable[Any]]) -> None:
        """Load all adapters at startup, so that no request fails because of one."""
        for adapter in self.adapters.values():
            await _load(adapter, add)

    async def load_adapter(self, name: str, path: str, add: Callable[[Any], Awaitable[Any]]) -> None:
        if not self._adaptable:
            raise BadRequest(
                "vLLM was started without support for adapters; start with --lora-dir or --lora.",
                code="unsupported_model",
            )
        rank_of(Path(path))
        adapter = adapter_request(name, next(self._numbers), path)
        await _load(adapter, add)
        self.adapters[name] = adapter

    async def unload_adapter(self, name: str, remove: Callable[[int], Awaitable[Any]]) -> None:
        with telling_errors():
            await remove(self.adapters.pop(name).lora_int_id)

    def sampling_params(self, job: Job) -> Any:
        if not self.writes:
            raise BadRequest(
                "This model only returns embeddings; it cannot generate.",
                param=MODEL,
                code="unsupported_model",
            )
        with telling_errors():
            return sampling_params(job, self.tokenizer.end_ids)

    def pooling_params(self) -> Any:
        if self.writes:
            raise BadRequest(
                "This model generates text and returns no embeddings; vLLM runs a model for one of the two.",
                param=MODEL,
                code="unsupported_model",
            )
        from vllm import PoolingParams

        return PoolingParams(task="embed")

    def adapter(self, job: Job) -> Any:
        return None if job.adapter is None else self.adapters[job.adapter]


async def _load(adapter: Any, add: Callable[[Any], Awaitable[Any]]) -> None:
    try:
        await add(adapter)
    except Exception as error:
        logger.warning("vLLM did not load an adapter", exc_info=error)
        message = (
            f"vLLM cannot load the adapter {adapter.lora_name}; check that it is for this model, and of "
        )
        raise ModelFileError(message + "a rank that vLLM was started for (`max_lora_rank`).") from error


def _end_ids(config: Any) -> list[int]:
    """Return the ids at which vLLM itself ends answers, besides the tokenizer's own."""
    value = (config.try_get_generation_config() or {}).get("eos_token_id")
    return [value] if isinstance(value, int) else list(value or ())


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


# From jobs to requests of vLLM's core.
#
# Most jobs of a server use the same sampling parameters. vLLM validates and completes them once; after that,
# its request is copied for other prompts.


MOST_KEPT = 64
MOST_KEY_BYTES = 1024
_encode = msgspec.msgpack.Encoder().encode


class RequestBuilder:
    """Builder of requests. All methods are for the event loop's thread."""

    def __init__(self, llm: Any, model: VllmModel) -> None:
        self._inputs = llm.input_processor
        self._model = model
        self._kept: OrderedDict[bytes, Any] = OrderedDict()
        self._numbers = count()

    def forget(self) -> None:
        """Drop the cached requests: adapters have changed, and requests may name one."""
        self._kept.clear()

    def of(self, job: Job, prompt: Any = None) -> list[Any]:
        """Create one request for each continuation; raises what vLLM rejects. The prompt may be converted
        already.
        """
        first = self._first(job, prompt)
        requests = [first]
        for index in range(1, job.n):
            other = copy(first)
            other.request_id = f"{first.request_id}-{index}"
            other.sampling_params = sibling(first.sampling_params, index)
            requests.append(other)
        return requests

    def embedding(self, prompts: Sequence[Sequence[int]], tasks: tuple[str, ...]) -> list[Any]:
        params = self._model.pooling_params()
        return [
            self._make(f"embed-{n}", prompt_of(prompt, ""), params, tasks) for n, prompt in enumerate(prompts)
        ]

    def _first(self, job: Job, prompt: Any) -> Any:
        key = self._key(job)
        if key is not None and key in self._kept:
            self._kept.move_to_end(key)
            return self._again(self._kept[key], job)
        result = self._make(
            job.id,
            prompt or self._model.prompt(job),
            self._model.sampling_params(job),
            ("generate",),
            priority=job.priority,
            lora_request=self._model.adapter(job),
        )
        if key is not None:
            # Without its prompt, which may be long.
            self._kept[key] = kept = copy(result)
            kept.prompt_token_ids = None
            if len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
        return result

    def _key(self, job: Job) -> bytes | None:
        """Return a key of all that decides how vLLM completes a request; None if vLLM must validate the
        request itself.
        """
        asked, prompt = job.sampling, job.prompt
        if job.constraint is not None or job.media or asked.min_tokens or asked.max_tokens < 1:
            return None
        card, ids = self._model.card, len(self._model.tokenizer.pieces)
        if not 0 < len(prompt) < card.context_tokens or min(prompt) < 0 or max(prompt) >= ids:
            return None
        key = _encode((replace(asked, max_tokens=0), job.adapter, job.reuse_prefix))
        return key if len(key) <= MOST_KEY_BYTES else None

    def _again(self, kept: Any, job: Job) -> Any:
        request = copy(kept)
        request.prompt_token_ids = list(job.prompt)
        request.arrival_time = time.time()
        request.cache_salt = job.cache_salt or None
        request.priority = job.priority
        if request.sampling_params.max_tokens != job.sampling.max_tokens:
            request.sampling_params = copy(request.sampling_params)
            request.sampling_params.max_tokens = job.sampling.max_tokens
        return self._rename(request, job.id)

    def _make(self, id: str, prompt: Any, params: Any, tasks: tuple[str, ...], **how: Any) -> Any:
        with telling_errors():
            request = self._inputs.process_inputs(id, prompt, params, supported_tasks=tasks, **how)
        return self._rename(request, id)

    def _rename(self, request: Any, id: str) -> Any:
        """Make the request's id unique: two clients may have chosen the same one."""
        request.external_req_id = id
        request.request_id = f"{id}-{next(self._numbers):x}"
        return request
