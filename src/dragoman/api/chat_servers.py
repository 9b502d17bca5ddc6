"""MCP servers in Chat Completions: the server runs their tools, and the client sees the answer only."""

from collections.abc import Iterator, Mapping, Sequence

from msgspec.structs import replace

from dragoman.api.chat_request import ChatRequest
from dragoman.api.mcp_tools import McpToolLike
from dragoman.api.tools import Tool, wrong
from dragoman.errors import BadRequest


def servers(request: ChatRequest) -> list[Tool]:
    """The servers that the request names, all of which it may use without anybody being asked."""
    return [tool for _, tool in _placed(request)]


def check_servers(request: ChatRequest) -> None:
    seen: set[str] = set()
    for place, tool in _placed(request):
        if not tool.server_label:
            raise wrong(f"{place}.server_label", "must be the label of one of this server's MCP servers")
        if tool.server_label in seen:
            raise wrong(f"{place}.server_label", "is there a second time; labels must differ")
        seen.add(tool.server_label)
        if tool.require_approval != "never":
            message = (
                'Chat Completions has no way to ask for approval: send require_approval "never", or use the'
                " Responses API."
            )
            raise BadRequest(message, param=f"{place}.require_approval", code="invalid_value")
    if seen and request.ids is not None:
        param, _ = request.ids
        message = f"The tools of an MCP server cannot be told to a prompt of ids; leave out {param}."
        raise BadRequest(message, param=param, code="invalid_value")
    if seen and (request.n or 1) > 1:
        raise BadRequest(
            "With MCP servers there is one answer; leave out n.", param="n", code="invalid_value"
        )


def _placed(request: ChatRequest) -> Iterator[tuple[str, Tool]]:
    for number, tool in enumerate(request.tools or ()):
        if tool.type == "mcp":
            yield f"tools[{number}]", tool


def with_tools(
    request: ChatRequest, listed: Mapping[str, Sequence[McpToolLike]]
) -> tuple[ChatRequest, dict[str, tuple[str, str]]]:
    """The request with functions in place of servers, and which tool of which server each of them is."""
    own = {function.get("name") for function in request.declared.functions}
    tools = [tool for tool in request.tools or () if tool.type != "mcp"]
    found: dict[str, tuple[str, str]] = {}
    for label, offered in listed.items():
        for tool in offered:
            name = tool.name if tool.name not in own and tool.name not in found else f"{label}__{tool.name}"
            found[name] = (label, tool.name)
            described = {"name": name, "description": tool.description, "parameters": tool.input_schema}
            tools.append(Tool(function=described))
    return replace(request, tools=tools), found
