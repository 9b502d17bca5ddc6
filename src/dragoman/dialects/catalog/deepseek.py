"""DeepSeek: sections of named calls with JSON arguments; from V3.2 on, tags with the DSML prefix."""

from msgspec.structs import replace

from dragoman.dialects.catalog.json_objects import CALLS as HERMES
from dragoman.dialects.declarations import CallSection, Dialect, NamedCalls, ReasoningSyntax, TaggedCalls

THINK = ReasoningSyntax(open=("<think>",), close=("</think>",))
SECTION = CallSection(open=("<｜tool▁calls▁begin｜>",), close=("<｜tool▁calls▁end｜>",))
FENCED = NamedCalls(
    section=SECTION,
    open=("<｜tool▁call▁begin｜>function<｜tool▁sep｜>",),
    then=("\n```json\n",),
    close=("\n```<｜tool▁call▁end｜>", "<｜tool▁call▁end｜>", "\n```"),
    between="\n",
)


def dsml(outer: str, space: str = "") -> TaggedCalls:
    """Declare `<｜DSML｜invoke name="f">` calls, whose parameters state whether they are strings."""
    tag, end = f"<｜DSML｜{space}", f"</｜DSML｜{space}"
    return TaggedCalls(
        section=CallSection(open=(f"{tag}{outer}>\n",), close=(f"{end}{outer}>",), required=True),
        before="\n\n",
        open=(f'{tag}invoke name="',),
        then=('">\n',),
        empty=('"/>',),
        key=(f'{tag}parameter name="',),
        key_end=('" string="', '">'),
        type_end=('">',),
        types="string",
        value_end=(f"{end}parameter>\n",),
        close=(f"{end}invoke>\n",),
        json_body=True,
        open_end=True,
    )


DIALECTS = (
    Dialect(
        name="deepseek_v3",
        models="DeepSeek V3, V3-0324, R1-0528",
        stems=("deepseek-r1-0528", "deepseek-v3"),
        reasoning=THINK,
        calls=(FENCED,),
        aliases=("deepseek", "deepseekv3", "deepseek-v3"),
    ),
    Dialect(
        name="deepseek_v31",
        models="DeepSeek V3.1, V3.2-Exp",
        stems=("deepseek-v3.1", "deepseek-v3.2-exp"),
        reasoning=THINK,
        calls=(
            NamedCalls(
                section=SECTION,
                open=("<｜tool▁call▁begin｜>",),
                then=("<｜tool▁sep｜>",),
                close=("<｜tool▁call▁end｜>",),
            ),
        ),
        aliases=("deepseekv31", "deepseek31", "deepseek-v31"),
    ),
    Dialect(
        name="deepseek_v32",
        models="DeepSeek V3.2",
        stems=("deepseek-v3.2",),
        reasoning=THINK,
        calls=(dsml("function_calls"),),
        aliases=("deepseekv32", "deepseek32", "deepseek-v32"),
    ),
    Dialect(
        name="deepseek_v4",
        models="DeepSeek V4",
        stems=("deepseek-v4",),
        reasoning=ReasoningSyntax(open=("<think>",), close=("</think>",), ended_by_call=True),
        calls=(dsml("tool_calls"),),
        aliases=("deepseekv4", "dsv4", "deepseek-v4"),
    ),
    Dialect(
        name="deepseek_v41",
        models="DeepSeek V4.1",
        stems=("deepseek-v4.1",),
        reasoning=THINK,
        calls=(dsml("calls", " "),),
        aliases=("deepseek_v4.1", "deepseekv41"),
    ),
    Dialect(
        name="deepseek_r1",
        models="DeepSeek R1 and its distills",
        stems=("deepseek-r1",),
        reasoning=replace(THINK, always=True),
        calls=(FENCED,),
        aliases=("deepseek-r1",),
    ),
    Dialect(
        name="deepseek_r1_template",
        models="R1 distills whose template opens reasoning",
        reasoning=ReasoningSyntax(),
        calls=(FENCED, HERMES),
    ),
)
