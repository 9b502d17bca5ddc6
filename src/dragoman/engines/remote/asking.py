"""From a job to a completions request."""

from typing import Any

import msgspec

from dragoman.client.request import Request, completions
from dragoman.engines.protocol import Tokenizer
from dragoman.engines.remote.traits import Traits
from dragoman.types import LARK_LINE, ConstraintSource, Job, Sampling


def request_of(job: Job, traits: Traits, tokenizer: Tokenizer) -> Request:
    asked = job.sampling
    fields: dict[str, Any] = {
        "model": job.adapter or traits.model,
        "max_tokens": asked.max_tokens,
        # Said even where it is the usual: some servers have other defaults.
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "presence_penalty": asked.presence_penalty,
        "frequency_penalty": asked.frequency_penalty,
        "logit_bias": {str(id_): bias for id_, bias in asked.logit_bias.items()} or None,
        "seed": asked.seed,
    }
    if traits.gives_ids:
        fields |= {
            "return_token_ids": True,
            "logprobs": asked.logprobs,
            "return_tokens_as_token_ids": None if asked.logprobs is None else True,
        }
    if traits.server != "other":
        fields |= _extended(job, asked)
    if traits.server == "dragoman":
        fields |= {"typical_p": asked.typical_p, "cache_prompt": job.reuse_prefix}
    if traits.server == "vllm" and not asked.ignore_eos:
        # vLLM knows one end of its own; the model may have several.
        fields["stop_token_ids"] = sorted(asked.stop_token_ids | tokenizer.end_ids)
    return completions(job.prompt if traits.takes_ids else _text(job, tokenizer), fields)


def _extended(job: Job, asked: Sampling) -> dict[str, Any]:
    source = job.constraint.source if job.constraint is not None else None
    return {
        "top_k": asked.top_k,
        "min_p": asked.min_p,
        "repetition_penalty": asked.repetition_penalty,
        "min_tokens": asked.min_tokens,
        "ignore_eos": asked.ignore_eos,
        "stop_token_ids": sorted(asked.stop_token_ids) or None,
        "allowed_token_ids": None if asked.allowed_token_ids is None else list(asked.allowed_token_ids),
        # Servers without priorities refuse any but the usual.
        "priority": job.priority or None,
        "cache_salt": job.cache_salt or None,
        "structured_outputs": None if source is None else _structured(source),
    }


def _structured(source: ConstraintSource) -> dict[str, Any]:
    match source.form:
        case "json_schema":
            return {"json": source.text}
        case "choice":
            return {"choice": msgspec.json.decode(source.text, type=list[str])}
        case "gbnf":
            return {"grammar": source.text}
        case "lark":
            # Without the first line, what has a `::=` in it would be taken for GBNF.
            return {"grammar": LARK_LINE + source.text if "::=" in source.text else source.text}
        case "regex" | "structural_tag":
            return {source.form: source.text}


def _text(job: Job, tokenizer: Tokenizer) -> str:
    """The prompt for servers that take text only. They put the first token there themselves."""
    ids = job.prompt[1:] if tokenizer.add_bos and job.prompt[:1] == (tokenizer.bos_id,) else job.prompt
    return b"".join(tokenizer.pieces[id_] for id_ in ids).decode("utf-8", "replace")
