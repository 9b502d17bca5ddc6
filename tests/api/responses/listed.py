"""A tool that an MCP server has listed, as far as offers know it."""

from typing import Any

from msgspec import Struct, field


class Listed(Struct):
    name: str
    description: str | None = None
    input_schema: dict[str, Any] = field(default_factory=lambda: {"type": "object"})
