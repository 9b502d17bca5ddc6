"""Moonshot's Kimi: K2 with call ids that contain the name, K3 with blocks, and the older thinking models."""

from dragoman.dialects.declarations import AttributedCalls, CallSection, Dialect, NamedCalls, ReasoningSyntax

DIALECTS = (
    Dialect(
        name="kimi_k2",
        models="Kimi K2, K2-Instruct, K2-Thinking, K2.5",
        stems=("kimi-k2",),
        reasoning=ReasoningSyntax(open=("<think>",), close=("</think>",), ended_by_call=True),
        calls=(
            NamedCalls(
                section=CallSection(
                    open=("<|tool_calls_section_begin|>",), close=("<|tool_calls_section_end|>",)
                ),
                open=("<|tool_call_begin|>",),
                then=("<|tool_call_argument_begin|>",),
                close=("<|tool_call_end|>",),
                prefixed="functions.",
                ids="kimi",
                silent=True,
            ),
        ),
        aliases=("kimik2", "kimi_k25", "kimi_thinking"),
    ),
    Dialect(
        name="kimi_k3",
        models="Kimi K3",
        stems=("kimi-k3",),
        reasoning=ReasoningSyntax(
            open=("<|open|>think<|sep|>",),
            close=("<|close|>think<|sep|>",),
            ended_by=("<|open|>response<|sep|>",),
            ended_by_call=True,
        ),
        calls=(
            AttributedCalls(
                section=CallSection(open=("<|open|>tools<|sep|>",), close=("<|close|>tools<|sep|>",)),
                open=('<|open|>call tool="',),
                rest='" index="{index}"',
                then=("<|sep|>",),
                key=('<|open|>argument key="',),
                key_end=('" type="', '"<|sep|>'),
                type_end=('"<|sep|>',),
                types="name",
                value_end=("<|close|>argument<|sep|>",),
                close=("<|close|>call<|sep|>",),
                silent=True,
            ),
        ),
        drops=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
        text_open="<|open|>response<|sep|>",
        text_close="<|close|>response<|sep|>",
    ),
    Dialect(
        name="kimi",
        models="Kimi-VL thinking",
        stems=("kimi-vl",),
        reasoning=ReasoningSyntax(open=("◁think▷",), close=("◁/think▷",)),
    ),
)
