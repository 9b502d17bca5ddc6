"""What a Responses request says about calling: the forms that Chat Completions lacks, in those it has."""

from collections.abc import Mapping
from typing import Any

from dragoman.api.responses.history import Visible
from dragoman.api.responses.tools import HOSTED, Offer
from dragoman.api.tool_choice import calling, eased
from dragoman.api.tools import wrong
from dragoman.errors import BadRequest
from dragoman.limits import Limits, check_count
from dragoman.turns.spec import Calling

PARAM = "tool_choice"


def asked(choice: Any, offer: Offer, *, first: bool) -> Calling | None:
    """What holds in one round of the tool loop. A call that was asked for is made in the first one.

    `{"type": "mcp", "server_label": "files"}` asks for a call of any tool which that server has.
    """
    found = calling(_in_chat_form(choice, offer), PARAM, offer)
    return found if first else eased(found, offer)


def check_choice(choice: Any, offer: Offer, limits: Limits) -> None:
    """Raises for what no server can make good; tools of MCP servers are not known yet."""
    if isinstance(choice, Mapping):
        check_count(len(_listed(choice)), limits.tools, f"{PARAM}.tools", "tools")
    shown = _in_chat_form(choice, offer)
    waits = offer.mcp and (shown == "required" or (isinstance(choice, Mapping) and _speaks_of_mcp(choice)))
    if not waits:
        calling(shown, PARAM, offer)


def _speaks_of_mcp(choice: Mapping[str, Any]) -> bool:
    return any(isinstance(tool, Mapping) and tool.get("type") == "mcp" for tool in [choice, *_listed(choice)])


def _listed(choice: Mapping[str, Any]) -> list[Any]:
    tools = choice.get("tools")
    return tools if isinstance(tools, list) else []


def _in_chat_form(choice: Any, offer: Offer) -> Any:
    if not isinstance(choice, Mapping):
        return choice
    visible = offer.visible()
    if choice.get("type") == "allowed_tools":
        tools = [
            shown
            for number, tool in enumerate(_listed(choice))
            for shown in _tools(tool, offer, visible, f"{PARAM}.tools[{number}]")
        ]
        return {**choice, "tools": tools}
    tools = _tools(choice, offer, visible, PARAM)
    of_server = choice.get("type") == "mcp" and choice.get("name") is None
    return {"type": "allowed_tools", "mode": "required", "tools": tools} if of_server else tools[0]


def _tools(tool: Any, offer: Offer, visible: Visible, place: str) -> list[Any]:
    """The tools that one entry means, by the names that the model sees."""
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    if kind in HOSTED:
        message = f"'{place}' asks for {kind}, which this server does not have."
        raise BadRequest(message, param=place, code="unsupported_tool")
    if kind == "mcp":
        return _of_server(tool, offer, place)
    if kind not in ("function", "custom") or not isinstance(tool.get("name"), str):
        return [tool]
    if not isinstance(tool.get("namespace"), str | None):
        raise wrong(f"{place}.namespace", "must be a string")
    return [{"type": kind, "name": visible(tool.get("namespace"), tool["name"])}]


def _of_server(tool: Mapping[str, Any], offer: Offer, place: str) -> list[Any]:
    label, name = tool.get("server_label"), tool.get("name")
    if label not in [server.server_label for server in offer.mcp]:
        raise wrong(f"{place}.server_label", "must be the label of one of the tools of type mcp")
    found = [
        shown for shown, ref in offer.refs.items() if ref.server_label == label and name in (None, ref.name)
    ]
    if name is None:
        return [{"type": "function", "name": shown} for shown in found]
    return [{"type": "function", "name": found[0] if found else name}]
