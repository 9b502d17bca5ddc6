"""Calls as JSON objects in one list, after a marker."""

from dragoman.dialects.declare import Dialect, JsonCalls, Reasoning

THINK = Reasoning(open=("<think>",), close=("</think>",))

DIALECTS = (
    Dialect(
        name="phi4_mini_json",
        models="Phi-4-mini",
        calls=(JsonCalls(open=("functools",), list="must"),),
    ),
    Dialect(
        name="firefunction_v2",
        models="Firefunction v2",
        calls=(JsonCalls(open=(" functools",), list="must"),),
    ),
    Dialect(
        name="hunyuan_a13b",
        models="Hunyuan-A13B",
        reasoning=Reasoning(close=("\n</think>\n",)),
        calls=(JsonCalls(open=("<tool_calls>",), close=("</tool_calls>",), list="must"),),
        drops=("<answer>\n", "\n</answer>"),
        text_open="<answer>\n",
        text_close="\n</answer>",
    ),
    Dialect(
        name="jamba",
        models="Jamba 1.5",
        calls=(JsonCalls(open=(" <tool_calls>",), close=("</tool_calls>",), list="must", indent="    "),),
    ),
    Dialect(
        name="apriel",
        models="Apriel 1.5, and 1.6 Thinker",
        reasoning=Reasoning(
            open=("Here are my reasoning steps:\n",),
            close=("\n[BEGIN FINAL RESPONSE]\n",),
            preface="Here are my reasoning steps:\n",
        ),
        calls=(JsonCalls(open=("<tool_calls>",), close=("</tool_calls>",), list="must"),),
    ),
    Dialect(
        name="minimax_m1",
        models="MiniMax M1",
        reasoning=THINK,
        calls=(
            JsonCalls(
                open=("<tool_calls>\n",),
                close=("\n</tool_calls>",),
                separator="\n",
                several=True,
                before="\n",
            ),
        ),
    ),
    Dialect(
        name="nemotron_v2",
        models="Nemotron Nano v2, Llama-Nemotron",
        reasoning=THINK,
        calls=(JsonCalls(open=("<TOOLCALL>",), close=("</TOOLCALL>",), list="must"),),
        aliases=("llama_nemotron",),
    ),
    Dialect(
        name="apertus",
        models="Apertus 2509",
        reasoning=Reasoning(open=("<|inner_prefix|>",), close=("<|inner_suffix|>",)),
        calls=(
            JsonCalls(open=("<|tools_prefix|>",), close=("<|tools_suffix|>",), list="must", name_is_key=True),
        ),
        aliases=("apertus2509",),
    ),
)
