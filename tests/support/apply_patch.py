"""A grammar that coding agents send with a custom tool, and texts in it."""

from typing import Any

APPLY_PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF
%import common.LF
"""
PATCH = "*** Begin Patch\n*** Update File: a b\n@@ f\n-x = '\\\"'\n+\tx = <b> \n*** End Patch"
NO_PATCHES = [PATCH + "\n\n", PATCH.replace("@@", "@"), PATCH.replace("\n", ""), ""]


def as_tool(name: str, grammar: str) -> dict[str, Any]:
    """What a custom tool is for the model."""
    schema = {
        "type": "object",
        "properties": {"input": {"type": "string", "x-lark": grammar}},
        "required": ["input"],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
