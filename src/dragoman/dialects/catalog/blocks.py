"""Dialects whose answers are blocks, each labelled as reasoning, text or a call."""

from dragoman.dialects.declarations import (
    BlockCalls,
    CallSection,
    Channels,
    Dialect,
    NamedCalls,
    ReasoningSyntax,
)

DIALECTS = (
    # OpenAI's gpt-oss: blocks with a channel; calls also have a recipient.
    Dialect(
        name="harmony",
        models="gpt-oss",
        stems=("gpt-oss",),
        channels=Channels(
            start=("<|start|>assistant", "<|start|>"),
            header=("<|channel|>", "to="),
            body="<|message|>",
            ends=("<|end|>", "<|call|>", "<|return|>"),
            recipient="to=",
            channel="<|channel|>",
            reasoning=frozenset({"analysis"}),
            text=frozenset({"final", "commentary"}),
            call="functions.",
            written=(
                "<|channel|>analysis<|message|>{body}<|end|>",
                "<|channel|>final<|message|>{body}<|end|>",
                "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{body}<|call|>",
            ),
        ),
        aliases=("openai", "openai_gptoss", "gpt-oss", "gpt_oss"),
    ),
    # MeetKai's Functionary.
    Dialect(
        name="functionary_v31",
        models="Functionary v3.1",
        stems=("functionary-medium-v3.1", "functionary-small-v3.1"),
        calls=(NamedCalls(open=("<function=",), then=(">",), close=("</function>",)),),
        drops=("<|eom_id|>",),
    ),
    Dialect(
        name="functionary_v32",
        models="Functionary v3.2",
        stems=("functionary-medium-v3.2", "functionary-small-v3.2"),
        channels=Channels(
            start=(">>>",),
            header=(),
            body="\n",
            text=frozenset({"all"}),
            written=("", "all\n{body}", "{name}\n{body}"),
        ),
    ),
    # Typed blocks, all ended by the same marker.
    Dialect(
        name="inkling",
        models="Inkling",
        stems=("inkling",),
        reasoning=ReasoningSyntax(
            open=("<|content_thinking|>",),
            close=("<|end_message|>", "<|content_model_end_sampling|>"),
            ended_by=("<|content_text|>", "<|content_invoke_tool_json|>", "<|content_invoke_tool_text|>"),
        ),
        calls=(
            BlockCalls(
                section=CallSection(open=("<|message_model|>",), close=(), each=True),
                open=("<|content_invoke_tool_json|>",),
                close=("<|end_message|>",),
                arguments=("args",),
                silent=True,
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
    # Upstage.
    Dialect(
        name="solar_open",
        models="Solar Open 100B",
        stems=("solar-open",),
        reasoning=ReasoningSyntax(
            open=("<|think|>",), close=("<|end|>",), ended_by_call=True, ended_by=("<|content|>",)
        ),
        calls=(
            NamedCalls(
                section=CallSection(open=("<|tool_calls|>",), close=("<|calls|>",)),
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
