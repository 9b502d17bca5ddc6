"""Qwen3-Coder's tags, and models with the same syntax."""

from dragoman.dialects.declarations import CallSection, Dialect, ReasoningSyntax, TaggedCalls


def tags(outer: str, layout: str = "\n") -> TaggedCalls:
    """Declare `<function=f>` calls with `<parameter=a>` inside; `layout` is the whitespace around values."""
    return TaggedCalls(
        section=CallSection(open=(f"<{outer}>\n",), close=(f"\n</{outer}>",), each=True),
        before="\n",
        between="\n",
        open=("<function=",),
        then=(">\n",),
        key=("<parameter=",),
        key_end=(f">{layout}",),
        value_end=(f"{layout}</parameter>\n",),
        close=("</function>",),
    )


THINK = ReasoningSyntax(ended_by_call=True)

DIALECTS = (
    Dialect(
        name="qwen3_coder",
        models="Qwen3-Coder, Qwen3.5, 3.6 and 3.8, MiMo",
        stems=("mimo", "qwen3-coder", "qwen3.5", "qwen3.6", "qwen3.8"),
        reasoning=THINK,
        calls=(tags("tool_call"),),
        aliases=(
            "qwen3_xml",
            "mimo",
            "qwen_xml",
            "qwen_coder",
            "qwen3_tagged",
            "qwen3_tagged_direct",
            "qwen3_5",
        ),
    ),
    Dialect(
        name="step3p5",
        models="Step-3.5-Flash",
        stems=("step-3.5", "step-3.7"),
        reasoning=ReasoningSyntax(close=("\n</think>\n",)),
        calls=(tags("tool_call"),),
        aliases=("step3_5", "step3_7"),
    ),
    Dialect(
        name="nemotron_v3",
        models="Nemotron 3",
        stems=("nemotron-3",),
        reasoning=THINK,
        calls=(tags("tool_call"),),
        aliases=("nemotron", "nemotron_3", "nano_v3"),
    ),
    Dialect(
        name="seed_oss",
        models="Seed-OSS",
        stems=("seed-oss",),
        reasoning=ReasoningSyntax(open=("<seed:think>",), close=("</seed:think>",)),
        calls=(tags("seed:tool_call", ""),),
    ),
)
