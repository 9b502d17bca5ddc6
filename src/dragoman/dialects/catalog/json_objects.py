"""Calls as JSON objects: between tags, in a list after a marker, or without a marker."""

from dragoman.dialects.declarations import Dialect, JsonCalls, KeyedCalls, PythonObjects, ReasoningSyntax

CALLS = JsonCalls(open=("<tool_call>\n",), close=("\n</tool_call>",), before="\n", between="\n", alone=True)
PLUGIN = "<|action_start|>{}<|plugin|>"
THINK = ReasoningSyntax(open=("<think>",), close=("</think>",))

DIALECTS = (
    # One object between tags: Hermes, Qwen and others with the same syntax.
    Dialect(
        name="hermes",
        models="Hermes 2 Pro and 3, Qwen2.5, Qwen3, QwQ, MiMo-VL, Bielik 3, Trinity",
        stems=(
            "bielik",
            "hermes-2-pro",
            "hermes-3",
            "hermes-4",
            "mimo-vl",
            "qwen2.5",
            "qwen3",
            "qwq",
            "smollm3",
            "trinity",
        ),
        reasoning=ReasoningSyntax(),
        calls=(CALLS,),
        aliases=("qwen", "qwen25", "qwen2.5", "trinity", "hermes_2_pro"),
    ),
    Dialect(
        name="qwen3",
        models="Qwen3 and QwQ with reasoning",
        reasoning=ReasoningSyntax(ended_by_call=True),
        calls=(CALLS,),
        aliases=("base",),
    ),
    Dialect(
        name="qwen3_thinking",
        models="Qwen3-Thinking-2507",
        reasoning=ReasoningSyntax(always=True),
        calls=(CALLS,),
        aliases=("qwen3-thinking",),
    ),
    Dialect(name="granite4", models="Granite 4.0 and 4.1", stems=("granite-4",), calls=(CALLS,)),
    Dialect(
        name="reka_edge",
        models="Reka Edge",
        stems=("reka-edge",),
        reasoning=ReasoningSyntax(),
        calls=(JsonCalls(open=("<tool_call>\n",), close=("</tool_call>",), before="\n", alone=True),),
    ),
    Dialect(
        name="ernie45",
        models="ERNIE 4.5 thinking",
        stems=("ernie-4.5",),
        reasoning=ReasoningSyntax(open=("<think>\n",), close=("\n</think>\n\n",)),
        calls=(JsonCalls(open=("<tool_call>\n",), close=("\n</tool_call>\n",), before="\n", alone=True),),
        drops=("<response>\n", "\n</response>\n"),
        text_open="<response>\n",
        text_close="\n</response>\n",
    ),
    Dialect(
        name="longcat",
        models="LongCat-Flash-Chat",
        stems=("longcat",),
        calls=(
            JsonCalls(
                open=("<longcat_tool_call>",),
                close=("</longcat_tool_call>",),
                between="\n",
                before="\n",
                whole=True,
            ),
        ),
    ),
    # IBM Granite 3, and the function-calling model before it.
    Dialect(
        name="granite",
        models="Granite 3.0 to 3.3",
        stems=("granite-3",),
        reasoning=ReasoningSyntax(
            open=("<think>", "Here is my thought process:", "Here's my thought process:"),
            close=("</think>", "Here is my response:", "Here's my response:"),
            stray_close="keep",
        ),
        calls=(JsonCalls(open=("<|tool_call|> ", "<tool_call> "), list="must"),),
        drops=("<response>", "</response>"),
    ),
    Dialect(
        name="granite_20b_fc",
        models="granite-20b-functioncalling",
        stems=("granite-20b-functioncalling",),
        calls=(JsonCalls(open=("<function_call> ",), between="\n", before="\n", whole=True),),
        aliases=("granite-20b-fc",),
    ),
    # One object after a marker of several tokens.
    Dialect(
        name="gigachat3",
        models="GigaChat 3 and 3.1",
        stems=("gigachat3",),
        calls=(
            JsonCalls(
                open=("<|function_call|>", "<|message_sep|>\n\nfunction call<|role_sep|>\n"),
                needs_arguments=True,
            ),
        ),
        drops=("</s>",),
    ),
    Dialect(
        name="internlm",
        models="InternLM 2 and 2.5, Intern-S1",
        stems=("intern-s1", "internlm2"),
        reasoning=ReasoningSyntax(open=("<think>",), close=("</think>",)),
        calls=(
            JsonCalls(
                open=tuple(PLUGIN.format(space) for space in ("", " ", "\n", " \n", "\n ", "\n\n")),
                close=("<|action_end|>",),
                arguments=("parameters", "arguments"),
            ),
        ),
        aliases=("interns1",),
    ),
    # A list of objects after a marker.
    Dialect(
        name="phi4_mini_json",
        models="Phi-4-mini",
        stems=("phi-4-mini",),
        calls=(JsonCalls(open=("functools",), list="must"),),
    ),
    Dialect(
        name="firefunction_v2",
        models="Firefunction v2",
        stems=("firefunction-v2",),
        calls=(JsonCalls(open=(" functools",), list="must"),),
    ),
    Dialect(
        name="hunyuan_a13b",
        models="Hunyuan-A13B",
        stems=("hunyuan-a13b",),
        reasoning=ReasoningSyntax(close=("\n</think>\n",)),
        calls=(JsonCalls(open=("<tool_calls>",), close=("</tool_calls>",), list="must"),),
        drops=("<answer>\n", "\n</answer>"),
        text_open="<answer>\n",
        text_close="\n</answer>",
    ),
    Dialect(
        name="jamba",
        models="Jamba 1.5",
        stems=("jamba",),
        calls=(JsonCalls(open=(" <tool_calls>",), close=("</tool_calls>",), list="must", indent="    "),),
    ),
    Dialect(
        name="apriel",
        models="Apriel 1.5, and 1.6 Thinker",
        stems=("apriel",),
        reasoning=ReasoningSyntax(
            open=("Here are my reasoning steps:\n",),
            close=("\n[BEGIN FINAL RESPONSE]\n",),
            preface="Here are my reasoning steps:\n",
        ),
        calls=(JsonCalls(open=("<tool_calls>",), close=("</tool_calls>",), list="must"),),
    ),
    Dialect(
        name="minimax_m1",
        models="MiniMax M1",
        stems=("minimax-m1",),
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
        stems=(
            "llama-3.1-nemotron",
            "llama-3.3-nemotron",
            "nemotron-nano-9b-v2",
            "nemotron-nano-12b-v2",
            "nemotron-nano-v2",
        ),
        reasoning=THINK,
        calls=(JsonCalls(open=("<TOOLCALL>",), close=("</TOOLCALL>",), list="must"),),
        aliases=("llama_nemotron",),
    ),
    Dialect(
        name="apertus",
        models="Apertus 2509",
        stems=("apertus",),
        reasoning=ReasoningSyntax(open=("<|inner_prefix|>",), close=("<|inner_suffix|>",)),
        calls=(KeyedCalls(open=("<|tools_prefix|>",), close=("<|tools_suffix|>",), list="must"),),
        aliases=("apertus2509",),
    ),
    # JSON without a required marker.
    Dialect(
        name="json",
        models="models without a syntax of their own",
        calls=(JsonCalls(name=("name", "function"), list="may", whole=True),),
    ),
    Dialect(
        name="llama3_json",
        models="Llama 3.1, 3.2, 3.3, and 4 with the JSON template",
        stems=("llama-3.1", "llama-3.2", "llama-3.3", "llama3.1", "llama3.2", "llama3.3"),
        calls=(
            JsonCalls(
                arguments=("parameters", "arguments"), separator="; ", several=True, needs_arguments=True
            ),
            JsonCalls(
                open=("<|python_tag|>",),
                arguments=("parameters", "arguments"),
                separator="; ",
                several=True,
                needs_arguments=True,
            ),
        ),
        aliases=("llama", "llama3", "llama4_json"),
    ),
    Dialect(
        name="xlam",
        models="Salesforce xLAM 1 and 2",
        stems=("xlam",),
        reasoning=ReasoningSyntax(open=("<think>",), close=("</think>",)),
        calls=(
            JsonCalls(list="must", whole=True),
            JsonCalls(open=("[TOOL_CALLS]",), list="must"),
            JsonCalls(open=("<tool_call>",), close=("</tool_call>",), list="must"),
            JsonCalls(open=("```json\n", "```\n"), close=("\n```",), list="must", whole=True),
        ),
    ),
    Dialect(
        name="sarashina",
        models="SoftBank Sarashina",
        stems=("sarashina",),
        calls=(
            PythonObjects(open=("<|tool_calls|>",), list="must", silent=True),
            PythonObjects(list="must", whole=True),
        ),
    ),
)
