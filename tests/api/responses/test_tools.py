from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace
from openai.types.responses import Tool
from pydantic import TypeAdapter

from dragoman.api.request_decoder import IgnoredFields
from dragoman.api.responses.tools import ModelTools, ToolRef, echo, offer_tools
from dragoman.errors import BadRequest
from dragoman.limits import Limits
from tests.api.responses.listed import listed_tool

FUNCTION = {"type": "function", "name": "f"}
CUSTOM = {"type": "custom", "name": "c"}
MCP = {"type": "mcp", "server_label": "files", "server_url": "https://files.example/mcp"}


def offer(*tools: dict[str, Any], items: Sequence[dict[str, Any]] = ()) -> ModelTools:
    return offer_tools(tools, Limits(), items, IgnoredFields("error"))


def refused(*tools: dict[str, Any]) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        offer(*tools)
    return caught.value


def space(name: str, *tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "namespace", "name": name, "description": "About files.", "tools": list(tools)}


def test_a_function_is_offered_without_what_the_model_need_not_know() -> None:
    tool = {**FUNCTION, "description": "d", "strict": True, "defer_loading": True, "async": False}
    [function] = offer({**tool, "allowed_callers": ["direct"], "output_schema": {}}).functions
    assert function == {"name": "f", "description": "d", "parameters": None, "strict": True}


def test_a_custom_tool_is_offered_as_a_function() -> None:
    tools = offer({**CUSTOM, "format": {"type": "grammar", "syntax": "regex", "definition": "a+"}})
    [function] = tools.functions
    assert function["parameters"]["properties"]["input"]["pattern"] == "^(?:a+)$"
    assert (tools.custom, tools.refs) == (frozenset({"c"}), {"c": ToolRef("custom", "c")})


@pytest.mark.parametrize("name", ["files", "files_", "files__"])
def test_a_namespace_is_part_of_the_name(name: str) -> None:
    tools = offer(space(name, FUNCTION, CUSTOM))
    assert tools.refs == {
        "files__f": ToolRef("function", "f", namespace=name),
        "files__c": ToolRef("custom", "c", namespace=name),
    }
    assert tools.custom == {"files__c"}
    assert tools.functions[0]["description"] == "About files."


@pytest.mark.parametrize(
    ("tool", "place", "code"),
    [
        ({"type": "teleport"}, "tools[1].type", "invalid_value"),
        ({"type": ["function"]}, "tools[1].type", "invalid_value"),
        ({}, "tools[1].type", "invalid_value"),
        ({"type": "function"}, "tools[1].name", "missing_field"),
        ({"type": "function", "name": ""}, "tools[1].name", "invalid_value"),
        ({"type": "function", "name": "f"}, "tools[1].name", "invalid_value"),
        ({"type": "function", "name": "g", "parameters": []}, "tools[1].parameters", "invalid_value"),
        (
            {"type": "function", "name": "g", "parameters": {"type": "array"}},
            "tools[1].parameters.type",
            "invalid_value",
        ),
        ({"type": "function", "name": "g", "colour": 1}, "tools[1].colour", "unknown_field"),
        ({"type": "custom", "name": "g", "format": {"type": "x"}}, "tools[1].format.type", "invalid_value"),
        (
            {"type": "custom", "name": "g", "format": {"type": "grammar", "syntax": "regex"}},
            "tools[1].format.definition",
            "missing_field",
        ),
        (space("n", {"type": "mcp"}), "tools[1].tools[0].type", "invalid_value"),
        (space("n", FUNCTION, FUNCTION), "tools[1].tools[1].name", "invalid_value"),
        (space("", FUNCTION), "tools[1].name", "invalid_value"),
        ({"type": "mcp"}, "tools[1].server_label", "missing_field"),
        ({**MCP, "server_url": "file:///etc"}, "tools[1].server_url", "invalid_value"),
        ({**MCP, "connector_id": "c"}, "tools[1].connector_id", "unsupported_field"),
        ({**MCP, "tunnel_id": "c"}, "tools[1].tunnel_id", "unsupported_field"),
        ({**MCP, "require_approval": "maybe"}, "tools[1].require_approval", "invalid_value"),
        ({**MCP, "headers": {"a": 1}}, "tools[1].headers[...]", "invalid_value"),
    ],
)
def test_a_bad_tool_is_named_by_its_place(tool: dict[str, Any], place: str, code: str) -> None:
    error = refused(FUNCTION, tool)
    assert (error.param, error.code) == (place, code)


def test_two_servers_have_two_labels() -> None:
    assert refused(MCP, MCP).param == "tools[1].server_label"


def test_there_is_a_limit_of_tools() -> None:
    with pytest.raises(BadRequest) as caught:
        offer_tools([FUNCTION, CUSTOM], Limits(tools=1))
    assert (caught.value.param, caught.value.code) == ("tools", "limit_exceeded")


def test_hosted_tools_are_hidden_from_the_model() -> None:
    tools = offer({"type": "web_search", "filters": {}}, {"type": "shell"}, FUNCTION)
    assert tools.hidden == ("web_search", "shell")
    assert [function["name"] for function in tools.functions] == ["f"]


def test_a_server_is_kept_as_it_was_declared() -> None:
    approval = {"never": {"tool_names": ["read"]}, "always": {"read_only": False}}
    [server] = offer({**MCP, "require_approval": approval, "authorization": "secret"}).mcp
    assert (server.server_label, server.authorization) == ("files", "secret")
    assert not isinstance(server.require_approval, str | None)
    assert server.require_approval.never is not None
    assert server.require_approval.never.tool_names == ["read"]


def test_the_tools_of_a_server_keep_their_names_where_they_can() -> None:
    tools = offer(FUNCTION, MCP).with_mcp("files", [listed_tool("read", "Reads."), listed_tool("f")])
    refs = {name: replace(ref, pin="") for name, ref in tools.refs.items()}
    assert refs["read"] == ToolRef("mcp", "read", server_label="files")
    assert refs["files__f"] == ToolRef("mcp", "f", server_label="files")
    shown = {"name": "read", "description": "Reads.", "parameters": {"type": "object"}}
    assert tools.functions[1] == shown


def test_no_tool_of_a_server_covers_another() -> None:
    tools = offer(FUNCTION).with_mcp("files", [listed_tool("f"), listed_tool("f"), listed_tool("f")])
    assert list(tools.refs) == ["f", "files__f", "files__f_2", "files__f_3"]


def test_a_call_of_the_history_gets_the_name_that_the_model_sees() -> None:
    visible = (
        offer(FUNCTION, space("n", FUNCTION))
        .with_mcp("files", [listed_tool("f"), listed_tool("g")])
        .visible()
    )
    assert visible(None, "f") == "f"
    assert visible("n", "f") == "n__f"
    assert visible("files", "f") == "files__f"
    assert visible("files", "g") == "g"
    assert visible("gone", "f") == "gone__f"


def test_tools_that_were_loaded_on_the_way_are_offered_once() -> None:
    loaded = {**FUNCTION, "name": "late"}
    items = [
        {"type": "tool_search_output", "tools": [loaded, FUNCTION]},
        {"type": "additional_tools", "tools": [{**loaded, "description": "newer"}]},
    ]
    tools = offer(FUNCTION, items=items)
    assert [(one["name"], one["description"]) for one in tools.functions] == [("f", None), ("late", "newer")]


def test_tools_are_echoed_without_secrets() -> None:
    secret = {**MCP, "authorization": "s3cret", "headers": {"X-Key": "s3cret"}}
    [shown] = echo([secret])
    assert "s3cret" not in str(shown)
    assert shown["headers"] == {"X-Key": "<redacted>"}


@pytest.mark.parametrize("tool", [FUNCTION, CUSTOM, MCP, space("n", FUNCTION), {"type": "web_search"}])
def test_the_sdk_can_read_what_is_echoed(tool: dict[str, Any]) -> None:
    [shown] = echo([tool])
    TypeAdapter(Tool).validate_python(shown)
    assert shown.items() >= tool.items()
