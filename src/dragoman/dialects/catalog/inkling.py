"""Inkling: typed blocks, each ended by the same marker."""

from dragoman.dialects.declare import Dialect, JsonCalls, Reasoning, Section

DIALECTS = (
    Dialect(
        name="inkling",
        models="Inkling",
        reasoning=Reasoning(
            open=("<|content_thinking|>",),
            close=("<|end_message|>", "<|content_model_end_sampling|>"),
            ended_by=("<|content_text|>", "<|content_invoke_tool_json|>", "<|content_invoke_tool_text|>"),
        ),
        calls=(
            JsonCalls(
                section=Section(open=("<|message_model|>",), close=(), header=True, each=True),
                open=("<|content_invoke_tool_json|>",),
                close=("<|end_message|>",),
                arguments=("args",),
                silent=True,
                empty_name=False,
            ),
        ),
        drops=(
            "<|message_model|>",
            "<|content_text|>",
            "<|content_invoke_tool_text|>",
            "<|message_user|>",
            "<|content_audio_input|>",
            "<|audio_end|>",
        ),
        text_open="<|message_model|><|content_text|>",
        text_close="<|end_message|>",
    ),
)
