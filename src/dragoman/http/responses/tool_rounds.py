"""The tools that the server runs for the model: listed once, called between the turns of one response."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from msgspec import Struct

from dragoman.api.mcp_tools import McpDeclaration
from dragoman.api.responses.approvals import is_as_approved
from dragoman.api.responses.history import pending_approvals
from dragoman.api.responses.server_calls import (
    ServerCall,
    approved_call,
    execution_error,
    http_error,
    listed,
    protocol_error,
)
from dragoman.api.responses.tools import Offer
from dragoman.api.responses.writer import ResponseWriter
from dragoman.mcp import CallResult, McpFailure, McpServers, McpSession, McpTool, ServerSpec
from dragoman.mcp.policy import allowed, needs_approval

logger = logging.getLogger("dragoman.http")

R = TypeVar("R")
GATEWAY_TIMEOUT, BAD_GATEWAY = 504, 502
INVALID_PARAMS = -32602


class Voice(Struct, frozen=True):
    """How the client hears of what happens between turns."""

    say: Callable[[bytes], Awaitable[None]]
    while_waiting: Callable[[Awaitable[Any]], Awaitable[Any]]
    """Waits for something, and keeps the connection alive meanwhile."""


class ToolRounds:
    """`async with` it: the connections that a request opens end with it."""

    def __init__(
        self, servers: McpServers, offer: Offer, before: Sequence[dict[str, Any]], most_calls: int
    ) -> None:
        self.offer = offer
        self._servers = servers
        self._before = before
        self._listed: dict[str, list[dict[str, Any]]] | None = None
        """The tools of each server as they were listed last in what was said before."""
        self._left = most_calls
        self._specs: dict[str, ServerSpec] = {}
        self._sessions: dict[str, McpSession] = {}
        self._tools: dict[tuple[str, str], McpTool] = {}
        self._stack = AsyncExitStack()

    @property
    def must_ask(self) -> bool:
        """Whether tools are known only once their servers have been asked."""
        return bool(self.offer.mcp)

    @property
    def spent(self) -> bool:
        """Whether no further call is made."""
        return self._left == 0

    def check(self) -> None:
        """Refuses servers that are not there or not allowed."""
        for each in self.offer.mcp:
            self._specs[each.server_label] = self._servers.resolve(
                each.server_label, each.server_url, each.headers, each.authorization, param="tools"
            )

    async def __aenter__(self) -> "ToolRounds":
        for label, spec in self._specs.items():
            self._sessions[label] = await self._stack.enter_async_context(self._servers.session(spec))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    # Lists

    async def begin(self, writer: ResponseWriter, voice: Voice) -> None:
        """Asks the servers what they have, and runs what the client has approved since."""
        approved = [asked for asked, _ in pending_approvals(self._before)]
        labels = {asked["server_label"] for asked in approved}
        for declared in self.offer.mcp:
            await self._list(declared, writer, voice, afresh=declared.server_label in labels)
        for asked in approved:
            written, call = approved_call(
                writer.place("mcp_"), asked["server_label"], asked["name"], asked["arguments"], asked["id"]
            )
            writer.for_server.append(call)
            await voice.say(written)
        await self.run(writer, voice)

    async def _list(
        self, declared: McpDeclaration, writer: ResponseWriter, voice: Voice, *, afresh: bool
    ) -> None:
        """`afresh`: a call was approved, so that it matters whether the list is still true."""
        label, known = declared.server_label, self._known(declared)
        if known is None or afresh:
            tools, error = await voice.while_waiting(self._ask(label))
            before, known = known, [tool for tool in tools if allowed(tool, declared.allowed_tools)]
            if known != before:
                shown = [_shown(tool) for tool in known]
                written, item = listed(place := writer.place("mcpl_"), label, shown, error)
                writer.finished(place, item)
                await voice.say(written)
        self._tools |= {(label, tool.name): tool for tool in known}
        self.offer = self.offer.with_mcp(label, known)

    def _known(self, declared: McpDeclaration) -> list[McpTool] | None:
        """What an earlier response has listed is not asked for again."""
        if self._listed is None:
            self._listed = {
                item["server_label"]: item["tools"]
                for item in self._before
                if item.get("type") == "mcp_list_tools" and not item.get("error")
            }
        listed = self._listed.get(declared.server_label)
        if listed is None:
            return None
        return [tool for tool in map(_tool, listed) if allowed(tool, declared.allowed_tools)]

    async def _ask(self, label: str) -> tuple[list[McpTool], str | None]:
        try:
            return await self._sessions[label].list_tools(), None
        except McpFailure as failure:
            logger.warning("The tools of the MCP server %s are not known: %s", label, failure.message)
            return [], failure.message

    def needs_approval(self, visible: str) -> bool:
        ref = self.offer.refs[visible]
        declared = next(each for each in self.offer.mcp if each.server_label == ref.server_label)
        return needs_approval(self._tools[declared.server_label, ref.name], declared.require_approval)

    # Calls

    async def run(self, writer: ResponseWriter, voice: Voice) -> None:
        """All calls of one turn at once. One that fails is told to the model, which may do better."""
        calls = writer.for_server
        results = await voice.while_waiting(asyncio.gather(*map(self._call, calls)))
        for call, (output, error) in zip(calls, results, strict=True):
            written, item = call.done(output, error)
            writer.finished(call.item.place, item)
            await voice.say(written)
        if self.spent:
            # The model is offered nothing that it could not have.
            self.offer = self.offer.without_mcp()

    async def _call(self, call: ServerCall) -> tuple[str | None, dict[str, Any] | None]:
        """The result, or what went wrong."""
        if self.spent:
            return None, execution_error("The call was not made: max_tool_calls is reached.")
        self._left -= 1
        tool = self._tools.get((call.label, call.name))
        if tool is None:
            # Approved in an earlier response, by a client that has changed its mind since.
            message = f"The request has no MCP server '{call.label}' with a tool '{call.name}'."
            return None, protocol_error(INVALID_PARAMS, message)
        if call.approval is not None and not is_as_approved(call.approval, tool):
            # The model may call it again as it is now, which has to be approved again.
            message = f"The call was not made: the tool '{call.name}' has changed since it was approved."
            return None, protocol_error(INVALID_PARAMS, message)
        try:
            result: CallResult = await self._sessions[call.label].call_as_written(call.name, call.arguments)
        except McpFailure as failure:
            return None, _failed(failure)
        return (None, execution_error(result.text)) if result.is_error else (result.text, None)


def _failed(failure: McpFailure) -> dict[str, Any]:
    if failure.kind == "protocol":
        return protocol_error(failure.code or 0, failure.message)
    codes = {"timeout": GATEWAY_TIMEOUT, "unreachable": BAD_GATEWAY}
    return http_error(failure.code or codes.get(failure.kind, BAD_GATEWAY), failure.message)


def _shown(tool: McpTool) -> dict[str, Any]:
    return {
        "name": tool.name,
        "description": tool.description,
        "input_schema": tool.input_schema,
        "annotations": tool.annotations,
    }


def _tool(shown: dict[str, Any]) -> McpTool:
    return McpTool(shown["name"], shown.get("description"), shown["input_schema"], shown.get("annotations"))
