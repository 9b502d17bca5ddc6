"""IBM Granite 3, and the function-calling model before it."""

from dragoman.dialects.declare import Dialect, JsonCalls, Reasoning

DIALECTS = (
    Dialect(
        name="granite",
        models="Granite 3.0 to 3.3",
        reasoning=Reasoning(
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
        calls=(JsonCalls(open=("<function_call> ",), between="\n", before="\n", whole=True),),
        aliases=("granite-20b-fc",),
    ),
)
