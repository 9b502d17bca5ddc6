"""Fields of other servers and clients: the meaning of each, or that it has no effect, or why it is rejected.

They are checked only if a body does not parse as it is. A name listed here is never treated as a typo.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import msgspec

from dragoman.api.request_decoder import CompatFields, Members

Meaning: TypeAlias = Callable[[Any, Members], Mapping[str, Any]]

RENAMED: Mapping[str, str] = {
    other: own
    for own, others in {
        "max_tokens": "max_new_tokens n_predict num_predict max_length max_gen_tokens max_tokens_to_sample",
        "min_tokens": "min_new_tokens min_length",
        "temperature": "temp",
        "typical_p": "typ_p",
        "tfs": "tfs_z",
        "top_n_sigma": "nsigma",
        "min_temp": "dynatemp_low",
        "max_temp": "dynatemp_high",
        "repetition_penalty": "repeat_penalty rep_pen",
        "penalty_last_n": "penalty_range repetition_range repetition_penalty_range rep_pen_range",
        "seed": "random_seed sampling_seed sampler_seed",
        "stop": "stop_sequence stop_sequences stopping_strings custom_stopping_strings",
        "ignore_eos": "ban_eos_token",
        "allowed_token_ids": "allowed_tokens",
        "cache_salt": "extra_key",
        "return_token_ids": "return_tokens return_prompt_token_ids",
    }.items()
    for other in others.split()
}
"""Other names for fields of all generating requests."""

HARMLESS_BY_REASON: Mapping[str, str] = {
    "how the model is loaded": "keep_alive num_ctx n_ctx max_seq_len truncation_length num_keep n_keep"
    " n_discard num_batch num_gpu main_gpu low_vram num_thread use_mmap use_mlock numa f16_kv vocab_only"
    " slot_id generate_window backend_sampling data_parallel_rank routed_dp_rank logits_all embedding_only"
    " penalize_newline",
    "how the answer is computed, without effect on its text": "speculative_ngram speculative.n_min"
    " speculative.n_max speculative.p_min guided_decoding_backend",
    "which of several services to call, and how": "provider providers models route transforms"
    " custom_llm_provider api_type api_version api_server legacy_api num_retries max_retries"
    " extra_query caching cache cache_control session_id conversation_id chat_id trace_id mode",
    "extra information beside the answer": "detokenize timings_per_token return_progress return_meta_info"
    " return_cached_tokens_details return_timing response_fields details decoder_input_details custom_labels"
    " reasoning_summary",
    "no effect alone": "dynamic_temperature early_stopping post_sampling_probs",
}
HARMLESS = frozenset(name for names in HARMLESS_BY_REASON.values() for name in names.split())


_MESSAGES = (
    "parsed type object stop_reason finish_reason token_ids logprobs index metadata timestamp created"
    " createdAt created_at updatedAt is_error status cache_control signature reasoning_signature"
    " reasoning_opaque encrypted_content response_metadata additional_kwargs usage model provider"
    " providerOptions providerMetadata experimental_providerMetadata"
)
ECHOED_IN_MESSAGES = frozenset(_MESSAGES.split())
"""Fields that servers and clients add to messages that they send back; none is part of a prompt."""
ECHOED_IN_CALLS = frozenset(
    {"parsed_arguments", "extra_content", "provider_specific_fields", "cache_control", "caller", "index"}
)

_NOT_OFFERED = "the server does not have this sampler; leave it out"
_TEXT_ONLY = "send images and audio as content parts of a message"
_OURS = "only the server's settings choose its code, parsers and upstreams"
_WHOM = "api_base base_url api_key user_config extra_headers upstream"
_HOSTED = "it belongs to a hosted service"
_TEMPLATES = "templates come only from the model or the server's settings"

REFUSED: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    **{
        name: (_NOT_OFFERED, off)
        for name, off in {
            "cfg_scale": (1,),
            "guidance_scale": (1,),
            "negative_prompt": (),
            "token_healing": (),
            "repetition_decay": (),
            "rep_pen_slope": (1,),
            "encoder_repetition_penalty": (1,),
            "no_repeat_ngram_size": (),
            "penalty_alpha": (),
            "epsilon_cutoff": (),
            "eta_cutoff": (),
            "num_beams": (1,),
            "num_beam_groups": (1,),
            "diversity_penalty": (),
            "watermark": (),
            "min_keep": (1,),
            "banned_strings": (),
            "stop_regex": (),
            "t_max_predict_ms": (-1,),
            "t_max_prompt_ms": (-1,),
            "logits_processors": (),
            "custom_logit_processor": (),
        }.items()
    },
    **{
        name: (reason, ())
        for reason, names in {
            "send it in response_format": "response_schema",
            "the server determines the whitespace of constrained JSON": "guided_whitespace_pattern",
            _TEXT_ONLY: "audio prompt_embeds input_embeds images image_data",
            _OURS: "chat_parser tool_parser trust_remote_code " + _WHOM,
            _HOSTED: "web_search_options moderation plugins search_parameters",
            _TEMPLATES: "chat_template prompt_template instruction_template tool_prompt",
            "the server does not return it": "return_hidden_states return_routed_experts",
            "request log probabilities with logprobs": "n_probs",
            "the server adds nothing to a prompt": "safe_prompt",
            "send it as a message of the role system": "system",
        }.items()
        for name in names.split()
    },
    **{
        name: (reason, ({},))
        for reason, names in {
            _TEXT_ONLY: "mm_processor_kwargs media_io_kwargs multi_modal_data",
            "engine-specific fields are not forwarded": "vllm_xargs custom_params kv_transfer_params"
            " session_params bootstrap_host bootstrap_port bootstrap_room",
        }.items()
        for name in names.split()
    },
}
"""The reason for rejecting each field, and the values, beside null, false, 0 and empty ones, that mean unset.
"""


CHANGED: Mapping[str, str] = {
    "do_sample": "false is a `temperature` of 0",
    "repeat_last_n": "`penalty_last_n`; 0 turns penalties off",
    "thinking": "`enable_thinking` by its `type`, and `budget_tokens` as `thinking_token_budget`",
    "think": "`enable_thinking`, or `reasoning_effort` if it is a string",
    "reasoning_effort": "`default` and `auto` are unset",
    "preserve_thinking": "a variable of the chat template, as is `clear_thinking`",
    "lora_path": "`lora`, as is `adapter_id`",
    "format": "`guided_json`; `json` is any object",
    "banned_tokens": "`logit_bias` of -100 for each, as is `custom_token_bans`",
    "usage": "`include`: a stream has the usage in its last chunk",
    "options": "its members count as fields of the request, as with `extra_body`",
    "max_output_tokens": "`max_tokens`; in Responses all names of that are `max_output_tokens`",
    "add_bos_token": "completions: `add_special_tokens`; otherwise without effect",
    "return_full_text": "completions: `echo`",
}
"""For the documentation: fields whose meaning is more than another name."""
WRAPPING = frozenset({"options", "extra_body"})
"""Objects whose members count as fields of the request: Ollama's `options`, and the SDK's `extra_body`, which
some clients send literally."""
OVERRULES = frozenset({"do_sample", "repeat_last_n"})


def _rename(own: str) -> Meaning:
    return lambda value, members: {own: value}


def _longest(own: str) -> Meaning:
    """Convert a token limit; values below 0 mean none."""
    return lambda value, members: {own: max(value, -1) if isinstance(value, int | float) else value}


def _sample(value: Any, members: Members) -> Mapping[str, Any]:
    return {} if value in (True, "true") else {"temperature": 0}


def _recent(value: Any, members: Members) -> Mapping[str, Any]:
    """Convert llama.cpp's window of recent tokens: 0 looks at none, so penalties have no effect."""
    if value != 0 or value is False:
        return {"penalty_last_n": value}
    return {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}


def _think(value: Any, members: Members) -> Mapping[str, Any]:
    """Read `{"type": "enabled", "budget_tokens": 1024}`, `true`, or `"high"`."""
    if isinstance(value, str):
        return _effort(value, members)
    if not isinstance(value, dict):
        return {"enable_thinking": value}
    known = {"enabled": True, "disabled": False}
    fields: dict[str, Any] = {"enable_thinking": known.get(value.get("type", ""))}
    fields["thinking_token_budget"] = value.get("budget_tokens") if fields["enable_thinking"] else None
    kwargs = {name: value[name] for name in ("clear_thinking",) if value.get(name) is not None}
    return {**fields, "chat_template_kwargs": kwargs or None}


def _effort(value: Any, members: Members) -> Mapping[str, Any]:
    if value in ("default", "auto", ""):
        return {}
    return {"reasoning_effort": "none" if value in (False, "off", "disable", "disabled") else value}


def _reasoning(value: Any, members: Members) -> Mapping[str, Any]:
    """Read our own object, or what other servers have there: an effort, or whether to reason."""
    if isinstance(value, dict):
        if value.get("effort") in ("default", "auto", ""):
            value = {key: inner for key, inner in value.items() if key != "effort"}
        return {"reasoning": value}
    return _effort(value, members) if isinstance(value, str) else {"enable_thinking": value}


def _usage(value: Any, members: Members) -> Mapping[str, Any]:
    """Convert OpenRouter's `usage`; a non-streaming reply has the usage anyway."""
    wanted = isinstance(value, dict) and value.get("include") and _is_true(members, "stream")
    return {"stream_options": {"include_usage": True}} if wanted and "stream_options" not in members else {}


def _is_true(members: Members, name: str) -> bool:
    return bytes(members[name]).strip() == b"true" if name in members else False


def _format(value: Any, members: Members) -> Mapping[str, Any]:
    """Convert Ollama's `"json"`, or a schema."""
    if value in ("json", ""):
        return {"structured_outputs": {"json_object": True}} if value else {}
    return {"guided_json": value}


def _banned(value: Any, members: Members) -> Mapping[str, Any]:
    """Read `[5, 7]` or `"5,7"`."""
    ids = value.replace(" ", "").split(",") if isinstance(value, str) else value
    if not isinstance(ids, list):
        return {"logit_bias": value}
    return {"logit_bias": {str(id_): -100 for id_ in ids if id_ != ""}}


def _bias(value: Any, members: Members) -> Mapping[str, Any]:
    """Convert llama.cpp's `[[5, -1.0], [7, false]]`, where false forbids the token."""
    if not isinstance(value, list):
        return {"logit_bias": value or None}
    pairs = [pair for pair in value if isinstance(pair, list) and len(pair) == 2]
    if len(pairs) < len(value):
        return {"logit_bias": value}
    return {"logit_bias": {str(id_): -100 if bias is False else bias for id_, bias in pairs}}


def _texts(own: str) -> Meaning:
    """Read a list, its JSON as a string, or comma-separated texts."""

    def meaning(value: Any, members: Members) -> Mapping[str, Any]:
        if not isinstance(value, str):
            return {own: value}
        try:
            return {own: msgspec.json.decode(value, type=list[str])}
        except msgspec.DecodeError:
            return {own: [text for text in value.split(",") if text]}

    return meaning


def _adapter(value: Any, members: Members) -> Mapping[str, Any]:
    """Convert SGLang's adapter path, or its list with one per prompt."""
    if isinstance(value, list):
        named = [path for path in value if path is not None]
        value = named[0] if len(set(map(str, named))) == 1 else value if named else None
    return {"lora": value or None}


def _unless_empty(own: str) -> Meaning:
    return lambda value, members: {own: value or None}


def _into_template(name: str) -> Meaning:
    return lambda value, members: {"chat_template_kwargs": {name: value}}


def _unless_false(own: str) -> Meaning:
    return lambda value, members: {own: None if value is False else value}


def _ask_model(longest: str) -> dict[str, Meaning]:
    return {
        **{other: _rename(own) for other, own in RENAMED.items()},
        **{other: _longest(longest) for other, own in RENAMED.items() if own == "max_tokens"},
        "stopping_strings": _texts("stop"),
        "custom_stopping_strings": _texts("stop"),
        "allowed_tokens": _unless_empty("allowed_token_ids"),
        "allowed_token_ids": _unless_empty("allowed_token_ids"),
        "guided_choice": _unless_empty("guided_choice"),
        "dry_sequence_breakers": _texts("dry_sequence_breakers"),
        "do_sample": _sample,
        "repeat_last_n": _recent,
        "usage": _usage,
        "format": _format,
        "banned_tokens": _banned,
        "custom_token_bans": _banned,
        "logit_bias": _bias,
        "lora_path": _adapter,
        "adapter_id": _adapter,
    }


_CONVERSING: Mapping[str, Meaning] = {
    "thinking": _think,
    "think": _think,
    "reasoning": _reasoning,
    "reasoning_effort": _effort,
    "preserve_thinking": _into_template("preserve_thinking"),
    "clear_thinking": _into_template("clear_thinking"),
}

CHAT = CompatFields(
    aliases={**_ask_model("max_tokens"), **_CONVERSING, "max_output_tokens": _longest("max_tokens")},
    no_effect=HARMLESS | {"add_bos_token"},
    refused={
        **REFUSED,
        "best_of": ("chat completions return all n answers; leave it out", (1,)),
        "prompt": ("send messages", ()),
        "input": ("send messages", ()),
        "suffix": ("it is a field of completions", ()),
    },
    wrapping=WRAPPING,
    overrules=OVERRULES,
)
COMPLETIONS = CompatFields(
    aliases={
        **_ask_model("max_tokens"),
        "max_completion_tokens": _longest("max_tokens"),
        "max_output_tokens": _longest("max_tokens"),
        "add_bos_token": _rename("add_special_tokens"),
        "return_full_text": _rename("echo"),
        "logprobs": _unless_false("logprobs"),
    },
    no_effect=HARMLESS,
    refused={
        **REFUSED,
        "messages": ("send a prompt, or use /v1/chat/completions", ()),
        "input": ("send a prompt", ()),
        "tools": ("use /v1/chat/completions", ()),
        "functions": ("use /v1/chat/completions", ()),
        "tool_choice": ("use /v1/chat/completions", ("auto", "none")),
    },
    wrapping=WRAPPING,
    overrules=OVERRULES,
)
RESPONSES = CompatFields(
    aliases={
        **_ask_model("max_output_tokens"),
        **_CONVERSING,
        "max_completion_tokens": _longest("max_output_tokens"),
    },
    no_effect=HARMLESS | {"add_bos_token"},
    refused={
        **REFUSED,
        "response_schema": ("send it in text.format", ()),
        "best_of": ("a response is one answer; leave it out", (1,)),
        "messages": ("send input", ()),
        "functions": ("send tools", ()),
    },
    wrapping=WRAPPING,
    overrules=OVERRULES,
)
MESSAGES = CompatFields(
    aliases={
        name: meaning
        for name, meaning in {**_ask_model("max_tokens"), **_CONVERSING}.items()
        if name not in ("stop_sequences", "thinking")
    },
    no_effect=HARMLESS | {"add_bos_token"},
    refused={
        **{name: why for name, why in REFUSED.items() if name != "system"},
        "container": (_HOSTED, ()),
        **dict.fromkeys(("logprobs", "top_logprobs"), ("a message has no log probabilities", ())),
        "best_of": ("a message is one answer; leave it out", (1,)),
        "prompt": ("send messages", ()),
        "input": ("send messages", ()),
        "functions": ("send tools", ()),
    },
    wrapping=WRAPPING,
    overrules=OVERRULES,
)
_VECTORS = "priority request_id rid keep_alive options provider input_type task service_tier metadata"
VECTORS = CompatFields(
    no_effect=frozenset(_VECTORS.split()),
    refused={
        "normalize": ("vectors are always normalized", (True,)),
        "truncate": ("texts over the limit are rejected, never truncated", ("NONE",)),
        "truncate_prompt_tokens": ("texts over the limit are rejected, never truncated", ()),
        "add_special_tokens": ("special tokens of the model are always added", (True,)),
        "messages": ("send texts", ()),
        "instruction": ("write it into the texts", ()),
        "max_tokens_per_doc": ("texts over the limit are rejected, never truncated", ()),
        "max_chunks_per_doc": ("texts over the limit are rejected, never truncated", ()),
        "rank_fields": ("documents consist of text only", ()),
        **dict.fromkeys(_WHOM.split(), (_OURS, ())),
    },
)
_CUT = "conversations are never truncated; shorten the conversation"
OLLAMA = CompatFields(
    aliases=CHAT.aliases,
    no_effect=CHAT.no_effect | {"width", "height", "steps"},
    refused={
        **CHAT.refused,
        "template": (_TEMPLATES, ()),
        "truncate": (_CUT, (True,)),
        "shift": ("an answer ends when the context is full", (True,)),
        "_debug_render_only": ("use /v1/chat/completions/render", ()),
    },
    wrapping=WRAPPING,
    overrules=OVERRULES,
)
OLLAMA_VECTORS = CompatFields(no_effect=VECTORS.no_effect, refused=dict.fromkeys(_WHOM.split(), (_OURS, ())))
