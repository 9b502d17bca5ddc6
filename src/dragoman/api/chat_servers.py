"""MCP servers in Chat Completions: the server runs their tools, and the client sees the answer only."""

from collections.abc import Iterator, Mapping, Sequence

from msgspec.structs import replace

from dragoman.api.chat_request import ChatRequest, spec
from dragoman.api.tool_choice import ease_calling
from dragoman.api.tools import Tool, free_name, wrong
from dragoman.errors import BadRequest
from dragoman.mcp import McpTool
from dragoman.turns.spec import TurnSpec
from dragoman.turns.toolbox import ServerWish


def has_servers(request: ChatRequest) -> bool:
    return any(tool.type == "mcp" for tool in request.tools or ())


def wishes(request: ChatRequest) -> list[ServerWish]:
    """The servers that the request names, all of which it may use without anybody being asked."""
    _check_servers(request)
    return [
        ServerWish(label=tool.server_label or "", allowed_tools=tool.allowed_tools, require_approval="never")
        for _, tool in _placed(request)
    ]


def _check_servers(request: ChatRequest) -> None:
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
    request: ChatRequest, listed: Mapping[str, Sequence[McpTool]]
) -> tuple[ChatRequest, dict[str, tuple[str, str]]]:
    """The request with functions in place of servers, and which tool of which server each of them is."""
    taken = {function["name"] for function in request.declared.functions}
    tools = [tool for tool in request.tools or () if tool.type != "mcp"]
    found: dict[str, tuple[str, str]] = {}
    for label, offered in listed.items():
        for tool in offered:
            name = free_name(tool.name, label, taken)
            taken.add(name)
            found[name] = (label, tool.name)
            described = {"name": name, "description": tool.description, "parameters": tool.input_schema}
            tools.append(Tool(function=described))
    return replace(request, tools=tools), found


def without_servers(request: ChatRequest) -> TurnSpec:
    """What can be said of the turn before any server was asked. A choice may name tools of theirs."""
    return spec(replace(request, tool_choice=None))


def after_calls(request: ChatRequest) -> TurnSpec:
    """What is asked of the turns behind the first: a call that was asked for has been made by then."""
    asked, first = request.calling, spec(request)
    if asked is None or not asked.required or first.reading is None:
        return first
    single = request.legacy or request.parallel_tool_calls is False
    reading = replace(first.reading, most_calls=1 if single else None)
    return replace(first, calling=ease_calling(asked, request.declared), reading=reading)
