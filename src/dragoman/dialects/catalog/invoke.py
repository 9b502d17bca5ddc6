"""Calls as <invoke name="f"> with <parameter name="a"> inside, in various outer tags."""

from typing import Literal

from dragoman.dialects.declarations import (
    CallSection,
    Channels,
    Dialect,
    DoubledCalls,
    JsonCalls,
    ReasoningSyntax,
    TaggedCalls,
    TreeCalls,
)

THINK = ReasoningSyntax(open=("<think>",), close=("</think>",))
MINIMAX = "]<]minimax[>["


def invoke(
    section: CallSection,
    prefix: str = "",
    layout: str = "\n",
    *,
    before: str = "",
    untyped: Literal["json", "text"] = "json",
    kind: type[TaggedCalls] = TaggedCalls,
) -> TaggedCalls:
    return kind(
        section=section,
        before=before,
        open=(f'<{prefix}invoke name="',),
        then=(f'">{layout}',),
        key=(f'<{prefix}parameter name="',),
        key_end=('">',),
        value_end=(f"</{prefix}parameter>{layout}",),
        close=(f"</{prefix}invoke>{layout}",),
        untyped=untyped,
    )


DOTS = CallSection(open=("<dots_function_call>",), close=("</dots_function_call>",), each=True)

DIALECTS = (
    Dialect(
        name="minimax_m2",
        models="MiniMax M2, M2.1, M2.5",
        stems=("minimax-m2",),
        reasoning=ReasoningSyntax(),
        calls=(
            invoke(
                CallSection(open=("<minimax:tool_call>\n",), close=("</minimax:tool_call>",)),
                before="\n",
                untyped="text",
            ),
        ),
        aliases=("minimax-m2", "minimax", "minimax_m2_1", "minimax_m2_5"),
    ),
    Dialect(
        name="minimax_m2_append_think",
        models="MiniMax M2, for clients that keep <think> in the text",
        prepends="<think>",
        aliases=("minimax-append-think",),
    ),
    Dialect(
        name="minimax_m3",
        models="MiniMax M3",
        stems=("minimax-m3",),
        reasoning=ReasoningSyntax(open=("<mm:think>",), close=("</mm:think>",)),
        calls=(
            TreeCalls(
                section=CallSection(open=(f"{MINIMAX}<tool_call>\n",), close=(f"\n{MINIMAX}</tool_call>",)),
                open=(f'{MINIMAX}<invoke name="',),
                then=('">',),
                close=(f"{MINIMAX}</invoke>",),
                lead=MINIMAX,
                whole=True,
            ),
        ),
        aliases=("minimax-m3",),
    ),
    Dialect(
        name="dots",
        models="dots",
        stems=("dots3",),
        reasoning=THINK,
        calls=(invoke(DOTS, layout=""), JsonCalls(section=DOTS)),
        aliases=("dots3",),
    ),
    Dialect(
        name="muse_glimmer",
        models="Muse Glimmer",
        stems=("muse-glimmer",),
        channels=Channels(
            start=("<|start|>assistant",),
            header=("to=",),
            body="<|message|>",
            ends=("<|eom|>", "<|eot|>"),
            recipient="to=",
            reasoning=frozenset({"self"}),
            text=frozenset({"user"}),
            written=(
                " to=self<|message|>{body}<|eom|>",
                " to=user<|message|>{body}<|eom|>",
                " to={name}<|message|>{body}<|eom|>",
            ),
        ),
        calls=(
            invoke(
                CallSection(open=("<atem:function_calls>\n",), close=("</atem:function_calls>",), each=True),
                "atem:",
                kind=DoubledCalls,
            ),
        ),
        aliases=("muse", "glimmer"),
    ),
    Dialect(
        name="step3",
        models="Step-3",
        stems=("step-3", "step3"),
        reasoning=THINK,
        calls=(
            TaggedCalls(
                section=CallSection(
                    open=("<｜tool_calls_begin｜>",), close=("<｜tool_calls_end｜>",), required=True
                ),
                open=('<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="',),
                then=('">',),
                key=('<steptml:parameter name="',),
                key_end=('">',),
                value_end=("</steptml:parameter>",),
                close=("</steptml:invoke><｜tool_call_end｜>",),
            ),
        ),
    ),
    Dialect(
        name="minicpm5",
        models="MiniCPM5",
        stems=("minicpm5",),
        reasoning=ReasoningSyntax(),
        calls=(
            TaggedCalls(
                open=('<function name="', "<function name='", '<functionname="', "<functionname='"),
                then=('">', "'>"),
                key=('<param name="', "<param name='", '<paramname="', "<paramname='"),
                key_end=('">', "'>"),
                value_end=("</param>",),
                close=("</function>",),
                cdata=True,
            ),
        ),
        replaced=(("Ġ", " "), ("Ċ", "\n")),
    ),
)
