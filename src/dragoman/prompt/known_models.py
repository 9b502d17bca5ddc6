"""Models of known families, told by what stands in their chat templates, or else by their names.

A name is a weak hint, and the only one where there is no template. Rules of the tables of templates:
- the first row that fits wins, so a family that borrows another one's markers stands above it;
- a marker is what the model itself writes or is told to write, where a family has one of its own;
- a family is told by the frame of its turns only where its calls look like those of others.
"""

import re

from msgspec import Struct


class Known(Struct, frozen=True):
    """A template that has all of `has` and none of `lacks` speaks `dialect`."""

    dialect: str
    has: tuple[str, ...]
    lacks: tuple[str, ...] = ()

    def fits(self, text: str) -> bool:
        return all(mark in text for mark in self.has) and not any(mark in text for mark in self.lacks)


KNOWN: tuple[Known, ...] = (
    # Blocks with headers. They come first, because their templates quote the markers of others as examples.
    Known("muse_glimmer", ("atem:function_calls",)),
    Known("harmony", ("<|channel|>", "<|message|>", "<|start|>")),
    Known("solar_open", ("<|tool_call:begin|>",)),
    Known("inkling", ("<|content_invoke_tool_json|>",)),
    Known("inkling", ("<|message_model|>", "<|content_text|>")),
    Known("kimi_k3", ("<|open|>", "<|sep|>", "<|close|>")),
    # DeepSeek. The DSML token is often kept in a variable, so the word after it stands alone in the text.
    Known("deepseek_v41", ("｜DSML｜", " calls>"), ("function_calls>", "tool_calls>")),
    Known("deepseek_v32", ("｜DSML｜", "function_calls>")),
    Known("deepseek_v4", ("｜DSML｜", "tool_calls>")),
    # R1 and its distills are never told of tools, and their prompt opens reasoning.
    Known(
        "deepseek_r1_template", ("<｜tool▁calls▁begin｜>", "```json", "<｜Assistant｜><think>"), ("tools",)
    ),
    Known("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    Known("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    Known("step3", ("steptml:",)),
    Known("step3", ("<｜tool_calls_begin｜>",)),
    # Families whose call marker is theirs alone.
    Known("kimi_k2", ("<|tool_calls_section_begin|>",)),
    Known("k2_horizon", ("ifm|tool_call",)),
    Known("iquest", ("iquest_tool_call",)),
    # Later LongCat models write tagged arguments under the same marker; those are derived.
    Known("longcat", ("longcat_tool_call",), ("longcat_arg_key",)),
    Known("minimax_m3", ("]<]minimax[>[",)),
    Known("minimax_m2", ("minimax:tool_call",)),
    Known("minimax_m1", ("<tool_calls>", "<beginning_of_sentence>")),
    Known("dots", ("dots_function_call",)),
    Known("seed_oss", ("seed:tool_call",)),
    Known("minicpm5", ('<function name="', '<param name="')),
    Known("gemma4", ("<|tool_call>", "<tool_call|>")),
    Known("functiongemma", ("<start_function_call>",)),
    Known("apertus", ("<|tools_prefix|>",)),
    Known("nemotron_v2", ("<TOOLCALL>",)),
    Known("internlm", ("<|action_start|>",)),
    Known("internlm", ("<|plugin|>",)),
    Known("sarashina", ("<|tool_calls|>",)),
    # GigaChat 3.5 has the same frame and other calls.
    Known("gigachat3", ("<|role_sep|>", "function_call"), ("gcml", "GCML")),
    Known("gigachat3", ("<|role_sep|>", "function call"), ("gcml", "GCML")),
    # LFM2's own templates do not write calls; what they write is the list of tools.
    Known("lfm2", ("<|tool_call_start|>",)),
    Known("lfm2", ("<|tool_list_start|>",)),
    Known("lfm2", ("List of tools: [", "<|im_start|>")),
    # Cohere. Command 4 is command 3 with another frame around text.
    Known("cohere_command4", ("<|START_ACTION|>", "<|START_TEXT|>")),
    Known("cohere_command3", ("<|START_ACTION|>",)),
    Known("cohere_command3", ("<|START_RESPONSE|>",)),
    Known("cohere_command3", ("<|START_THINKING|>",)),
    Known("cohere_command_r_plus", ("<|CHATBOT_TOKEN|>", "Action:")),
    # Mistral. [THINK] came with tokenizer 13, [ARGS] with 11.
    Known("mistral_v13", ("[TOOL_CALLS]", "[THINK]")),
    Known("mistral_v11", ("[TOOL_CALLS]", "[ARGS]")),
    # xLAM borrows Mistral's frame in one of its sizes, and says whose it is.
    Known("xlam", ("xLAM",)),
    Known("xlam", ("make calls in a single JSON array",)),
    Known("mistral_v3", ("[TOOL_CALLS]",)),
    Known("mistral", ("[THINK]",)),
    # One array between <tool_calls> and </tool_calls>: told apart by the turns around it.
    Known("apriel", ("[BEGIN FINAL RESPONSE]",)),
    Known("jamba", ("<tool_calls>", "<|bom|>")),
    Known("hunyuan_a13b", ("<tool_calls>", "<|extra_0|>")),
    Known("hunyuan_a13b", ("<answer>", "<|extra_0|>")),
    Known("hunyuan_a13b", ("<answer>", "<｜hy_Assistant｜>")),
    # Tencent's tags may carry a suffix that the template keeps in a variable, so they are not whole here.
    Known("hy_v3", ("<tool_sep", "<arg_key")),
    Known("hy_v4", ("<arg_key:",)),
    Known("hy_v4", ("<tool_calls", "<arg_key", "hy_")),
    # <arg_key> is GLM's, and three others took it over with turns of their own.
    Known("poolside_v1", ("<arg_key>", "<assistant>")),
    Known("ling3", ("<arg_key>", "<role>")),
    # Only the later GLM leaves no newline between the tags.
    Known("glm47", ("</arg_key><arg_value>",)),
    Known("glm45", ("<arg_key>",)),
    # <function=NAME>. Step and Nemotron took over Qwen's calls, with turns and reasoning of their own.
    Known("step3p5", ("<function=", "<parameter=", "tool_response\\n")),
    Known("step3p5", ("<function=", "<parameter=", "in JSONSchema format")),
    Known("nemotron_v3", ("<function=", "<parameter=", "truncate_history_thinking")),
    Known("qwen3_coder", ("<function=", "<parameter=")),
    Known("functionary_v31", ("<function=", "</function>"), ("<parameter",)),
    Known("functionary_v31", ("start_tag => `<function`",)),
    Known("functionary_v32", (">>>all",)),
    # IBM. Granite 3 writes a list after its marker, Granite 4 objects between tags.
    Known("granite4", ("<tool_call>", "<|start_of_role|>")),
    Known("granite", ("<|tool_call|>", "<|start_of_role|>")),
    Known("granite", ("available_tools", "<|start_of_role|>")),
    Known("granite_20b_fc", ("<|function_call_library|>",)),
    Known("granite_20b_fc", ("<function_call> ", "no_function")),
    # functools: the turns tell Phi from Firefunction.
    Known("firefunction_v2", ("functools", "<|start_header_id|>")),
    Known("phi4_mini_json", ("functools",)),
    Known("phi4_mini_json", ("<|tool|>", "<|/tool|>"), ("<|/tool_call|>",)),
    # Python calls. Olmo has a marker; the others are told by the example they give.
    Known("olmo3", ("<function_calls>",), ("invoke",)),
    Known("llama4_pythonic", ("<|header_start|>", "func_name1(")),
    Known("pythonic", ("[func_name1(",)),
    # JSON without a marker, in Llama's turns.
    Known("llama3_json", ("<|start_header_id|>", '"parameters": ', "ipython")),
    Known("llama3_json", ("<|header_start|>", '"parameters": ')),
    # <tool_call> with an object in it. Two families have turns or reasoning of their own.
    Known("reka_edge", ("<tool_call>", "<sep>")),
    Known("ernie45", ("<tool_call>", "<response>")),
    Known("hermes", ("<tool_call>",)),
)

KNOWN_REASONING: tuple[Known, ...] = (
    Known("kimi", ("◁think▷",)),
    Known("deepseek_r1", ("<think>", "<｜Assistant｜>")),
    Known("deepseek_r1", ("</think>", "<｜Assistant｜>")),
    Known("qwen3", ("<think>", "</think>")),
)
"""Templates that know nothing of calls. Looked at last: a name or a derivation may know of some."""


def match_template(text: str, rows: tuple[Known, ...] = KNOWN) -> Known | None:
    """`match_template("... <tool_call> ... <arg_key> ...").dialect` is "glm45"."""
    return next((row for row in rows if row.fits(text)), None)


_STEMS = {
    "apertus": "apertus",
    "apriel": "apriel",
    "bielik": "hermes",
    "command-a": "cohere_command3",
    "command-r-plus": "cohere_command_r_plus",
    "command-r7b": "cohere_command3",
    "cohere2moe": "cohere_command4",
    "deepseek-r1": "deepseek_r1",
    "deepseek-r1-0528": "deepseek_v3",
    "deepseek-v3": "deepseek_v3",
    "deepseek-v3.1": "deepseek_v31",
    "deepseek-v3.2": "deepseek_v32",
    "deepseek-v3.2-exp": "deepseek_v31",
    "deepseek-v4": "deepseek_v4",
    "deepseek-v4.1": "deepseek_v41",
    "devstral": "mistral_v11",
    "devstral-small-2505": "mistral_v3",
    "dots3": "dots",
    "ernie-4.5": "ernie45",
    "firefunction-v2": "firefunction_v2",
    "functionary-medium-v3.1": "functionary_v31",
    "functionary-small-v3.1": "functionary_v31",
    "functionary-medium-v3.2": "functionary_v32",
    "functionary-small-v3.2": "functionary_v32",
    "functiongemma": "functiongemma",
    "gemma-4": "gemma4",
    "gemma4": "gemma4",
    "gigachat3": "gigachat3",
    "glm-4.5": "glm45",
    "glm-4.6": "glm45",
    "glm-4.7": "glm47",
    "glm-5": "glm47",
    "gpt-oss": "harmony",
    "granite-20b-functioncalling": "granite_20b_fc",
    "granite-3": "granite",
    "granite-4": "granite4",
    "hermes-2-pro": "hermes",
    "hermes-3": "hermes",
    "hermes-4": "hermes",
    "holo2": "holo2",
    "hunyuan-a13b": "hunyuan_a13b",
    "hy3": "hy_v3",
    "hy4": "hy_v4",
    "inkling": "inkling",
    "intern-s1": "internlm",
    "internlm2": "internlm",
    "iquest": "iquest",
    "jamba": "jamba",
    "k2-horizon": "k2_horizon",
    "kimi-k2": "kimi_k2",
    "kimi-k3": "kimi_k3",
    "kimi-vl": "kimi",
    "laguna": "poolside_v1",
    "lfm2": "lfm2",
    "ling-3": "ling3",
    "ling3": "ling3",
    "llama-3.1": "llama3_json",
    "llama-3.2": "llama3_json",
    "llama-3.3": "llama3_json",
    "llama3.1": "llama3_json",
    "llama3.2": "llama3_json",
    "llama3.3": "llama3_json",
    "llama-4": "llama4_pythonic",
    "llama-3.1-nemotron": "nemotron_v2",
    "llama-3.3-nemotron": "nemotron_v2",
    "longcat": "longcat",
    "magistral": "mistral_v13",
    "magistral-small-2506": "mistral_v11",
    "mimo": "qwen3_coder",
    "mimo-vl": "hermes",
    "minicpm5": "minicpm5",
    "minimax-m1": "minimax_m1",
    "minimax-m2": "minimax_m2",
    "minimax-m3": "minimax_m3",
    "ministral-3": "mistral_v13",
    "ministral-8b": "mistral_v3",
    "mistral": "mistral_v3",
    "mistral-nemo": "mistral_v3",
    "mistral-small-3.2": "mistral_v11",
    "mistral-small-2506": "mistral_v11",
    "mixtral": "mistral_v3",
    "muse-glimmer": "muse_glimmer",
    "nemotron-3": "nemotron_v3",
    "nemotron-nano-9b-v2": "nemotron_v2",
    "nemotron-nano-12b-v2": "nemotron_v2",
    "nemotron-nano-v2": "nemotron_v2",
    "north-mini": "cohere_command4",
    "olmo-3": "olmo3",
    "olmo3": "olmo3",
    "phi-4-mini": "phi4_mini_json",
    "qwen2.5": "hermes",
    "qwen3": "hermes",
    "qwen3-coder": "qwen3_coder",
    "qwen3.5": "qwen3_coder",
    "qwen3.6": "qwen3_coder",
    "qwen3.8": "qwen3_coder",
    "qwq": "hermes",
    "reka-edge": "reka_edge",
    "sarashina": "sarashina",
    "seed-oss": "seed_oss",
    "smollm3": "hermes",
    "solar-open": "solar_open",
    "step-3": "step3",
    "step3": "step3",
    "step-3.5": "step3p5",
    "step-3.7": "step3p5",
    "toolace": "pythonic",
    "trinity": "hermes",
    "xlam": "xlam",
}


def match_name(model: str) -> tuple[str, str] | None:
    """The longest stem that fits: `match_name("Qwen3-Coder-30B")` is `("qwen3-coder", "qwen3_coder")`."""
    longest = max((stem for stem in _STEMS if _contains(model.lower(), stem)), key=len, default=None)
    return None if longest is None else (longest, _STEMS[longest])


def _contains(model: str, stem: str) -> bool:
    """`granite-3` is in `granite-3.3-8b`, but not in `granite-34b`. Some write `_` for `-` or `.`."""
    pattern = rf"(?<![a-z0-9]){re.escape(stem)}(?!\d)" + (r"(?!b\b)" if stem[-1].isdigit() else "")
    return any(re.search(pattern, re.sub(r"[\s_]", spelled, model)) for spelled in "-.")
