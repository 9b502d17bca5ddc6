"""MCP servers that a request names: where each is, and which of its tools may be used."""

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct

from dragoman.api.read import Reader
from dragoman.api.tools import wrong
from dragoman.errors import BadRequest
from dragoman.mcp.policy import AllowedTools, RequireApproval
from dragoman.turns.toolbox import ServerWish

Label: TypeAlias = Annotated[str, Meta(min_length=1, max_length=128)]


class McpDeclaration(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An MCP server as the request names it. A label alone names one of the server's own settings."""

    type: Literal["mcp"]
    server_label: Label
    server_url: str | None = None
    headers: dict[str, str] | None = None
    authorization: str | None = None
    allowed_tools: AllowedTools = None
    require_approval: RequireApproval = None
    server_description: str | None = None
    connector_id: str | None = None
    tunnel_id: str | None = None
    # Of no effect here: every tool is loaded at once, and the model is the only caller.
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None

    @property
    def wish(self) -> ServerWish:
        return ServerWish(
            label=self.server_label,
            url=self.server_url,
            headers=self.headers,
            authorization=self.authorization,
            allowed_tools=self.allowed_tools,
            require_approval=self.require_approval,
        )


_READER = Reader.of(McpDeclaration)


def read_mcp(tool: dict[str, Any], place: str) -> McpDeclaration:
    declared: McpDeclaration = _READER.convert(tool, place)
    for name in ("connector_id", "tunnel_id"):
        if getattr(declared, name) is not None:
            message = f"'{place}.{name}' belongs to a hosted service; send server_url instead."
            raise BadRequest(message, param=f"{place}.{name}", code="unsupported_field")
    url = declared.server_url
    if url is not None and not url.startswith(("http://", "https://")):
        raise wrong(f"{place}.server_url", "must begin with http:// or https://")
    return declared


def without_secrets(tool: dict[str, Any]) -> dict[str, Any]:
    """The declaration as it may be shown and stored: headers keep their names only."""
    shown = {key: value for key, value in tool.items() if key != "authorization"}
    if isinstance(shown.get("headers"), dict):
        shown["headers"] = dict.fromkeys(shown["headers"], "<redacted>")
    return shown
