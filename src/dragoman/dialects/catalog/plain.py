"""Models that write only text, or only text and reasoning."""

from dragoman.dialects.declarations import Dialect, ReasoningSyntax

DIALECTS = (
    Dialect(
        name="plain", models="Gemma 2, Phi-3.5 and others without tools", aliases=("passthrough", "none")
    ),
    Dialect(
        name="holo2",
        models="Holo2",
        stems=("holo2",),
        reasoning=ReasoningSyntax(open=("<think>",), close=("</think>",), stray_close="keep"),
    ),
)
