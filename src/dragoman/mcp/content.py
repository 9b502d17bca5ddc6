"""What a tool answered, as the text that a model reads."""

import mcp_types as wire
import msgspec

from dragoman.mcp.failures import too_large
from dragoman.mcp.spec import CallResult, ServerSpec


def result_of(result: wire.CallToolResult, most_chars: int, spec: ServerSpec) -> CallResult:
    text = "\n".join(part_text(part) for part in result.content)
    if not any(isinstance(part, wire.TextContent) for part in result.content):
        text = "\n".join(filter(None, (text, _structured(result))))
    if len(text) > most_chars:
        raise too_large(f"a result of {len(text)} characters, where {most_chars} are the most", spec)
    return CallResult(text, result.is_error)


def _structured(result: wire.CallToolResult) -> str:
    if result.structured_content is None:
        return ""
    return msgspec.json.encode(result.structured_content).decode()


def part_text(part: wire.ContentBlock) -> str:
    """`[image image/png, 3 KiB]` for what is not text: the model is told that it is there."""
    match part:
        case wire.TextContent():
            return part.text
        case wire.ImageContent() | wire.AudioContent():
            return f"[{part.type} {part.mime_type}, {_size(part.data)}]"
        case wire.ResourceLink():
            return f"[resource {part.name}: {part.uri}]"
        case wire.EmbeddedResource():
            return _resource_text(part.resource)


def _resource_text(resource: wire.TextResourceContents | wire.BlobResourceContents) -> str:
    if isinstance(resource, wire.TextResourceContents):
        return resource.text
    return f"[resource {resource.uri}, {_size(resource.blob)}]"


def _size(base64: str) -> str:
    return f"{max(1, len(base64) * 3 // 4 // 1024)} KiB"
