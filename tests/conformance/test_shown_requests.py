"""Requests as the documents and examples of other servers show them, and samplers at values that are off.

Programs that were written for vLLM, SGLang, llama-server, TabbyAPI or a gateway before them send these.
"""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from dragoman.http.server import background
from dragoman.settings import Settings
from tests.clients import cases
from tests.clients.model import model
from tests.support.http import stream

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "weather"}}
LARK = 'start: "Blue" "."'
GBNF = 'root ::= "Blue" "."'
TAG = {"begin": "<function=weather>", "schema": SCHEMA, "end": "</function>"}
ASK = [{"role": "user", "content": cases.NAME_A_COLOUR}]
HOW_WARM = [{"role": "user", "content": cases.HOW_WARM}]

VLLM: dict[str, dict[str, Any]] = {
    "choice": {"guided_choice": ["Blue.", "Red."]},
    "regex": {"guided_regex": r"[A-Z]\w+\.", "stop": ["\n"]},
    "json": {"guided_json": SCHEMA, "guided_decoding_backend": "xgrammar"},
    "grammar": {"guided_grammar": LARK},
    "structured choice": {"structured_outputs": {"choice": ["Blue.", "Red."]}},
    "structured regex": {"structured_outputs": {"regex": r"\w+\."}},
    "structured json": {"structured_outputs": {"json": SCHEMA}},
    "structured grammar": {"structured_outputs": {"grammar": LARK}},
    "structural tag": {
        "response_format": {"type": "structural_tag", "structures": [TAG], "triggers": ["<function="]}
    },
    "thinking": {"chat_template_kwargs": {"enable_thinking": False}, "include_reasoning": True},
    "continue": {
        "messages": [*ASK, {"role": "assistant", "content": "Bl"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "sampling": {
        "best_of": 1,
        "use_beam_search": False,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "length_penalty": 1.0,
        "stop_token_ids": [],
        "include_stop_str_in_output": False,
        "ignore_eos": False,
        "min_tokens": 0,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "truncate_prompt_tokens": None,
        "prompt_logprobs": None,
        "allowed_token_ids": None,
        "bad_words": [],
        "priority": 0,
        "echo": False,
        "add_special_tokens": False,
        "documents": None,
        "chat_template": None,
        "mm_processor_kwargs": None,
        "guided_whitespace_pattern": None,
        "logits_processors": None,
        "return_tokens_as_token_ids": None,
        "kv_transfer_params": None,
        "vllm_xargs": None,
        "cache_salt": None,
    },
    "token ids": {"return_token_ids": True, "logprobs": True, "top_logprobs": 0},
}
SGLANG: dict[str, dict[str, Any]] = {
    "reasoning": {"separate_reasoning": True, "stream_reasoning": False},
    "thinking": {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}},
    "regex": {"regex": r"\w+\."},
    "ebnf": {"ebnf": GBNF},
    "structural tag": {
        "response_format": {
            "type": "structural_tag",
            "format": {
                "type": "triggered_tags",
                "triggers": ["<function="],
                "tags": [
                    {
                        "begin": "<function=weather>",
                        "content": {"type": "json_schema", "json_schema": SCHEMA},
                        "end": "</function>",
                    }
                ],
            },
        }
    },
    "sampling": {
        "top_k": -1,
        "min_p": 0,
        "min_tokens": 0,
        "repetition_penalty": 1.0,
        "stop_token_ids": None,
        "no_stop_trim": False,
        "ignore_eos": False,
        "continue_final_message": False,
        "skip_special_tokens": True,
        "lora_path": None,
        "session_params": None,
        "return_hidden_states": False,
        "rid": "request-1",
        "logit_bias": None,
        "custom_logit_processor": None,
    },
}
LLAMA: dict[str, dict[str, Any]] = {
    "object of a schema": {"response_format": {"type": "json_object", "schema": SCHEMA}},
    "schema": {"response_format": {"type": "json_schema", "schema": SCHEMA}},
    "grammar": {"grammar": GBNF},
    "json_schema": {"json_schema": SCHEMA},
    "reasoning": {
        "reasoning_format": "auto",
        "chat_template_kwargs": {"enable_thinking": False},
        "parse_tool_calls": True,
    },
    "sampling": {
        "n_predict": 16,
        "cache_prompt": True,
        "id_slot": -1,
        "timings_per_token": False,
        "dynatemp_range": 0.0,
        "dynatemp_exponent": 1.0,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.05,
        "typical_p": 1.0,
        "xtc_probability": 0.0,
        "xtc_threshold": 0.1,
        "top_n_sigma": -1.0,
        "repeat_last_n": 64,
        "repeat_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "dry_multiplier": 0.0,
        "dry_base": 1.75,
        "dry_allowed_length": 2,
        "dry_penalty_last_n": -1,
        "mirostat": 0,
        "mirostat_tau": 5.0,
        "mirostat_eta": 0.1,
        "n_keep": 0,
        "n_probs": 0,
        "min_keep": 0,
        "t_max_predict_ms": 0,
        "logit_bias": [],
        "return_tokens": False,
        "lora": [],
    },
}
TABBY: dict[str, dict[str, Any]] = {
    "grammar": {"grammar_string": 'start ::= colour ".";\ncolour ::= "Blue" | "Red";\n'},
    "regex": {"regex_pattern": r"[A-Z][a-z]+\."},
    "json_schema": {"json_schema": SCHEMA},
    "no stream": {"stream_options": {"include_usage": True}, "n": 2, "logprobs": True, "top_logprobs": 5},
    "thinking": {"template_vars": {"enable_thinking": False}},
    "sampling": {
        "max_tokens": 16,
        "min_tokens": 0,
        "generate_window": 512,
        "token_healing": False,
        "temperature": 1.0,
        "temperature_last": False,
        "smoothing_factor": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "top_a": 0.0,
        "min_p": 0.0,
        "tfs": 1.0,
        "typical": 1.0,
        "skew": 0.0,
        "xtc_probability": 0.0,
        "xtc_threshold": 0.1,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "penalty_range": -1,
        "repetition_decay": 0,
        "dry_multiplier": 0.0,
        "dry_base": 0.0,
        "dry_allowed_length": 0,
        "dry_range": 0,
        "dry_sequence_breakers": [],
        "mirostat_mode": 0,
        "mirostat_tau": 1.5,
        "mirostat_eta": 0.3,
        "add_bos_token": True,
        "ban_eos_token": False,
        "skip_special_tokens": True,
        "logit_bias": None,
        "negative_prompt": None,
        "json_schema": None,
        "regex_pattern": None,
        "grammar_string": None,
        "speculative_ngram": None,
        "cfg_scale": 1.0,
        "max_temp": 1.0,
        "min_temp": 1.0,
        "temp_exponent": 1.0,
        "banned_tokens": [],
        "banned_strings": [],
        "allowed_tokens": [],
        "logprobs": 0,
    },
}
GATEWAY: dict[str, dict[str, Any]] = {
    "its own fields": {
        "max_completion_tokens": 16,
        "stream_options": None,
        "separate_reasoning": True,
        "stream_reasoning": True,
        "chat_template_kwargs": None,
        "return_hidden_states": False,
        "no_stop_trim": False,
        "ignore_eos": False,
        "continue_final_message": False,
        "skip_special_tokens": True,
        "session_params": None,
        "lora_path": None,
        "sampling_seed": None,
        "tool_choice": "auto",
    }
}
SHOWN = {"vllm": VLLM, "sglang": SGLANG, "llama": LLAMA, "tabby": TABBY, "gateway": GATEWAY}
CHAT = [
    pytest.param(body, id=f"{server}-{name}")
    for server, shown in SHOWN.items()
    for name, body in shown.items()
]


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with (
        background(model(), Settings(port=0, store="memory")) as url,
        httpx.Client(base_url=url) as result,
    ):
        yield result


@pytest.mark.parametrize("body", CHAT)
def test_chat(client: httpx.Client, body: dict[str, Any]) -> None:
    answer = client.post("/v1/chat/completions", json={"model": cases.MODEL, "messages": ASK, **body})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"]


def test_what_has_no_effect_is_named(client: httpx.Client) -> None:
    asked = {"messages": ASK, "stream_options": {"include_usage": True}, "stream_reasoning": False}
    answer = client.post("/v1/chat/completions", json=asked)
    assert answer.headers["x-dragoman-ignored"] == "stream_options, stream_reasoning"


def test_reasoning_is_read_without_asking_whether_it_is_there(client: httpx.Client) -> None:
    [choice] = client.post("/v1/chat/completions", json={"messages": ASK}).json()["choices"]
    assert (choice["message"]["reasoning"], choice["message"]["reasoning_content"]) == (None, None)


def test_programs_for_sglang_read_it_off_each_delta(client: httpx.Client) -> None:
    asked = {"messages": ASK, "separate_reasoning": True}
    chunks = stream(str(client.base_url), "/v1/chat/completions", asked)
    assert all("reasoning_content" in chunk["choices"][0]["delta"] for chunk in chunks)


def test_programs_for_vllm_look_whether_it_is_there(client: httpx.Client) -> None:
    chunks = stream(str(client.base_url), "/v1/chat/completions", {"messages": ASK})
    assert not any("reasoning_content" in chunk["choices"][0]["delta"] for chunk in chunks)


def test_the_address_of_any_interface_is_this_machine(client: httpx.Client) -> None:
    assert client.get("/v1/models", headers={"host": "0.0.0.0:8000"}).status_code == 200


@pytest.mark.parametrize(
    "body",
    [SGLANG["sampling"], LLAMA["sampling"], TABBY["sampling"], TABBY["grammar"], TABBY["regex"]],
)
def test_completions(client: httpx.Client, body: dict[str, Any]) -> None:
    unknown = ("continue_final_message",)
    fields = {name: value for name, value in body.items() if name not in unknown}
    answer = client.post("/v1/completions", json={"prompt": cases.NAME_A_COLOUR, **fields})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == cases.COLOUR


def test_a_prompt_and_no_answer(client: httpx.Client) -> None:
    """How the log probabilities of a text are asked for."""
    asked = {"prompt": "The sky is blue.", "max_tokens": 0, "echo": True, "logprobs": 1}
    [choice] = client.post("/v1/completions", json=asked).json()["choices"]
    assert choice["text"] == "The sky is blue."
    assert len(choice["logprobs"]["token_logprobs"]) == len("The sky is blue.")


def test_calls_that_are_forced(client: httpx.Client) -> None:
    for choice in ("required", NAMED):
        asked = {"messages": HOW_WARM, "tools": [WEATHER], "tool_choice": choice}
        [result] = client.post("/v1/chat/completions", json=asked).json()["choices"]
        assert result["message"]["tool_calls"][0]["function"]["name"] == "weather"
