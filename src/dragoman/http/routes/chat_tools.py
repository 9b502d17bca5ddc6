"""Chat Completions with tools of the server's own MCP servers: listed first, and run between turns."""

from contextlib import AsyncExitStack

from dragoman.api import chat_request
from dragoman.api.chat_request import ChatRequest
from dragoman.api.chat_servers import after_calls, wishes, with_tools, without_servers
from dragoman.errors import Unavailable
from dragoman.http.exchange import Exchange
from dragoman.http.host import Host
from dragoman.mcp import McpFailure, McpTool
from dragoman.turns.spec import TurnSpec
from dragoman.turns.tool_loop import HiddenCalls, ToolLoop
from dragoman.turns.toolbox import Toolbox
from dragoman.turns.turn import Turn


async def plan_with_servers(
    host: Host, exchange: Exchange, request: ChatRequest, body_bytes: int, id_: str, stack: AsyncExitStack
) -> HiddenCalls:
    """An answer for which the server runs tools; its connections are the stack's."""

    async def plan(spec: TurnSpec) -> Turn:
        return await host.model.turn(spec, exchange.owner, body_bytes, id_)

    asked = wishes(request)
    toolbox = Toolbox(host.mcp, asked, host.limits.tool_calls)
    toolbox.check()
    await host.model.check(without_servers(request), exchange.owner, body_bytes)
    await stack.enter_async_context(toolbox)
    listed = {wish.label: await _ask(toolbox, wish.label) for wish in asked}
    request, names = with_tools(request, listed)
    chat_request.check_conversation(request, host.limits)
    first = chat_request.spec(request)
    loop = ToolLoop(toolbox, first.sampling.max_tokens or None, exchange.facts)
    return HiddenCalls(loop, await plan(first), after_calls(request), names, plan)


async def _ask(toolbox: Toolbox, label: str) -> list[McpTool]:
    """A client of this API has no way to see that a server is not there, other than a failure."""
    try:
        return await toolbox.ask(label)
    except McpFailure as failure:
        raise Unavailable(failure.message, param="tools", code="mcp_unavailable") from None
