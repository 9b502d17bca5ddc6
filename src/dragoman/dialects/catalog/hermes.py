"""Hermes, Qwen and the many that write a call as they do: a JSON object between <tool_call> tags."""

from dragoman.dialects.declare import Dialect, JsonCalls, Reasoning

CALLS = JsonCalls(open=("<tool_call>\n",), close=("\n</tool_call>",), before="\n", between="\n")

DIALECTS = (
    Dialect(
        name="hermes",
        models="Hermes 2 Pro and 3, Qwen2.5, Qwen3, QwQ, MiMo-VL, Bielik 3, Trinity",
        reasoning=Reasoning(),
        calls=(CALLS,),
        aliases=("qwen", "qwen25", "qwen2.5", "trinity", "hermes_2_pro"),
    ),
    Dialect(
        name="qwen3",
        models="Qwen3 and QwQ with reasoning",
        reasoning=Reasoning(ended_by_call=True, ended_by=("<tool_call>",)),
        calls=(CALLS,),
        aliases=("base",),
    ),
    Dialect(
        name="qwen3_thinking",
        models="Qwen3-Thinking-2507",
        reasoning=Reasoning(),
        calls=(CALLS,),
        aliases=("qwen3-thinking",),
    ),
    Dialect(name="granite4", models="Granite 4.0 and 4.1", calls=(CALLS,)),
    Dialect(
        name="reka_edge",
        models="Reka Edge",
        reasoning=Reasoning(),
        calls=(JsonCalls(open=("<tool_call>\n",), close=("</tool_call>",), before="\n"),),
    ),
    Dialect(
        name="ernie45",
        models="ERNIE 4.5 thinking",
        reasoning=Reasoning(open=("<think>\n",), close=("\n</think>\n\n",)),
        calls=(JsonCalls(open=("<tool_call>\n",), close=("\n</tool_call>\n",), before="\n"),),
        drops=("<response>\n", "\n</response>\n"),
        text_open="<response>\n",
        text_close="\n</response>\n",
    ),
    Dialect(
        name="longcat",
        models="LongCat-Flash-Chat",
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
)
