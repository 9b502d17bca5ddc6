"""One call of a tool, in as many rounds as the server wants for it.

Not by the SDK's `call_tool`: that also checks the result against a schema of the server's, whose regular
expressions may take for ever. What a tool says goes to the model as it is.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import mcp_types as wire
from mcp.client import ClientSession
from mcp.shared.exceptions import MCPError
from pydantic import TypeAdapter

from dragoman.mcp.spec import McpFailure, ServerSpec

ROUNDS = 10
ROUND_S = 0.1
ANSWER: TypeAdapter[wire.CallToolResult | wire.InputRequiredResult] = TypeAdapter(
    wire.CallToolResult | wire.InputRequiredResult
)


class Call:
    def __init__(
        self, session: ClientSession, spec: ServerSpec, relist: Callable[[], Awaitable[Any]]
    ) -> None:
        self._session = session
        self._spec = spec
        self._relist = relist

    async def run(self, name: str, arguments: dict[str, Any]) -> wire.CallToolResult:
        params = wire.CallToolRequestParams(name=name, arguments=arguments)
        for _ in range(ROUNDS):
            answer = await self._sent(params)
            if isinstance(answer, wire.CallToolResult):
                return answer
            if answer.input_requests:
                what = "asks for something in the middle of a call, and nobody is here to answer"
                raise McpFailure("protocol", f"The MCP server {self._spec.label} {what}.")
            # It wants to be asked again, and told what it said now.
            await asyncio.sleep(ROUND_S)
            params = params.model_copy(update={"request_state": answer.request_state})
        raise McpFailure(
            "protocol", f"The MCP server {self._spec.label} puts off its answer again and again."
        )

    async def _sent(
        self, params: wire.CallToolRequestParams
    ) -> wire.CallToolResult | wire.InputRequiredResult:
        request = wire.CallToolRequest(params=params)
        try:
            return await self._session.send_request(request, ANSWER)
        except MCPError as error:
            if error.code != wire.HEADER_MISMATCH:
                raise
        # Some arguments go into headers as well; which ones, the list of tools says.
        await self._relist()
        return await self._session.send_request(request, ANSWER)
