"""From a job to what vLLM is asked."""

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import msgspec

from dragoman.engines.seeds import seed_of
from dragoman.types import LARK_LINE, ConstraintSource, Job, SourceForm

UNSUPPORTED = frozenset({"typical_p"})
_PLAIN: tuple[SourceForm, ...] = ("json_schema", "regex", "choice")
_SOURCES: Mapping[str, tuple[SourceForm, ...]] = {
    "guidance": ("lark",),
    "xgrammar": (*_PLAIN, "gbnf", "structural_tag"),
    # It tries xgrammar first.
    "auto": (*_PLAIN, "gbnf", "structural_tag"),
}


def sources_of(llm: Any) -> tuple[SourceForm, ...]:
    """Only llguidance reads our grammars; other backends get what the client sent, where that is enough.

    Calls that are forced or strict are more than that: xgrammar has its tags for them.
    """
    backend = str(llm.vllm_config.structured_outputs_config.backend)
    return _SOURCES.get(backend, _PLAIN)


def sampling_params(job: Job, ends: frozenset[int]) -> Any:
    """vLLM's SamplingParams of the first continuation. Text is ours: nothing is detokenized there."""
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
        # vLLM knows one end of its own; the model may have several.
        stop_token_ids=sorted(asked.stop_token_ids if asked.ignore_eos else asked.stop_token_ids | ends),
        ignore_eos=asked.ignore_eos,
        logit_bias=dict(asked.logit_bias) or None,
        allowed_token_ids=None if asked.allowed_token_ids is None else list(asked.allowed_token_ids),
        logprobs=asked.logprobs,
        prompt_logprobs=asked.prompt_logprobs,
        structured_outputs=None if source is None else _structured(source),
        skip_reading_prefix_cache=None if job.reuse_prefix else True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        skip_clone=True,
    )
    if asked.bad_words:
        # As texts they would be tokenized once more; these are the ids that vLLM makes of them.
        params._bad_words_token_ids = [list(word) for word in asked.bad_words]
    return params


def sibling(params: Any, index: int) -> Any:
    """The parameters of another continuation: with a seed of its own, and nothing about the prompt."""
    other = copy(params)
    if other.seed is not None:
        other.seed = seed_of(other.seed, index)
    other.prompt_logprobs = None
    return other


def _structured(source: ConstraintSource) -> Any:
    from vllm.sampling_params import StructuredOutputsParams

    match source.form:
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
    """Ids as vLLM takes them."""
    prompt: dict[str, Any] = {"type": "token", "prompt_token_ids": list(ids)}
    return prompt | {"cache_salt": salt} if salt else prompt


def adapter_requests(adapters: Mapping[str, str]) -> dict[str, Any]:
    from vllm.lora.request import LoRARequest

    return {
        name: LoRARequest(lora_name=name, lora_int_id=number, lora_path=folder)
        for number, (name, folder) in enumerate(adapters.items(), 1)
    }
