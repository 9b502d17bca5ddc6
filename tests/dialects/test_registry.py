"""Dialects by name. A person who comes from another server may use the name that it had there."""

from collections import defaultdict

import pytest

from dragoman.dialects.parser import parse
from dragoman.dialects.registry import get_dialect, list_dialects
from dragoman.errors import SettingsError

# Our name, and what others call it.
VLLM = {
    "hermes": "hermes",
    "granite4": "granite4",
    "ernie45": "ernie45",
    "longcat": "longcat",
    "xlam": "xlam",
    "llama3_json": "llama3_json llama4_json",
    "mistral": "mistral",
    "phi4_mini_json": "phi4_mini_json",
    "granite": "granite",
    "granite_20b_fc": "granite-20b-fc",
    "hunyuan_a13b": "hunyuan_a13b",
    "jamba": "jamba",
    "internlm": "internlm",
    "gigachat3": "gigachat3",
    "cohere_command3": "cohere_command3",
    "cohere_command4": "cohere_command4",
    "apertus": "apertus",
    "inkling": "inkling",
    "deepseek_v3": "deepseek_v3",
    "deepseek_v31": "deepseek_v31",
    "deepseek_v32": "deepseek_v32",
    "deepseek_v4": "deepseek_v4",
    "deepseek_r1": "deepseek_r1",
    "kimi_k2": "kimi_k2",
    "kimi_k3": "kimi_k3",
    "harmony": "openai openai_gptoss",
    "qwen3": "qwen3",
    "qwen3_coder": "qwen3_coder qwen3_xml mimo",
    "step3": "step3",
    "step3p5": "step3p5",
    "nemotron_v3": "nemotron_v3",
    "seed_oss": "seed_oss",
    "glm45": "glm45",
    "glm47": "glm47",
    "ling3": "ling3",
    "poolside_v1": "poolside_v1",
    "hy_v3": "hy_v3",
    "minimax_m2": "minimax_m2",
    "minimax_m2_append_think": "minimax_m2_append_think",
    "minimax_m3": "minimax_m3",
    "dots": "dots",
    "muse_glimmer": "muse_glimmer",
    "minicpm5": "minicpm5",
    "pythonic": "pythonic",
    "llama4_pythonic": "llama4_pythonic",
    "olmo3": "olmo3",
    "lfm2": "lfm2",
    "gemma4": "gemma4",
    "functiongemma": "functiongemma",
    "holo2": "holo2",
}
SGLANG = {
    "hermes": "hermes qwen qwen25 trinity",
    "llama3_json": "llama3",
    "mistral": "mistral",
    "internlm": "interns1",
    "gigachat3": "gigachat3",
    "cohere_command4": "cohere_command4",
    "apertus": "apertus2509",
    "inkling": "inkling",
    "deepseek_v3": "deepseekv3 deepseek-v3",
    "deepseek_v31": "deepseekv31",
    "deepseek_v32": "deepseekv32",
    "deepseek_v4": "deepseekv4 deepseek-v4",
    "deepseek_r1": "deepseek-r1",
    "kimi_k2": "kimi_k2",
    "kimi_k3": "kimi_k3",
    "kimi": "kimi",
    "harmony": "gpt-oss",
    "qwen3": "qwen3",
    "qwen3_thinking": "qwen3-thinking",
    "qwen3_coder": "qwen3_coder mimo",
    "step3": "step3",
    "step3p5": "step3p5",
    "nemotron_v3": "nemotron_3",
    "glm45": "glm glm45",
    "glm47": "glm47",
    "poolside_v1": "poolside_v1",
    "hy_v3": "hunyuan",
    "minimax_m2": "minimax-m2 minimax",
    "minimax_m2_append_think": "minimax-append-think",
    "minimax_m3": "minimax-m3",
    "dots": "dots",
    "muse_glimmer": "muse",
    "minicpm5": "minicpm5",
    "pythonic": "pythonic",
    "lfm2": "lfm2",
    "gemma4": "gemma4",
}
SMG = {
    "hermes": "qwen qwen2.5",
    "qwen3": "qwen3 base",
    "qwen3_thinking": "qwen3_thinking",
    "json": "json",
    "xlam": "xlam",
    "llama3_json": "llama",
    "mistral": "mistral",
    "mistral_v13": "mistral_v13",
    "nemotron_v2": "llama_nemotron",
    "nemotron_v3": "nemotron nano_v3",
    "cohere_command3": "cohere cohere_cmd",
    "sarashina": "sarashina",
    "inkling": "inkling",
    "deepseek_v3": "deepseek",
    "deepseek_v31": "deepseek31 deepseek_v31",
    "deepseek_v32": "deepseek32",
    "deepseek_v4": "deepseek_v4",
    "deepseek_v41": "deepseek_v41 deepseek_v4.1",
    "deepseek_r1": "deepseek_r1",
    "kimi": "kimi",
    "kimi_k2": "kimik2 kimi_k25 kimi_thinking",
    "kimi_k3": "kimi_k3",
    "qwen3_coder": "qwen_xml qwen_coder qwen3_tagged qwen3_tagged_direct",
    "seed_oss": "seed_oss",
    "glm45": "glm45_moe glm glm4 glm45",
    "glm47": "glm47_moe",
    "ling3": "ling",
    "iquest": "iquest",
    "k2_horizon": "k2_horizon",
    "hy_v4": "hy_v4 hy4",
    "minimax_m2": "minimax_m2 minimax",
    "minimax_m3": "minimax_m3",
    "dots": "dots3",
    "minicpm5": "minicpm5",
    "step3": "step3",
    "pythonic": "pythonic",
    "olmo3": "olmo3",
    "lfm2": "lfm2.5",
    "gemma4": "gemma4",
    "functiongemma": "function_gemma",
    "plain": "passthrough plain",
}
TABBY = {
    "mistral_v3": "mistral_old",
    "mistral": "mistral",
    "harmony": "harmony",
    "qwen3_coder": "qwen3_coder qwen3_5",
    "step3p5": "step3_5 step3_7",
    "deepseek_v4": "deepseek_v4 dsv4",
    "glm45": "glm4_5 glm4_6",
    "glm47": "glm4_7",
    "poolside_v1": "laguna poolside_v1",
    "hy_v3": "hy3 hy_v3",
    "minimax_m2": "minimax_m2 minimax_m2_1 minimax_m2_5",
    "muse_glimmer": "muse_glimmer glimmer",
    "gemma4": "gemma4",
}
SERVERS = {"vllm": VLLM, "sglang": SGLANG, "smg": SMG, "tabby": TABBY}
FOREIGN = [
    (server, name, ours)
    for server, names in SERVERS.items()
    for ours, theirs in names.items()
    for name in theirs.split()
]


@pytest.mark.parametrize(("server", "name", "ours"), FOREIGN)
def test_the_names_of_other_servers_are_known(server: str, name: str, ours: str) -> None:
    assert get_dialect(name).name == ours


@pytest.mark.parametrize("name", ["DEEPSEEK_V31", "deepseek-v31", "DeepSeek.v31"])
def test_case_dashes_and_dots_do_not_matter(name: str) -> None:
    assert get_dialect(name).name == "deepseek_v31"


def test_no_two_dialects_claim_one_name() -> None:
    claimed: dict[str, set[str]] = defaultdict(set)
    for dialect in list_dialects().values():
        for name in (dialect.name, *dialect.aliases):
            claimed[name.lower().replace("-", "_").replace(".", "_")].add(dialect.name)
    assert not {name: claims for name, claims in claimed.items() if len(claims) > 1}


def test_names_are_sorted_for_people() -> None:
    assert list(list_dialects()) == sorted(list_dialects())


def test_an_unknown_name_fails_with_the_list() -> None:
    with pytest.raises(SettingsError) as caught:
        get_dialect("klingon")
    assert all(name in str(caught.value) for name in list_dialects())


def test_a_name_that_is_almost_right_gets_a_hint() -> None:
    with pytest.raises(SettingsError, match="Did you mean 'qwen3_coder'"):
        get_dialect("qwen3_codr")


def test_a_name_that_is_like_nothing_gets_no_hint() -> None:
    with pytest.raises(SettingsError) as caught:
        get_dialect("zzzzzzzz")
    assert "Did you mean" not in str(caught.value)


def test_an_unknown_name_fails_before_anything_is_read() -> None:
    with pytest.raises(SettingsError):
        parse("Hello", "klingon")
