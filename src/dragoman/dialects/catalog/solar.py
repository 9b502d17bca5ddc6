"""Upstage Solar Open."""

from dragoman.dialects.declare import Dialect, NamedCalls, Reasoning, Section

DIALECTS = (
    Dialect(
        name="solar_open",
        models="Solar Open 100B",
        reasoning=Reasoning(
            open=("<|think|>",), close=("<|end|>",), ended_by_call=True, ended_by=("<|content|>",)
        ),
        calls=(
            NamedCalls(
                section=Section(open=("<|tool_calls|>",), close=("<|calls|>",)),
                open=("<|tool_call:begin|>",),
                id_first="<|tool_call:name|>",
                then=("<|tool_call:args|>",),
                close=("<|tool_call:end|>",),
            ),
        ),
        drops=("<|begin|>assistant", "<|content|>"),
        text_open="<|begin|>assistant<|content|>",
        text_close="<|end|>",
    ),
)
