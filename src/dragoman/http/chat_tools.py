"""Chat Completions with tools of the server's own MCP servers: listed first, and run between turns."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from contextlib import AsyncExitStack

from msgspec.structs import replace

from dragoman.api import chat_request
from dragoman.api.chat_request import ChatRequest
from dragoman.api.chat_servers import check_servers, servers, with_tools
from dragoman.errors import Unavailable
from dragoman.http.host import Host
from dragoman.mcp import McpFailure, McpSession, McpTool
from dragoman.mcp.policy import allowed
from dragoman.turns.spec import TurnSpec
from dragoman.turns.tool_turn import ToolTurn
from dragoman.turns.turn import Turn
from dragoman.types import Conversation, Message, ToolCall


async def turn(
    host: Host, request: ChatRequest, owner: str, body_bytes: int, id_: str, stack: AsyncExitStack
) -> Turn:
    """A turn that runs the tools of the servers which the request names; its connections are the stack's."""
    check_servers(request)
    sessions, listed = {}, {}
    for tool in servers(request):
        label = tool.server_label or ""
        spec = host.mcp.resolve(label, param="tools")
        sessions[label] = await stack.enter_async_context(host.mcp.session(spec))
        listed[label] = [each for each in await _tools(sessions[label]) if allowed(each, tool.allowed_tools)]
    request, found = with_tools(request, listed)
    chat_request.check_conversation(request, host.limits)
    first = chat_request.spec(request)
    runner = Runner(sessions, found, host.limits.tool_calls)

    async def again(said: Sequence[Message]) -> Turn:
        return await host.turn(_longer(first, said, runner.left > 0), owner, body_bytes, id_)

    return ToolTurn(await host.turn(first, owner, body_bytes, id_), runner, again)


async def _tools(session: McpSession) -> list[McpTool]:
    try:
        return await session.list_tools()
    except McpFailure as failure:
        raise Unavailable(failure.message, param="tools", code="mcp_unavailable") from None


def _longer(spec: TurnSpec, said: Sequence[Message], more: bool) -> TurnSpec:
    """What was said since comes behind what the client sent; a call that was asked for has been made."""
    (told,) = spec.prompts
    assert isinstance(told, Conversation) and spec.reading is not None
    told = replace(told, messages=(*told.messages, *said))
    calling = None if spec.calling is not None and spec.calling.required else spec.calling
    return replace(
        spec,
        prompts=(told if more else replace(told, tools=()),),
        calling=calling if more else None,
        reading=spec.reading if more else replace(spec.reading, calls=False),
    )


class Runner:
    """Runs at most as many calls as one answer may have."""

    def __init__(
        self, sessions: Mapping[str, McpSession], found: Mapping[str, tuple[str, str]], most: int
    ) -> None:
        self.left = most
        self._sessions = sessions
        self._found = found

    @property
    def names(self) -> Collection[str]:
        return self._found.keys()

    async def run(self, calls: Sequence[ToolCall]) -> list[str]:
        return await asyncio.gather(*map(self._run, calls))

    async def _run(self, call: ToolCall) -> str:
        if self.left <= 0:
            return "Error: the call was not made, because there were too many."
        self.left -= 1
        label, name = self._found[call.name]
        try:
            result = await self._sessions[label].call_as_written(name, call.arguments)
        except McpFailure as failure:
            return f"Error: {failure.message}"
        return f"Error: {result.text}" if result.is_error else result.text
