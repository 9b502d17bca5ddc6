"""What the parsers are given to read: one call in every format, prose, and reasoning, cut into tokens."""

import json
import re
from typing import Any, Literal, TypeAlias

from msgspec import Struct

from bench.errors import BenchError
from dragoman.dialects import registry
from dragoman.dialects.render import render
from dragoman.types import Answer, ToolCall

Mode: TypeAlias = Literal["call", "prose", "reasoning"]

CODE = (
    "def route(stops: list[Stop], limit: int) -> list[Stop]:\n"
    '    """The stops in the order in which they are visited."""\n'
    "    left, found = set(stops), []\n"
    "    while left and len(found) < limit:\n"
    "        best = min(left, key=lambda stop: stop.distance)\n"
    '        print(f"next: {best.name}, {len(left)} to go")\n'
    "        found.append(best)\n"
    "        left.remove(best)\n"
    "    return found\n\n\n"
)
PROSE = (
    "A dragoman stood between two courts and let each of them speak its own language. He knew the forms of "
    "both, and what could be said in one of them only. It was a trade of families; the best of them served "
    "one embassy for a century, and were trusted by neither side.\n\n"
)
SHORT, LONG = 4, 32
"""How often the text is repeated: about 300 tokens, and 8 times as many."""
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "write_file",
            "description": "Writes a file",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string"},
                    "mode": {"type": "integer"},
                    "overwrite": {"type": "boolean"},
                    "content": {"type": "string"},
                },
                "required": ["path", "content"],
            },
        },
    }
]
FORMATS: dict[str, tuple[str, str]] = {
    "hermes": ("hermes", "hermes"),
    "qwen3_coder": ("qwen3_coder", "qwen3_coder"),
    "deepseek_v3": ("deepseek_v3", "deepseekv3"),
    "deepseek_v31": ("deepseek_v31", "deepseekv31"),
    "kimi_k2": ("kimi_k2", "kimi_k2"),
    "mistral_v3": ("mistral", "mistral"),
    "mistral_v11": ("mistral", "mistral"),
    "glm45": ("glm45", "glm45"),
    "minimax_m2": ("minimax_m2", "minimax-m2"),
    "llama3_json": ("llama3_json", "llama3"),
    "pythonic": ("pythonic", "pythonic"),
    "harmony": ("", "gpt-oss"),
    "apertus": ("apertus", "apertus2509"),
    "cohere_command4": ("", "cohere_command4"),
    "deepseek_v32": ("deepseek_v32", "deepseekv32"),
    "deepseek_v4": ("deepseek_v4", "deepseekv4"),
    "deepseek_v41": ("deepseek_v41", "deepseekv41"),
    "dots": ("dots", "dots"),
    "ernie45": ("ernie45", ""),
    "functiongemma": ("functiongemma", ""),
    "gemma4": ("gemma4", "gemma4"),
    "gigachat3": ("gigachat3", "gigachat3"),
    "glm47": ("glm47", "glm47"),
    "granite": ("granite", ""),
    "granite4": ("granite4", ""),
    "granite_20b_fc": ("granite-20b-fc", ""),
    "hunyuan_a13b": ("hunyuan_a13b", ""),
    "hy_v3": ("hy_v3", "hunyuan"),
    "hy_v4": ("hy_v4", ""),
    "inkling": ("inkling", "inkling"),
    "internlm": ("internlm", "interns1"),
    "iquest": ("", "iquest_q1"),
    "jamba": ("jamba", ""),
    "k2_horizon": ("k2_horizon", "k2_horizon"),
    "kimi_k3": ("kimi_k3", "kimi_k3"),
    "lfm2": ("lfm2", "lfm2"),
    "ling3": ("ling3", "ling3"),
    "llama4_pythonic": ("llama4_pythonic", ""),
    "longcat": ("longcat", ""),
    "minicpm5": ("minicpm5", "minicpm5"),
    "minimax_m3": ("minimax_m3", "minimax-m3"),
    "muse_glimmer": ("muse_glimmer", "muse"),
    "olmo3": ("olmo3", ""),
    "phi4_mini_json": ("phi4_mini_json", ""),
    "poolside_v1": ("poolside_v1", "poolside_v1"),
    "seed_oss": ("seed_oss", ""),
    "step3": ("step3", "step3"),
    "step3p5": ("step3p5", "step3p5"),
    "xlam": ("xlam", ""),
}
"""Our formats, and what vLLM and SGLang call them. vLLM leaves harmony and Cohere to packages of others."""

SPECIAL = re.compile(
    r"<\|[^<>|\s]*\|>|<｜[^｜<>]*｜>|｜DSML｜|<\|\"\|>|<\|?/?(?:tool_calls?|tool_sep|arg_key|arg_value|think|"
    r"minimax:tool_call|seed:tool_call|function_calls|channel|start_function_call|end_function_call|escape)"
    r"(?::opensource)?\|?>|\[(?:TOOL_CALLS|ARGS|CALL_ID|/?THINK)\]|\]<\]minimax\[>\["
)
"""Markers that are one token in the vocabularies of their models."""
TOKEN = re.compile(r" ?[A-Za-z]{1,8}| ?\d{1,3}|\n+| +(?=\S)|[^\sA-Za-z\d]{1,3}|.", re.DOTALL)
ALWAYS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<|START_THINKING|>",
    "<|END_THINKING|>",
    "<|START_RESPONSE|>",
    "<|END_RESPONSE|>",
    "<|python_tag|>",
)
"""Looked up by some of the peers at their start, whether they come or not."""


class Case(Struct, frozen=True, kw_only=True):
    """One answer, and what is in it."""

    name: str
    mode: Mode
    long: bool
    tokens: list[str]
    text: str = ""
    reasoning: str = ""
    arguments: dict[str, Any] = {}
    ours: str
    vllm: str
    sglang: str


def cases(names: list[str] | None = None) -> list[Case]:
    """All cases, or those of some formats; each short and long."""
    result = []
    for long in (False, True):
        for name, (vllm, sglang) in FORMATS.items():
            if name in registry.list_dialects():
                result.append(_call(name, long, vllm, sglang))
        result.append(_prose(long))
        result.append(_reasoning(long))
    if unknown := set(names or ()) - {case.name for case in result}:
        known = ", ".join(dict.fromkeys(case.name for case in result))
        raise BenchError(f"There is no case {', '.join(sorted(unknown))}. There are: {known}.")
    return [case for case in result if names is None or case.name in names]


def _call(name: str, long: bool, vllm: str, sglang: str) -> Case:
    arguments = {
        "path": "src/routes.py",
        "mode": 420,
        "overwrite": True,
        # Space at its end would be a matter of taste: some of the peers strip it.
        "content": (CODE * ((LONG if long else SHORT) // 2)).strip(),
    }
    # No text before it, which not all formats allow in the eyes of all peers, and no id of the model's own.
    call = ToolCall(id=None, name="write_file", arguments=json.dumps(arguments))
    spoken = render(registry.get_dialect(name), Answer(calls=[call]))
    return Case(
        name=name,
        mode="call",
        long=long,
        tokens=split(spoken),
        arguments=arguments,
        ours=name,
        vllm=vllm,
        sglang=sglang,
    )


def _prose(long: bool) -> Case:
    text = (PROSE * (LONG if long else SHORT)).strip()
    return Case(
        name="prose (hermes)",
        mode="prose",
        long=long,
        tokens=split(text),
        text=text,
        ours="hermes",
        vllm="hermes",
        sglang="hermes",
    )


def _reasoning(long: bool) -> Case:
    reasoning, text = (PROSE * (LONG if long else SHORT)).strip(), "So that is what he was."
    return Case(
        name="reasoning (qwen3)",
        mode="reasoning",
        long=long,
        tokens=split(f"<think>\n{reasoning}\n</think>\n\n{text}"),
        text=text,
        reasoning=reasoning,
        ours="qwen3",
        vllm="qwen3",
        sglang="qwen3",
    )


def split(text: str) -> list[str]:
    """`split("<think>\\nSo it is.")` is `["<think>", "\\n", "So", " it", " is", "."]`."""
    tokens: list[str] = []
    at = 0
    for special in SPECIAL.finditer(text):
        tokens += [*TOKEN.findall(text[at : special.start()]), special[0]]
        at = special.end()
    return tokens + TOKEN.findall(text[at:])


def vocabulary(case: Case) -> dict[str, int]:
    """An id for every token of a case. Of this one only: peers tell versions of a format by what is in it."""
    return {token: number for number, token in enumerate(dict.fromkeys([*case.tokens, *ALWAYS]))}
