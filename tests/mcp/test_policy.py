import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.mcp import McpTool
from dragoman.mcp.servers import (
    AllowedTools,
    ApprovalFilters,
    RequireApproval,
    ToolFilter,
    allows_tool,
    needs_approval,
)

READ = McpTool("read", None, {}, {"readOnlyHint": True})
WRITE = McpTool("write", None, {}, {"readOnlyHint": False})
PLAIN = McpTool("plain", None, {})
TOOLS = (READ, WRITE, PLAIN)


def names(filtered: AllowedTools) -> list[str]:
    return [tool.name for tool in TOOLS if allows_tool(tool, filtered)]


@pytest.mark.parametrize(
    ("given_json", "expected"),
    [
        ("null", ["read", "write", "plain"]),
        ("[]", []),
        ('["*"]', ["read", "write", "plain"]),
        ('["write", "other"]', ["write"]),
        ("{}", ["read", "write", "plain"]),
        ('{"tool_names": ["read", "plain"]}', ["read", "plain"]),
        ('{"tool_names": []}', []),
        ('{"read_only": true}', ["read"]),
        ('{"read_only": false}', ["write", "plain"]),
        ('{"read_only": true, "tool_names": ["read", "write"]}', ["read"]),
    ],
)
def test_allowed_tools(given_json: str, expected: list[str]) -> None:
    assert names(msgspec.json.decode(given_json, type=AllowedTools)) == expected


@pytest.mark.parametrize(
    ("given_json", "expected"),
    [
        ("null", ["read", "write", "plain"]),
        ('"always"', ["read", "write", "plain"]),
        ('"never"', []),
        ("{}", ["read", "write", "plain"]),
        ('{"never": {}}', ["read", "write", "plain"]),
        ('{"never": {"tool_names": ["read"]}}', ["write", "plain"]),
        ('{"never": {"tool_names": ["*"]}}', ["read", "write", "plain"]),
        ('{"never": {"read_only": true}}', ["write", "plain"]),
        ('{"always": {"tool_names": ["read"]}}', ["read", "write", "plain"]),
        (
            '{"always": {"tool_names": ["read"]}, "never": {"tool_names": ["read", "write"]}}',
            ["read", "plain"],
        ),
        ('{"always": {"read_only": false}, "never": {"tool_names": ["read", "write"]}}', ["write", "plain"]),
        ('{"always": {}, "never": {"tool_names": ["read"]}}', ["write", "plain"]),
    ],
)
def test_require_approval(given_json: str, expected: list[str]) -> None:
    policy = msgspec.json.decode(given_json, type=RequireApproval)
    assert [tool.name for tool in TOOLS if needs_approval(tool, policy)] == expected


@pytest.mark.parametrize(
    "text", ['"sometimes"', '{"ask": {}}', '{"always": {"names": []}}', '{"never": ["a"]}']
)
def test_other_shapes_are_refused(text: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=RequireApproval)


FILTERS = st.builds(
    ToolFilter,
    st.none() | st.lists(st.sampled_from(["read", "write", "plain", "other"])),
    st.none() | st.booleans(),
)


@given(st.sampled_from(TOOLS), FILTERS, FILTERS)
def test_nothing_is_called_unasked_unless_never_names_it(
    tool: McpTool, always: ToolFilter, never: ToolFilter
) -> None:
    if not needs_approval(tool, ApprovalFilters(always, never)):
        assert never.matches(tool)
        assert never != ToolFilter()
        assert always == ToolFilter() or not always.matches(tool)
