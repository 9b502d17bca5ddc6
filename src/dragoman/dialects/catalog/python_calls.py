"""Calls as Python function calls, and Gemma's syntax with braces."""

from dragoman.dialects.declarations import BraceCalls, Dialect, PythonCalls, ReasoningSyntax

DIALECTS = (
    Dialect(
        name="pythonic",
        models="Llama 3.2 with the pythonic template, ToolACE",
        stems=("toolace",),
        calls=(PythonCalls(whole=True),),
        drops=("<|python_start|>", "<|python_end|>"),
    ),
    Dialect(
        name="llama4_pythonic",
        models="Llama 4",
        stems=("llama-4",),
        calls=(
            PythonCalls(open=("<|python_start|>",), close=("<|python_end|>",), silent=True),
            PythonCalls(whole=True),
        ),
        drops=("<|python_start|>", "<|python_end|>"),
    ),
    Dialect(
        name="olmo3",
        models="Olmo 3",
        stems=("olmo-3", "olmo3"),
        reasoning=ReasoningSyntax(open=("<think>",), close=("</think>",)),
        calls=(
            PythonCalls(
                open=("<function_calls>",), close=("</function_calls>",), brackets=False, separator="\n"
            ),
        ),
    ),
    Dialect(
        name="lfm2",
        models="LFM2, LFM2.5",
        stems=("lfm2",),
        reasoning=ReasoningSyntax(open=("<think>",), close=("</think>",)),
        calls=(PythonCalls(open=("<|tool_call_start|>",), close=("<|tool_call_end|>",)),),
        aliases=("lfm2.5",),
    ),
    Dialect(
        name="gemma4",
        models="Gemma 4",
        stems=("gemma-4", "gemma4"),
        reasoning=ReasoningSyntax(open=("<|channel>thought\n", "<|channel>"), close=("<channel|>",)),
        calls=(BraceCalls(open=("<|tool_call>call:",), close=("<tool_call|>",), quote='<|"|>'),),
    ),
    Dialect(
        name="functiongemma",
        models="FunctionGemma",
        stems=("functiongemma",),
        calls=(
            BraceCalls(
                open=("<start_function_call>call:",), close=("<end_function_call>",), quote="<escape>"
            ),
        ),
        aliases=("function_gemma",),
    ),
)
