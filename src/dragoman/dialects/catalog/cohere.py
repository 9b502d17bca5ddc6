"""Cohere Command: a list of actions; markers around text, reasoning and citations."""

from dragoman.dialects.declarations import ActionCalls, Dialect, JsonCalls, ReasoningSyntax

THINKING = ReasoningSyntax(
    open=("<|START_THINKING|>",),
    close=("<|END_THINKING|>",),
    ended_by=("<|START_ACTION|>", "<|START_RESPONSE|>", "<|START_TEXT|>"),
)
ACTIONS = JsonCalls(
    open=("<|START_ACTION|>\n", "<|START_ACTION|>"),
    close=("\n<|END_ACTION|>",),
    list="must",
    indent="    ",
    name=("tool_name",),
    arguments=("parameters",),
    id=("tool_call_id",),
)
TEXT_MARKS = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>", "<co>")
CITATION = (("</co:", ">"),)

DIALECTS = (
    Dialect(
        name="cohere_command3",
        models="Command R7B, Command A, Command A Reasoning",
        stems=("command-a", "command-r7b"),
        reasoning=THINKING,
        calls=(ACTIONS,),
        drops=TEXT_MARKS,
        drop_spans=CITATION,
        text_open="<|START_RESPONSE|>",
        text_close="<|END_RESPONSE|>",
        aliases=("cohere", "cohere_cmd"),
    ),
    Dialect(
        name="cohere_command4",
        models="Command 4, Cohere2 MoE",
        stems=("cohere2moe", "north-mini"),
        reasoning=THINKING,
        calls=(ACTIONS,),
        drops=TEXT_MARKS,
        drop_spans=CITATION,
        text_open="<|START_TEXT|>",
        text_close="<|END_TEXT|>",
    ),
    Dialect(
        name="cohere_command_r_plus",
        models="Command R+",
        stems=("command-r-plus",),
        calls=(
            ActionCalls(
                open=("Action:\n```json\n",),
                close=("\n```",),
                list="must",
                indent="    ",
                before="\n",
                name=("tool_name",),
                arguments=("parameters",),
                ignored=("directly-answer", "directly_answer"),
            ),
        ),
        drops=("<|CHATBOT_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
    ),
)
