"""Every kind of item that a context may have: what must be in it, and what it gets where it lacks it.

Fields that are not named here are kept as they come, because items travel: clients send back what this
server, or another one, gave them.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct, field

from dragoman.api.fields.shared import ShortText
from dragoman.api.read import Reader

ItemDict: TypeAlias = dict[str, Any]
"""An item as JSON. Not a struct: what it has beyond what we know of must come out again."""
Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=1024)]
Parts: TypeAlias = list[dict[str, Any]]
Status: TypeAlias = Literal[
    "in_progress", "completed", "incomplete", "searching", "interpreting", "generating", "calling", "failed"
]


class ItemBase(Struct, kw_only=True):
    id: Name | None = None
    status: Status | None = None


class MessageItem(ItemBase):
    role: Literal["user", "system", "developer", "assistant"]
    content: str | Parts
    phase: str | None = None


class ReasoningText(Struct):
    type: Literal["summary_text", "reasoning_text", "text"]
    text: str


class ReasoningItem(ItemBase):
    summary: list[ReasoningText] = field(default_factory=list)
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None


class FunctionCallItem(ItemBase):
    call_id: Name
    name: Name
    arguments: str
    namespace: ShortText | None = None


class CustomCallItem(ItemBase):
    call_id: Name
    name: Name
    input: str
    namespace: ShortText | None = None


class CallOutputItem(ItemBase):
    call_id: Name
    output: str | Parts
    name: ShortText | None = None
    namespace: ShortText | None = None


class McpListedTool(Struct):
    name: Name
    input_schema: dict[str, Any]
    description: str | None = None
    annotations: dict[str, Any] | None = None


class McpListItem(ItemBase):
    server_label: Name
    tools: list[McpListedTool]
    error: str | dict[str, Any] | None = None


class McpRequestItem(ItemBase):
    server_label: Name
    name: Name
    arguments: str


class McpCallItem(McpRequestItem):
    output: str | None = None
    error: str | dict[str, Any] | None = None
    approval_request_id: str | None = None


class McpAnswerItem(ItemBase):
    approval_request_id: Name
    approve: bool
    reason: str | None = None


class CompactionItem(ItemBase):
    encrypted_content: str


class ReferenceItem(ItemBase):
    id: Name


class ToolsItem(ItemBase):
    tools: Parts
    call_id: Name | None = None


class HostedItem(ItemBase):
    """A call of a tool that only some services have, or its output. Nobody here runs any of them."""

    call_id: Name | None = None
    action: dict[str, Any] | None = None
    operation: dict[str, Any] | None = None
    queries: list[str] | None = None
    code: str | None = None
    output: str | Parts | dict[str, Any] | None = None
    outputs: Parts | None = None
    results: Parts | None = None
    result: str | None = None


class PairedItem(HostedItem):
    """One of a call and its output, which name each other."""

    call_id: Name


class Kind(Struct, frozen=True):
    reader: Reader
    prefix: str
    """Of the ids of such items; empty for those that have none of their own."""
    defaults: Mapping[str, Any]
    """What SDKs require in it."""


def _kind(item: type[ItemBase], prefix: str, **defaults: Any) -> Kind:
    return Kind(Reader.of(item), prefix, defaults)


DONE: Mapping[str, Any] = {"status": "completed"}

KINDS: Mapping[str, Kind] = {
    "message": _kind(MessageItem, "msg_", **DONE),
    "reasoning": _kind(ReasoningItem, "rs_", summary=[], **DONE),
    "function_call": _kind(FunctionCallItem, "fc_", **DONE),
    "function_call_output": _kind(CallOutputItem, "fco_", **DONE),
    "custom_tool_call": _kind(CustomCallItem, "ctc_", **DONE),
    "custom_tool_call_output": _kind(CallOutputItem, "ctco_", **DONE),
    "mcp_list_tools": _kind(McpListItem, "mcpl_"),
    "mcp_call": _kind(McpCallItem, "mcp_", **DONE),
    "mcp_approval_request": _kind(McpRequestItem, "mcpr_"),
    "mcp_approval_response": _kind(McpAnswerItem, "mcpa_"),
    "compaction": _kind(CompactionItem, "cmp_"),
    "compaction_trigger": _kind(ItemBase, "cmpt_"),
    "item_reference": _kind(ReferenceItem, ""),
    "additional_tools": _kind(ToolsItem, "at_", role="developer"),
    "tool_search_call": _kind(HostedItem, "tsc_", execution="server", arguments={}, **DONE),
    "tool_search_output": _kind(ToolsItem, "tso_", execution="server", **DONE),
    "file_search_call": _kind(HostedItem, "fs_", queries=[], **DONE),
    "web_search_call": _kind(HostedItem, "ws_", **DONE),
    "code_interpreter_call": _kind(HostedItem, "ci_", **DONE),
    "image_generation_call": _kind(HostedItem, "ig_", **DONE),
    "computer_call": _kind(PairedItem, "cu_", pending_safety_checks=[], **DONE),
    "computer_call_output": _kind(PairedItem, "cuo_", **DONE),
    "local_shell_call": _kind(PairedItem, "lsh_", **DONE),
    "local_shell_call_output": _kind(HostedItem, "lsho_", **DONE),
    "shell_call": _kind(PairedItem, "sh_", **DONE),
    "shell_call_output": _kind(PairedItem, "sho_", **DONE),
    "apply_patch_call": _kind(PairedItem, "apc_", **DONE),
    "apply_patch_call_output": _kind(PairedItem, "apco_", **DONE),
    "program": _kind(PairedItem, "prog_"),
    "program_output": _kind(PairedItem, "progo_", **DONE),
}

SILENT = frozenset({"additional_tools", "mcp_list_tools", "mcp_approval_response", "compaction_trigger"})
"""Kinds that the model is not told of: they say what it may call, or what the server is to do."""
CALLS = frozenset(kind for kind in KINDS if kind.endswith("_call")) | {"program", "mcp_approval_request"}
"""Kinds that another item may answer."""
