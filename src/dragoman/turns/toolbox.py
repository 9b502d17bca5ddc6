"""Tools of MCP servers that the model has for one answer: which there are, and what comes of calling them.

In one way for all APIs: who may be asked, what is allowed, what has to be approved, how many calls are made,
and what is said where one fails. Which names the model knows the tools by is an API's own.
"""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Self, TypeAlias

from msgspec import Struct

from dragoman.mcp import CallResult, McpFailure, McpServers, McpSession, McpTool, ServerSpec
from dragoman.mcp.policy import AllowedTools, RequireApproval, allowed, needs_approval, pin_of

INVALID_PARAMS = -32602
TOO_MANY = CallResult("The call was not made: there were too many.", is_error=True)
"""What comes of a call beyond as many as an answer may have."""
Outcome: TypeAlias = CallResult | McpFailure


class ServerWish(Struct, frozen=True, kw_only=True):
    """An MCP server that a request names. A label alone is that of one of the operator's."""

    label: str
    url: str | None = None
    headers: dict[str, str] | None = None
    authorization: str | None = None
    allowed_tools: AllowedTools = None
    require_approval: RequireApproval = None


class ServedCall(Struct, frozen=True):
    """A call that the server makes for the model."""

    label: str
    name: str
    arguments: str
    pin: str | None = None
    """What the tool was described as when the call was approved, if it had to be and that is known."""


class Toolbox:
    """`check()` it; then `async with` it: the connections that a request opens end with it."""

    def __init__(self, servers: McpServers, wishes: Sequence[ServerWish], most_calls: int) -> None:
        self._servers = servers
        self._wishes = {wish.label: wish for wish in wishes}
        self._left = most_calls
        self._specs: dict[str, ServerSpec] = {}
        self._sessions: dict[str, McpSession] = {}
        self._tools: dict[tuple[str, str], McpTool] = {}
        self._stack = AsyncExitStack()

    @property
    def spent(self) -> bool:
        """Whether no further call is made."""
        return self._left == 0

    def check(self) -> None:
        """Refuses servers that are not there or not allowed."""
        for wish in self._wishes.values():
            self._specs[wish.label] = self._servers.resolve(
                wish.label, wish.url, wish.headers, wish.authorization
            )

    async def __aenter__(self) -> Self:
        for label, spec in self._specs.items():
            self._sessions[label] = await self._stack.enter_async_context(self._servers.session(spec))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    # What there is

    async def ask(self, label: str) -> list[McpTool]:
        """The tools that a server has, as far as they are allowed. Raises McpFailure."""
        return self.take(label, await self._sessions[label].list_tools())

    def take(self, label: str, tools: Sequence[McpTool]) -> list[McpTool]:
        """The same for a list that is known already."""
        kept = [tool for tool in tools if allowed(tool, self._wishes[label].allowed_tools)]
        self._tools = {key: tool for key, tool in self._tools.items() if key[0] != label}
        self._tools |= {(label, tool.name): tool for tool in kept}
        return kept

    def needs_approval(self, label: str, name: str) -> bool:
        return needs_approval(self._tools[label, name], self._wishes[label].require_approval)

    # Calls

    async def call(self, calls: Sequence[ServedCall]) -> list[Outcome]:
        """All at once. One that fails is told to the model, which may do better."""
        return await asyncio.gather(*map(self._call, calls))

    async def _call(self, call: ServedCall) -> Outcome:
        if self.spent:
            return TOO_MANY
        self._left -= 1
        tool = self._tools.get((call.label, call.name))
        if tool is None:
            # Approved in an earlier answer, by a client that has changed its mind since.
            message = f"The request has no MCP server '{call.label}' with a tool '{call.name}'."
            return McpFailure("protocol", message, INVALID_PARAMS)
        if call.pin is not None and call.pin != pin_of(tool):
            # The model may call it again as it is now, which has to be approved again.
            message = f"The call was not made: the tool '{call.name}' has changed since it was approved."
            return McpFailure("protocol", message, INVALID_PARAMS)
        try:
            return await self._sessions[call.label].call_as_written(call.name, call.arguments)
        except McpFailure as failure:
            return failure
