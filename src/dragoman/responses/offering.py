"""What a response offers the model: the tools of its request, and of MCP servers once they are listed."""

import logging
from collections.abc import Sequence
from typing import Any

from dragoman.api.responses.history import pending_approvals
from dragoman.api.responses.server_calls import approved_call, listed
from dragoman.api.responses.tools import McpDeclaration, Offer
from dragoman.api.responses.writer import ResponseWriter
from dragoman.mcp import McpFailure, McpTool
from dragoman.turns.outlet import Outlet, Speaker
from dragoman.turns.toolbox import Toolbox

logger = logging.getLogger("dragoman.responses")


class Offering:
    """What an earlier response has listed is not asked for again, unless a call of it was approved since."""

    def __init__(self, toolbox: Toolbox, offer: Offer, before: Sequence[dict[str, Any]]) -> None:
        self.offer = offer
        self.toolbox = toolbox
        self._listed: dict[str, list[McpTool]] = {}
        self._approved = [asked for asked, _ in pending_approvals(before)] if offer.mcp else []
        self._known = _lists(before) if offer.mcp else {}
        self._to_ask: list[McpDeclaration] = []

    @property
    def must_ask(self) -> bool:
        """Whether anything is to be done before the model is offered what it is offered."""
        return bool(self._to_ask or self._approved)

    def check(self) -> None:
        """Refuses servers that may not be asked, and takes what is known of the others."""
        self.toolbox.check()
        doubted = {asked["server_label"] for asked in self._approved}
        for declared in self.offer.mcp:
            label = declared.server_label
            if label in self._known and label not in doubted:
                self._listed[label] = self.toolbox.take(label, self._known[label])
            else:
                self._to_ask.append(declared)
        if not self.must_ask:
            self._offer_listed()

    async def ask(self, writer: ResponseWriter, outlet: Outlet, speaker: Speaker) -> None:
        """Asks the servers what they have. One that does not say is an item, and the response goes on."""
        for declared in self._to_ask:
            label, error = declared.server_label, None
            before = self.toolbox.take(label, self._known[label]) if label in self._known else None
            try:
                tools = await outlet.wait(self.toolbox.ask(label), speaker)
            except McpFailure as failure:
                logger.warning("The tools of the MCP server %s are not known: %s", label, failure.message)
                tools, error = self.toolbox.take(label, ()), failure.message
            if tools != before:
                written, item = listed(
                    place := writer.place("mcpl_"), label, [_shown(one) for one in tools], error
                )
                writer.finished(place, item)
                await outlet.write(written)
            self._listed[label] = tools
        self._to_ask = []
        self._offer_listed()

    async def open_approved(self, writer: ResponseWriter, outlet: Outlet) -> None:
        """Calls that the client has approved since are the server's to make now."""
        for asked in self._approved:
            written, call = approved_call(
                writer.place("mcp_"), asked["server_label"], asked["name"], asked["arguments"], asked["id"]
            )
            writer.for_server.append(call)
            await outlet.write(written)
        self._approved = []

    def needs_approval(self, visible: str) -> bool:
        ref = self.offer.refs[visible]
        return self.toolbox.needs_approval(ref.server_label or "", ref.name)

    def take_back(self) -> None:
        """The model is offered nothing that it could not have."""
        self.offer = self.offer.without_mcp()

    def _offer_listed(self) -> None:
        """In the order in which they were declared: names that two servers have are told apart by it."""
        for declared in self.offer.mcp:
            self.offer = self.offer.with_mcp(declared.server_label, self._listed[declared.server_label])


def _lists(items: Sequence[dict[str, Any]]) -> dict[str, list[McpTool]]:
    """The tools of each server as they were listed last."""
    return {
        item["server_label"]: [
            McpTool(tool["name"], tool.get("description"), tool["input_schema"], tool.get("annotations"))
            for tool in item["tools"]
        ]
        for item in items
        if item.get("type") == "mcp_list_tools" and not item.get("error")
    }


def _shown(tool: McpTool) -> dict[str, Any]:
    return {
        "name": tool.name,
        "description": tool.description,
        "input_schema": tool.input_schema,
        "annotations": tool.annotations,
    }
