"""Which tools of a server a model may use, and which calls a person has to approve. Pure.

Whether a tool only reads is what its server says of it. Where a server is not trusted, tools should be named.
"""

import hashlib
from typing import Literal, TypeAlias

import msgspec
from msgspec import Struct

from dragoman.mcp.spec import McpTool


class ToolFilter(Struct, frozen=True, forbid_unknown_fields=True):
    """Matches a tool for which all that is given holds."""

    tool_names: list[str] | None = None
    read_only: bool | None = None

    @property
    def is_empty(self) -> bool:
        return self.tool_names is None and self.read_only is None

    def matches(self, tool: McpTool) -> bool:
        named = self.tool_names is None or tool.name in self.tool_names
        return named and (self.read_only is None or tool.read_only == self.read_only)


class ApprovalFilters(Struct, frozen=True, forbid_unknown_fields=True):
    always: ToolFilter | None = None
    never: ToolFilter | None = None


AllowedTools: TypeAlias = list[str] | ToolFilter | None
RequireApproval: TypeAlias = Literal["always", "never"] | ApprovalFilters | None


def allowed(tool: McpTool, allowed_tools: AllowedTools) -> bool:
    """`None` allows all."""
    if isinstance(allowed_tools, list):
        return tool.name in allowed_tools
    return allowed_tools is None or allowed_tools.matches(tool)


def needs_approval(tool: McpTool, policy: RequireApproval) -> bool:
    """In doubt, yes: where nothing is said, where both filters match, and where neither does."""
    if not isinstance(policy, ApprovalFilters):
        return policy != "never"
    if policy.always is not None and not policy.always.is_empty and policy.always.matches(tool):
        return True
    never = policy.never
    return never is None or never.is_empty or not never.matches(tool)


_ENCODER = msgspec.json.Encoder(order="sorted")


def pin_of(tool: McpTool) -> str:
    """What is approved is a call of a tool as it was described: another word of that, another pin."""
    described = _ENCODER.encode([tool.name, tool.description, tool.input_schema])
    return hashlib.sha256(described).hexdigest()[:16]
