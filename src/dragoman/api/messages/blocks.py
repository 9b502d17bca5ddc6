"""Messages: converts content blocks to messages for a chat template.

Consecutive thinking, text and calls of an assistant become one message, and each tool result becomes one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, ClassVar, Literal, TypeAlias

import msgspec
from msgspec import Struct
from msgspec.json import encode as encode_json

from dragoman.api.compat_fields import ECHOED_IN_MESSAGES
from dragoman.api.content_parts import ConversationMedia, join_parts, read_media_part, template_part
from dragoman.api.request_decoder import IgnoredFields, RequestDecoder
from dragoman.api.shared_fields import ShortText
from dragoman.errors import BadRequest
from dragoman.limits import Limits
from dragoman.types import Message, ToolCall

Content: TypeAlias = str | list[dict[str, Any]]
Seal: TypeAlias = Callable[[str], str]
Unseal: TypeAlias = Callable[[str], str | None]
"""Returns the sealed text, or None if it was not sealed by this server for this API key, or was changed."""


# Blocks. Fields without effect are declared too, so that nearly all blocks parse in the fast path.


class TextBlock(Struct, forbid_unknown_fields=True):
    echoed: ClassVar[frozenset[str]] = frozenset({"parsed_output"})
    text: str
    type: Literal["text"] = "text"
    citations: Any = None
    cache_control: Any = None


class TextSource(Struct, forbid_unknown_fields=True):
    data: str
    type: Literal["text"] = "text"
    media_type: Literal["text/plain"] = "text/plain"


class PartsSource(Struct, forbid_unknown_fields=True):
    content: Content
    type: Literal["content"] = "content"


class CitationsConfig(Struct, forbid_unknown_fields=True):
    enabled: bool | None = None


class DocumentBlock(Struct, forbid_unknown_fields=True):
    source: dict[str, Any]
    type: Literal["document"] = "document"
    title: str | None = None
    context: str | None = None
    citations: CitationsConfig | None = None
    cache_control: Any = None


class ImageTransformations(Struct, forbid_unknown_fields=True):
    oversized_image: Literal["downsize"] | None = None
    """What models do with images in any case."""


class ImageBlock(Struct, forbid_unknown_fields=True):
    source: dict[str, Any]
    type: Literal["image"] = "image"
    transformations: ImageTransformations | None = None
    cache_control: Any = None


class SearchResultBlock(Struct, forbid_unknown_fields=True):
    content: list[dict[str, Any]]
    source: str
    title: str
    type: Literal["search_result"] = "search_result"
    citations: CitationsConfig | None = None
    cache_control: Any = None


class ThinkingBlock(Struct, forbid_unknown_fields=True):
    thinking: str
    type: Literal["thinking"] = "thinking"
    signature: str | None = None
    cache_control: Any = None


class RedactedBlock(Struct, forbid_unknown_fields=True):
    data: str
    type: Literal["redacted_thinking"] = "redacted_thinking"
    cache_control: Any = None


class ToolUseBlock(Struct, forbid_unknown_fields=True):
    id: ShortText
    name: ShortText
    input: dict[str, Any]
    type: Literal["tool_use"] = "tool_use"
    cache_control: Any = None
    caller: Any = None
    toolset_name: Any = None


class ToolResultBlock(Struct, forbid_unknown_fields=True):
    tool_use_id: ShortText
    type: Literal["tool_result"] = "tool_result"
    content: Content | None = None
    is_error: bool | None = None
    cache_control: Any = None
    toolset_name: Any = None


class ToolReferenceBlock(Struct, forbid_unknown_fields=True):
    tool_name: ShortText
    type: Literal["tool_reference"] = "tool_reference"
    cache_control: Any = None


class McpUseBlock(Struct, forbid_unknown_fields=True):
    id: ShortText
    name: ShortText
    input: dict[str, Any]
    server_name: ShortText
    type: Literal["mcp_tool_use"] = "mcp_tool_use"
    cache_control: Any = None


class McpResultBlock(Struct, forbid_unknown_fields=True):
    tool_use_id: ShortText
    type: Literal["mcp_tool_result"] = "mcp_tool_result"
    content: Content | None = None
    is_error: bool | None = None
    cache_control: Any = None


class CompactionBlock(Struct, forbid_unknown_fields=True):
    type: Literal["compaction"] = "compaction"
    content: str | None = None
    encrypted_content: str | None = None
    signature: str | None = None
    tool_changes: None = None
    cache_control: Any = None


Block: TypeAlias = (
    TextBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
    | ThinkingBlock
    | RedactedBlock
    | ToolUseBlock
    | ToolResultBlock
    | ToolReferenceBlock
    | McpUseBlock
    | McpResultBlock
    | CompactionBlock
)
BLOCKS: Mapping[str, RequestDecoder] = {
    "text": RequestDecoder.for_type(TextBlock),
    "image": RequestDecoder.for_type(ImageBlock),
    "document": RequestDecoder.for_type(DocumentBlock),
    "search_result": RequestDecoder.for_type(SearchResultBlock),
    "thinking": RequestDecoder.for_type(ThinkingBlock),
    "redacted_thinking": RequestDecoder.for_type(RedactedBlock),
    "tool_use": RequestDecoder.for_type(ToolUseBlock),
    "tool_result": RequestDecoder.for_type(ToolResultBlock),
    "tool_reference": RequestDecoder.for_type(ToolReferenceBlock),
    "mcp_tool_use": RequestDecoder.for_type(McpUseBlock),
    "mcp_tool_result": RequestDecoder.for_type(McpResultBlock),
    "compaction": RequestDecoder.for_type(CompactionBlock),
}
WHERE: Mapping[str, frozenset[str]] = {
    "user": frozenset({"text", "image", "document", "search_result", "tool_result", "compaction"}),
    "assistant": frozenset(
        {
            "text",
            "thinking",
            "redacted_thinking",
            "tool_use",
            "mcp_tool_use",
            "mcp_tool_result",
            "compaction",
        }
    ),
    "system": frozenset({"text"}),
    "tool": frozenset({"text", "image", "document", "search_result", "tool_reference"}),
    "document": frozenset({"text", "image"}),
}
"""The blocks allowed in a message of each role, in a tool result, and in a document."""
_HOSTED = "it belongs to a hosted service"
_FIXED = "list all tools of a request in its field tools"
REFUSED_BLOCKS: Mapping[str, str] = {
    name: reason
    for reason, names in {
        _HOSTED: "server_tool_use web_search_tool_result web_fetch_tool_result advisor_tool_result"
        " code_execution_tool_result bash_code_execution_tool_result container_upload fallback"
        " text_editor_code_execution_tool_result tool_search_tool_result browser_state",
        _FIXED: "tool_addition tool_removal mcp_tool_listing",
    }.items()
    for name in names.split()
}
"""The reason for rejecting each block type."""
_SOURCES: Mapping[str, RequestDecoder] = {
    "text": RequestDecoder.for_type(TextSource),
    "content": RequestDecoder.for_type(PartsSource),
}
REFUSED_SOURCES: Mapping[str, str] = {
    "base64": "send the text of the document as a source of type text",
    "url": "the server does not fetch documents; send the text as a source of type text",
    "file": "send the text of the document as a source of type text",
}


def read_block(result: Any, param: str, role: str, ignored: IgnoredFields) -> Block:
    """Parse a block; raise if it is not allowed in a message of this role."""
    kind = result.get("type") if isinstance(result, dict) else None
    if not isinstance(kind, str):
        raise BadRequest(f"'{param}.type' must be a string.", param=f"{param}.type", code="invalid_value")
    if kind in REFUSED_BLOCKS:
        raise _unsupported(param, kind, REFUSED_BLOCKS[kind])
    if kind not in WHERE[role]:
        allowed = ", ".join(sorted(WHERE[role]))
        message = f"'{param}.type' is {kind[:64]!r}; allowed here are: {allowed}."
        raise BadRequest(message, param=f"{param}.type", code="invalid_value")
    return _converted(BLOCKS[kind], result, param, ignored)  # type: ignore[no-any-return]


def _converted(reader: RequestDecoder, fields: dict[str, Any], param: str, ignored: IgnoredFields) -> Any:
    try:
        return msgspec.convert(fields, reader.decoder.type)
    except (msgspec.ValidationError, RecursionError):
        return reader.convert(fields, param, ignored)


def _unsupported(param: str, kind: str, reason: str) -> BadRequest:
    message = f"'{param}' has the type {kind!r}, which is not supported: {reason}."
    return BadRequest(message, param=param, code="unsupported_content")


class BlockReader:
    """Converts blocks to content parts; `gallery` collects their media."""

    def __init__(self, limits: Limits, ignored: IgnoredFields) -> None:
        self.gallery = ConversationMedia()
        self.limits = limits
        self.ignored = ignored

    def parts(self, content: Content, param: str, role: str) -> list[dict[str, Any]]:
        if isinstance(content, str):
            return [_text(content)]
        rows: list[dict[str, Any]] = []
        for number, each in enumerate(content):
            at = f"{param}[{number}]"
            rows += self.block_parts(read_block(each, at, role, self.ignored), at)
        return rows

    def block_parts(self, block: Block, param: str) -> list[dict[str, Any]]:
        match block:
            case TextBlock():
                return [_text(block.text)]
            case ImageBlock():
                read = read_media_part({"source": block.source}, "image", self.limits, param)
                self.gallery.add([read])
                return [template_part(read, param)]
            case DocumentBlock():
                return self._document_parts(block, param)
            case SearchResultBlock():
                _check_uncited(block.citations, param)
                texts = [each["text"] for each in self.parts(block.content, f"{param}.content", "system")]
                return [_text(f"{block.title}\n{block.source}\n\n" + "\n".join(texts))]
            case ToolReferenceBlock():
                return [_text(block.tool_name)]
        raise AssertionError(block)

    def _document_parts(self, block: DocumentBlock, param: str) -> list[dict[str, Any]]:
        """Return a document's title, context and contents: one text, unless it has images."""
        _check_uncited(block.citations, param)
        kind = str(block.source.get("type"))
        if kind in REFUSED_SOURCES:
            raise _unsupported(f"{param}.source", kind, REFUSED_SOURCES[kind])
        if kind not in _SOURCES:
            message = f"'{param}.source.type' must be text or content."
            raise BadRequest(message, param=f"{param}.source.type", code="invalid_value")
        source = _converted(_SOURCES[kind], block.source, f"{param}.source", self.ignored)
        if isinstance(source, TextSource):
            parts = [_text(source.data)]
        else:
            parts = self.parts(source.content, f"{param}.source.content", "document")
        head = [_text(text) for text in (block.title, block.context) if text]
        if any(part["type"] != "text" for part in parts):
            return [*head, *parts]
        text = "\n".join(part["text"] for part in parts)
        return [_text("\n\n".join(part for part in (block.title, block.context, text) if part))]


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _check_uncited(citations: CitationsConfig | None, param: str) -> None:
    if citations is not None and citations.enabled:
        message = f"'{param}.citations' is not supported: answers have no citations; leave it out."
        raise BadRequest(message, param=f"{param}.citations", code="unsupported_field")


# Thinking that the client stores for the server, with a signature that shows whether it was changed.


DIGEST, HIDDEN = "thinking digest ", "thinking text "
"""Prefixes of the sealed data in a signature: a digest of the thinking, or the thinking itself if it is
hidden."""


def digest_of(thinking: str) -> str:
    return blake2b(thinking.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def sign(thinking: str, seal: Seal, *, shown: bool) -> str:
    return seal(DIGEST + digest_of(thinking) if shown else HIDDEN + thinking)


def recall_thinking(block: ThinkingBlock | RedactedBlock, param: str, unseal: Unseal) -> str:
    """Return the thinking of a block. With signatures of other servers, it is the text in the block."""
    text, signature = (
        ("", block.data) if isinstance(block, RedactedBlock) else (block.thinking, block.signature or "")
    )
    value = unseal(signature) or ""
    if value.startswith(HIDDEN):
        known = value.removeprefix(HIDDEN)
        changed = text not in ("", known)
    else:
        known, changed = text, value.startswith(DIGEST) and value != DIGEST + digest_of(text)
    if changed:
        message = f"'{param}.signature' does not match the thinking; send the block unchanged."
        raise BadRequest(message, param=f"{param}.signature", code="invalid_signature")
    return known


# Messages.


class MessageOutput(Struct, forbid_unknown_fields=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class MessageParam(Struct, forbid_unknown_fields=True):
    echoed: ClassVar[frozenset[str]] = ECHOED_IN_MESSAGES | {
        "id",
        "stop_sequence",
        "stop_details",
        "container",
        "context_management",
        "diagnostics",
        "input_transformations",
    }
    role: Literal["user", "assistant", "system"]
    content: Content | None = None
    clear_at: Literal["next_user_message", "never"] | None = None
    output_config: MessageOutput | None = None


SUMMARY = "Summary of the conversation so far:\n"


class BlockMessageBuilder:
    """The messages so far, and the parts of the current assistant message."""

    def __init__(self, unseal: Unseal, ignored: IgnoredFields, limits: Limits) -> None:
        self.reader = BlockReader(limits, ignored)
        self.referenced: set[str] = set()
        """Tools that results of a tool search have named."""
        self._unseal = unseal
        self._ignored = ignored
        self._told: list[Message] = []
        self._reasoning: list[str] = []
        self._texts: list[str] = []
        self._calls: list[ToolCall] = []
        self._known: set[str] = set()

    def build(self, system: Content | None, messages: Sequence[MessageParam]) -> tuple[Message, ...]:
        if system:
            self._told.append(Message(role="system", content=self._parts(system, "system", "system")))
        last_user = max((at for at, each in enumerate(messages) if each.role == "user"), default=-1)
        for number, message in enumerate(messages):
            if message.clear_at == "next_user_message" and number < last_user:
                continue
            self._take(message, f"messages[{number}].content")
        return tuple(self._told)

    def _take(self, message: MessageParam, param: str) -> None:
        content = message.content
        if message.role == "system":
            self._told.append(Message(role="system", content=self._parts(content or "", param, "system")))
        elif isinstance(content, str | None):
            self._told.append(Message(role=message.role, content=content or ""))
        elif message.role == "user":
            self._take_user(content, param)
        else:
            for block, at in self._blocks(content, param, "assistant"):
                self._take_said(block, at)
            self._close(empty=not content)

    def _blocks(self, content: list[dict[str, Any]], param: str, role: str) -> Iterator[tuple[Block, str]]:
        for number, fields in enumerate(content):
            yield read_block(fields, at := f"{param}[{number}]", role, self._ignored), at

    def _parts(self, content: Content, param: str, role: str) -> Content:
        """Keep a string a string and parts parts: some templates depend on it."""
        return content if isinstance(content, str) else self.reader.parts(content, param, role)

    def _take_user(self, content: list[dict[str, Any]], param: str) -> None:
        """Add a user message; tool results come first, because they belong to the calls before them."""
        parts: list[dict[str, Any]] = []
        for block, at in self._blocks(content, param, "user"):
            if isinstance(block, ToolResultBlock):
                self._take_result(block, at)
            elif isinstance(block, CompactionBlock):
                self._summarise(block)
            else:
                parts += self.reader.block_parts(block, at)
        if parts:
            self._told.append(Message(role="user", content=parts))

    def _take_said(self, block: Block, param: str) -> None:
        match block:
            case TextBlock():
                self._texts.append(block.text)
            case ThinkingBlock() | RedactedBlock():
                self._reasoning.append(recall_thinking(block, param, self._unseal))
            case ToolUseBlock() | McpUseBlock():
                self._known.add(block.id)
                arguments = encode_json(block.input).decode()
                self._calls.append(ToolCall(id=block.id, name=block.name, arguments=arguments))
            case McpResultBlock():
                self._close()
                self._take_result(block, param)
            case CompactionBlock():
                self._summarise(block)

    def _take_result(self, block: ToolResultBlock | McpResultBlock, param: str) -> None:
        if block.tool_use_id not in self._known:
            message = f"'{param}.tool_use_id' does not match any earlier tool_use; send the id of one."
            raise BadRequest(message, param=f"{param}.tool_use_id", code="invalid_value")
        content = "" if block.content is None else block.content
        value = self._parts(content, f"{param}.content", "tool")
        if isinstance(content, list):
            named = (each["tool_name"] for each in content if each.get("type") == "tool_reference")
            self.referenced.update(named)
        if block.is_error:
            value = _as_error(value)
        self._told.append(Message(role="tool", content=value, tool_call_id=block.tool_use_id))

    def _summarise(self, block: CompactionBlock) -> None:
        """Replace all earlier messages but instructions by the summary."""
        if block.content is None:
            return
        self._close()
        self._told = [each for each in self._told if each.role == "system"]
        self._told.append(Message(role="user", content=SUMMARY + block.content))

    def _close(self, *, empty: bool = False) -> None:
        if not (self._reasoning or self._texts or self._calls or empty):
            return
        message = Message(
            role="assistant",
            content="".join(self._texts) or (None if self._calls else ""),
            reasoning="".join(self._reasoning) or None,
            tool_calls=tuple(self._calls),
        )
        self._told.append(message)
        self._reasoning, self._texts, self._calls = [], [], []


def _as_error(value: Content) -> Content:
    """Mark a result as an error, in the format of failed calls of the server's own tools."""
    text = value if isinstance(value, str) else join_parts(value)
    if text[:5].lower() == "error":
        return value
    return f"Error: {text}" if isinstance(value, str) else [{"type": "text", "text": "Error: "}, *value]
