"""The dialect of a model: by its template's markers, by derivation, by its name."""

import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dragoman
from dragoman.dialects.registry import list_dialects, match_name
from dragoman.prompt.find import KNOWN, KNOWN_REASONING, find_dialect, match_template
from tests.prompt.support import SHARED, TEMPLATES

FAMILIES = sorted((TEMPLATES / "families").glob("*.jinja"))
UNSEEN = sorted((TEMPLATES / "unseen").glob("*.jinja"))
PUBLISHED = SHARED / "templates"

# What each published template speaks, read off the template by a person.
TRUTH = {
    "Apertus-8B-Instruct": "apertus",
    "Apriel-1.6-15b-Thinker-fixed": "apriel",
    "ByteDance-Seed-OSS": "seed_oss",
    "Cohere2MoE": "cohere_command4",
    "CohereForAI-c4ai-command-r-plus-tool_use": "cohere_command_r_plus",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": "cohere_command3",
    "GLM-4.6": "glm45",
    "GigaChat3-10B-A1.8B": "gigachat3",
    "GigaChat3.1-10B-A1.8B": "gigachat3",
    "Kimi-K2-Instruct": "kimi_k2",
    "Kimi-K3": "kimi_k3",
    "LFM2-8B-A1B": "lfm2",
    "LFM2.5-Instruct": "lfm2",
    "MiniMax-M1": "minimax_m1",
    "MiniMax-M2": "minimax_m2",
    "MiniMax-M3": "minimax_m3",
    "Mistral-Small-3.2-24B-Instruct-2506": "mistral_v11",
    "NVIDIA-Nemotron-Nano-v2": "nemotron_v2",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": "hermes",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "hermes",
    "Qwen-QwQ-32B": "hermes",
    "Qwen-Qwen2.5-7B-Instruct": "hermes",
    "Qwen-Qwen3-0.6B": "hermes",
    "Qwen3-Coder": "qwen3_coder",
    "Qwen3.5-4B": "qwen3_coder",
    "Reka-Edge": "reka_edge",
    "StepFun3.5-Flash": "step3p5",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": "deepseek_r1_template",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "deepseek_r1_template",
    "deepseek-ai-DeepSeek-V3.1": "deepseek_v31",
    "deepseek-ai-DeepSeek-V3.2": "deepseek_v32",
    "deepseek-ai-DeepSeek-V4": "deepseek_v4",
    "fireworks-ai-llama-3-firefunction-v2": "firefunction_v2",
    "google-gemma-2-2b-it": "plain",
    "google-gemma-4-31B-it": "gemma4",
    "google-gemma-4-31B-it-interleaved": "gemma4",
    "ibm-granite-granite-3.3-2B-Instruct": "granite",
    "ibm-granite-granite-4.0": "granite4",
    "llama-cpp-deepseek-r1": "deepseek_v3",
    # It has no tools, but its prompt opens <think>.
    "llama-cpp-rwkv-world": "qwen3",
    "meetkai-functionary-medium-v3.1": "functionary_v31",
    "meetkai-functionary-medium-v3.2": "functionary_v32",
    "meta-llama-Llama-3.1-8B-Instruct": "llama3_json",
    "meta-llama-Llama-3.2-3B-Instruct": "llama3_json",
    "meta-llama-Llama-3.3-70B-Instruct": "llama3_json",
    "microsoft-Phi-3.5-mini-instruct": "plain",
    "mistralai-Ministral-3-14B-Reasoning-2512": "mistral_v13",
    "mistralai-Mistral-Nemo-Instruct-2407": "mistral_v3",
    "moonshotai-Kimi-K2": "kimi_k2",
    "muse-glimmer": "muse_glimmer",
    "openai-gpt-oss-120b": "harmony",
    "openbmb-MiniCPM5-1B": "minicpm5",
    "poolside-Laguna-S-2.1": "poolside_v1",
    "poolside-Laguna-XS-2.1": "poolside_v1",
    "poolside-Laguna-XS.2": "poolside_v1",
    "tencent-Hy3": "hy_v3",
}

# What templates of families without a published one in the table above say of calls.
EXCERPTS = {
    "cohere_command3": "<|CHATBOT_TOKEN|><|START_THINKING|>",
    "deepseek_v41": "{% set m = '｜DSML｜' %}{{ '<' + m + ' calls>' }}",
    "dots": "<dots_function_call><invoke name=",
    "ernie45": "<tool_call>\\n{...}\\n</tool_call> or <response>\\n...\\n</response>",
    "functiongemma": "<start_function_call>call:f{a:<escape>x<escape>}",
    "granite_20b_fc": "<|function_call_library|> <function_call> {...} no_function",
    "hunyuan_a13b": "<tool_calls>[{...}]</tool_calls><|extra_0|>",
    "hy_v4": "<tool_calls:opensource><tool_call:opensource>f<arg_key:opensource>",
    "inkling": "<|message_model|>f<|content_invoke_tool_json|>",
    "iquest": "<iquest_tool_call>f\\n<arg_key>a</arg_key>",
    "k2_horizon": "<ifm|tool_calls><ifm|tool_call>f<ifm|arg_key>",
    "llama4_pythonic": "<|header_start|>system<|header_end|> [func_name1(a=1), func_name2()]",
    "longcat": '<longcat_tool_call>{"name": ',
    "mistral": "[INST]...[/INST][THINK]...[/THINK]",
    "olmo3": "<function_calls>f(a=1)</function_calls>",
    "phi4_mini_json": "<|system|>...<|tool|>{{ tools }}<|/tool|>",
    "pythonic": "<|start_header_id|> [func_name1(params_name1=params_value1)]",
    "sarashina": "<|tool_calls|>[{'name': ",
    "step3": "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name=",
    "xlam": "You are developed by Salesforce xLAM team.",
}


def name(path: Path) -> str:
    return path.stem


@pytest.mark.parametrize("path", FAMILIES, ids=name)
def test_families(path: Path) -> None:
    assert find_dialect(template=path.read_text()).dialect.name == path.stem


@pytest.mark.parametrize("dialect", EXCERPTS)
def test_markers_tell_families_apart(dialect: str) -> None:
    row = match_template(EXCERPTS[dialect])
    assert row is not None
    assert row.dialect == dialect


@pytest.mark.skipif(
    not PUBLISHED.exists(), reason="THE PUBLISHED TEMPLATES ARE NOT HERE: only our own are tried"
)
@pytest.mark.parametrize("stem", TRUTH)
def test_published_templates(stem: str) -> None:
    dialect = find_dialect(
        template=(PUBLISHED / f"{stem}.jinja").read_text(), bos_token="<s>", eos_token="</s>"
    )
    assert dialect.dialect.name == TRUTH[stem], dialect.how


@pytest.mark.skipif(not PUBLISHED.exists(), reason="THE PUBLISHED TEMPLATES ARE NOT HERE")
def test_every_published_template_is_in_the_table() -> None:
    assert {path.stem for path in PUBLISHED.glob("*.jinja")} == set(TRUTH)


@pytest.mark.parametrize("path", UNSEEN, ids=name)
def test_unseen_families_are_derived(path: Path) -> None:
    dialect = find_dialect(template=path.read_text())
    assert dialect.dialect.name == "derived"
    assert dialect.how == "derived from the chat template"


@pytest.mark.parametrize(
    ("model", "dialect"),
    [
        ("Qwen/Qwen3-8B", "hermes"),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", "qwen3_coder"),
        ("qwen3.5-4b-instruct-q4_k_m.gguf", "qwen3_coder"),
        ("openai/gpt-oss-20b", "harmony"),
        ("deepseek-ai/DeepSeek-V3", "deepseek_v3"),
        ("deepseek-ai/DeepSeek-V3.1-Terminus", "deepseek_v31"),
        ("deepseek-ai/DeepSeek-V3.2", "deepseek_v32"),
        ("deepseek-ai/DeepSeek-V3.2-Exp", "deepseek_v31"),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B", "nemotron_v3"),
        ("nvidia/Llama-3_3-Nemotron-Super-49B-v1_5", "nemotron_v2"),
        ("Meta_Llama_3.1_8B", "llama3_json"),
        ("google/gemma-2-2b-it", "plain"),
        ("what3vers/why3", "plain"),
        ("", "plain"),
    ],
)
def test_names(model: str, dialect: str) -> None:
    assert find_dialect(model=model).dialect.name == dialect


def test_it_says_how() -> None:
    assert find_dialect(model="Qwen3-Coder").how == "the model's name contains qwen3-coder"
    assert find_dialect(template="<tool_call><arg_key>").how == "the chat template has <arg_key>"
    assert find_dialect().how == "unknown model; text passes through"
    assert find_dialect(special_tokens=["<|tool_calls_section_begin|>", "<s>"]).how == (
        "the model has the tokens <|tool_calls_section_begin|>"
    )


def test_it_is_public() -> None:
    assert dragoman.find_dialect is find_dialect


def test_a_template_is_trusted_more_than_a_name() -> None:
    template = (TEMPLATES / "families" / "glm47.jinja").read_text()
    assert find_dialect(template=template, model="Qwen3-8B").dialect.name == "glm47"


def test_a_name_knows_of_calls_where_the_template_shows_only_reasoning() -> None:
    template = (TEMPLATES / "families" / "qwen3.jinja").read_text()
    assert find_dialect(template=template).dialect.name == "qwen3"
    assert find_dialect(template=template, model="Qwen3-8B").dialect.name == "hermes"


def test_a_template_that_writes_other_calls_than_its_markers_say() -> None:
    template = (
        TEMPLATES / "unseen" / "object_in_tags.jinja"
    ).read_text() + "{# <tool_call> is not used here #}"
    dialect = find_dialect(template=template)
    assert dialect.dialect.name == "derived"
    assert "but it writes other calls" in dialect.how


def test_every_name_in_the_tables_is_in_the_catalog() -> None:
    named = {row.dialect for row in KNOWN + KNOWN_REASONING}
    assert named <= set(list_dialects())


def test_every_stem_leads_to_its_dialect() -> None:
    for name, dialect in list_dialects().items():
        for stem in dialect.stems:
            assert match_name(f"somebody/{stem}-instruct") == (stem, name)


@pytest.mark.parametrize("flood", ["[", "{", '{"a": ', "<a", "</", " "])
def test_a_flood_of_markers_is_looked_through_quickly(flood: str) -> None:
    much = "{{ '" + flood + "' * " + str(3500 // len(flood)) + " }}"
    template = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        + much
        + "{{ c.function.name }}"
        "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}" + much
    )
    start = time.thread_time()
    find_dialect(template=template + "{% endfor %}{% endfor %}")
    assert time.thread_time() - start < 3


JUNK = st.lists(
    st.sampled_from(
        [
            *("{% for m in messages %}", "{% endfor %}", "{{ m.content }}", "{{ m.role }}", "{% if tools %}"),
            *(
                "{% endif %}",
                "{{ m.tool_calls }}",
                "{{ m.tool_calls[0].function.name }}",
                "{{ tools | tojson }}",
            ),
            *(
                "{{ raise_exception('no') }}",
                "{% for i in range(99999) %}",
                "{{ 'a' * 10**9 }}",
                "{{ m.nothing.x }}",
            ),
            *(
                "<think>",
                "</think>",
                "<tool_call>",
                "{",
                "}",
                "[",
                "]",
                "<",
                ">",
                "\n",
                "{%",
                "%}",
                "{{",
                "}}",
                "x",
            ),
            *(
                "{% set x = x ~ x %}",
                "{{ messages[-1].tool_calls[0].function.arguments }}",
                "{{ enable_thinking }}",
            ),
        ]
    )
    | st.text(max_size=8),
    max_size=24,
).map("".join)


@settings(max_examples=60, deadline=10_000, suppress_health_check=[HealthCheck.too_slow])
@given(template=JUNK, model=st.text(max_size=12), tokens=st.lists(st.text(max_size=8), max_size=4))
def test_finding_never_fails(template: str, model: str, tokens: list[str]) -> None:
    dialect = find_dialect(template=template, model=model, special_tokens=tokens, bos_token="<s>")
    assert dialect.dialect.name
    assert dialect.how
