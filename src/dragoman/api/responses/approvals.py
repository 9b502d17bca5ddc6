"""What is approved is a call of a tool as it was described then; the id of the question keeps which one."""

import hashlib
import re

import msgspec

from dragoman.api.mcp_tools import McpToolLike

_PINNED = re.compile(r"mcpr_(?P<pin>[0-9a-f]{16})_")
_ENCODER = msgspec.json.Encoder(order="sorted")


def pin_of(tool: McpToolLike) -> str:
    """Another one as soon as a word of the description or the schema is another."""
    described = _ENCODER.encode([tool.name, tool.description, tool.input_schema])
    return hashlib.sha256(described).hexdigest()[:16]


def prefix_of(pin: str) -> str:
    """What the id of a question begins with."""
    return f"mcpr_{pin}_" if pin else "mcpr_"


def is_as_approved(question: str, tool: McpToolLike) -> bool:
    """Whether the tool is the one that the question was about. A question that is not ours tells nothing."""
    found = _PINNED.match(question)
    return found is None or found["pin"] == pin_of(tool)
