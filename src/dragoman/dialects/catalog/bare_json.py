"""Calls as JSON that no marker need announce."""

from dragoman.dialects.declare import Dialect, JsonCalls, Reasoning

DIALECTS = (
    Dialect(
        name="json",
        models="models without a syntax of their own",
        calls=(JsonCalls(name=("name", "function"), list="may", whole=True),),
    ),
    Dialect(
        name="llama3_json",
        models="Llama 3.1, 3.2, 3.3, and 4 with the JSON template",
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
        reasoning=Reasoning(open=("<think>",), close=("</think>",)),
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
        calls=(
            JsonCalls(open=("<|tool_calls|>",), list="must", python=True, silent=True),
            JsonCalls(list="must", python=True, whole=True),
        ),
    ),
)
