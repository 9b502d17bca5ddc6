"""Zhipu's GLM and models with the same syntax: a name, then pairs of <arg_key> and <arg_value>."""

from dragoman.dialects.declarations import CallSection, Dialect, ReasoningSyntax, TaggedCalls


def pairs(
    outer: str,
    layout: str = "\n",
    *,
    tag: str = "{}",
    after_name: str = "",
    section: CallSection | None = None,
) -> TaggedCalls:
    """Declare GLM calls. `tag` is the format of a tag's name, such as `{}:opensource`."""

    def opened(name: str) -> str:
        return f"<{tag.format(name)}>"

    def closed(name: str) -> str:
        return f"</{tag.format(name)}>"

    return TaggedCalls(
        section=section,
        before="\n",
        between=layout,
        open=(opened(outer),),
        then=(f"{after_name}{layout}",) if after_name else ("\n",),
        key=(opened("arg_key"),),
        key_end=(f"{closed('arg_key')}{layout}",),
        value=opened("arg_value"),
        value_end=(f"{closed('arg_value')}{layout}",),
        close=(closed(outer),),
        open_end=True,
    )


def hunyuan(suffix: str, separator: str = "", layout: str = "\n") -> TaggedCalls:
    section = CallSection(open=(f"<tool_calls{suffix}>{layout}",), close=(f"{layout}</tool_calls{suffix}>",))
    return pairs(
        "tool_call",
        layout,
        tag="{}" + suffix,
        after_name=f"<{separator}{suffix}>" if separator else "",
        section=section,
    )


THINK = ReasoningSyntax(open=("<think>",), close=("</think>",))
ENDED_BY_CALL = ReasoningSyntax(open=("<think>",), close=("</think>",), ended_by_call=True)
HY_THINK = ReasoningSyntax(
    open=("<think>", "<think:opensource>"), close=("</think>", "</think:opensource>"), ended_by_call=True
)

DIALECTS = (
    Dialect(
        name="glm45",
        models="GLM-4.5 and 4.6",
        stems=("glm-4.5", "glm-4.6"),
        reasoning=ENDED_BY_CALL,
        calls=(pairs("tool_call"),),
        aliases=("glm", "glm4", "glm45_moe", "glm4_5", "glm4_6"),
    ),
    Dialect(
        name="glm47",
        models="GLM-4.7, 4.7-Flash, GLM-5",
        stems=("glm-4.7", "glm-5"),
        reasoning=ENDED_BY_CALL,
        calls=(pairs("tool_call", ""),),
        aliases=("glm47_moe", "glm4_7"),
    ),
    Dialect(
        name="ling3",
        models="Ling 3",
        stems=("ling-3", "ling3"),
        reasoning=THINK,
        calls=(pairs("tool_call", ""),),
        aliases=("ling",),
    ),
    Dialect(
        name="poolside_v1",
        models="Poolside Laguna",
        stems=("laguna",),
        reasoning=THINK,
        calls=(pairs("tool_call"),),
        aliases=("laguna",),
    ),
    Dialect(
        name="iquest", models="IQuest", stems=("iquest",), reasoning=THINK, calls=(pairs("iquest_tool_call"),)
    ),
    Dialect(
        name="k2_horizon",
        models="K2 Horizon",
        stems=("k2-horizon",),
        reasoning=ReasoningSyntax(open=("<ifm|think>",), close=("</ifm|think>",)),
        calls=(
            pairs(
                "tool_call",
                "",
                tag="ifm|{}",
                section=CallSection(open=("<ifm|tool_calls>",), close=("</ifm|tool_calls>",)),
            ),
        ),
    ),
    Dialect(
        name="hy_v3",
        models="Tencent Hy3",
        stems=("hy3",),
        reasoning=HY_THINK,
        calls=(hunyuan("", "tool_sep"), hunyuan(":opensource", "tool_sep")),
        aliases=("hunyuan", "hy3"),
    ),
    Dialect(
        name="hy_v4",
        models="Tencent Hy4",
        stems=("hy4",),
        reasoning=ReasoningSyntax(
            open=("<think:opensource>", "<think>"),
            close=("</think:opensource>", "</think>"),
            ended_by_call=True,
        ),
        calls=(hunyuan(":opensource", layout=""), hunyuan("", layout="")),
        aliases=("hy4",),
    ),
)
