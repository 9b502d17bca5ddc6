"""GigaChat and InternLM: one JSON object after a marker made of several tokens."""

from dragoman.dialects.declare import Dialect, JsonCalls, Reasoning

PLUGIN = "<|action_start|>{}<|plugin|>"

DIALECTS = (
    Dialect(
        name="gigachat3",
        models="GigaChat 3 and 3.1",
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
        reasoning=Reasoning(open=("<think>",), close=("</think>",)),
        calls=(
            JsonCalls(
                open=tuple(PLUGIN.format(space) for space in ("", " ", "\n", " \n", "\n ", "\n\n")),
                close=("<|action_end|>",),
                arguments=("parameters", "arguments"),
            ),
        ),
        aliases=("interns1",),
    ),
)
