"""The items of a context: their types, required fields, and conversion of an input to items.

Fields that are not declared here are kept as sent, because items travel: clients send back the items of this
server or of another one.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct, field

from dragoman.api.content_parts import (
    MEDIA_PARTS,
    ConversationMedia,
    MediaPart,
    part_text,
    read_media_part,
    read_part,
)
from dragoman.api.request_decoder import RequestDecoder
from dragoman.api.shared_fields import ShortText
from dragoman.api.tools import bad_param
from dragoman.errors import BadRequest
from dragoman.json_size import values
from dragoman.limits import Limits, check_count

# All item types, and the defaults of their fields.


ItemDict: TypeAlias = dict[str, Any]
"""An item as JSON. Not a struct, because unknown fields must be returned unchanged."""
Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=1024)]
Parts: TypeAlias = list[dict[str, Any]]
Status: TypeAlias = Literal[
    "in_progress", "completed", "incomplete", "searching", "interpreting", "generating", "calling", "failed"
]


class ItemBase(Struct, kw_only=True):
    id: Name | None = None
    status: Status | None = None


class MessageItem(ItemBase):
    role: Literal["user", "system", "developer", "assistant"]
    content: str | Parts
    phase: str | None = None


class ReasoningText(Struct):
    type: Literal["summary_text", "reasoning_text", "text"]
    text: str


class ReasoningItem(ItemBase):
    summary: list[ReasoningText] = field(default_factory=list)
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None


class FunctionCallItem(ItemBase):
    call_id: Name
    name: Name
    arguments: str
    namespace: ShortText | None = None


class CustomCallItem(ItemBase):
    call_id: Name
    name: Name
    input: str
    namespace: ShortText | None = None


class CallOutputItem(ItemBase):
    call_id: Name
    output: str | Parts
    name: ShortText | None = None
    namespace: ShortText | None = None


class McpListedTool(Struct):
    name: Name
    input_schema: dict[str, Any]
    description: str | None = None
    annotations: dict[str, Any] | None = None


class McpListItem(ItemBase):
    server_label: Name
    tools: list[McpListedTool]
    error: str | dict[str, Any] | None = None


class McpRequestItem(ItemBase):
    server_label: Name
    name: Name
    arguments: str


class McpCallItem(McpRequestItem):
    output: str | None = None
    error: str | dict[str, Any] | None = None
    approval_request_id: str | None = None
    content: Parts | None = None
    """The parts of an output with media, which `output` only mentions; our own extension."""


class McpAnswerItem(ItemBase):
    approval_request_id: Name
    approve: bool
    reason: str | None = None


class CompactionItem(ItemBase):
    encrypted_content: str


class ReferenceItem(ItemBase):
    id: Name


class ToolsItem(ItemBase):
    tools: Parts
    call_id: Name | None = None


class HostedItem(ItemBase):
    """A call of a tool that only hosted services have, or its output; this server runs none of them."""

    call_id: Name | None = None
    action: dict[str, Any] | None = None
    operation: dict[str, Any] | None = None
    queries: list[str] | None = None
    code: str | None = None
    output: str | Parts | dict[str, Any] | None = None
    outputs: Parts | None = None
    results: Parts | None = None
    result: str | None = None


class PairedItem(HostedItem):
    """A call or its output, which share a `call_id`."""

    call_id: Name


class ItemKind(Struct, frozen=True):
    reader: RequestDecoder
    prefix: str
    """Prefix of item ids; empty for types without own ids."""
    defaults: Mapping[str, Any]
    """Fields that SDKs require, with their default values."""


def _kind(item: type[ItemBase], prefix: str, **defaults: Any) -> ItemKind:
    return ItemKind(RequestDecoder.for_type(item), prefix, defaults)


DONE: Mapping[str, Any] = {"status": "completed"}

KINDS: Mapping[str, ItemKind] = {
    "message": _kind(MessageItem, "msg_", **DONE),
    "reasoning": _kind(ReasoningItem, "rs_", summary=[], **DONE),
    "function_call": _kind(FunctionCallItem, "fc_", **DONE),
    "function_call_output": _kind(CallOutputItem, "fco_", **DONE),
    "custom_tool_call": _kind(CustomCallItem, "ctc_", **DONE),
    "custom_tool_call_output": _kind(CallOutputItem, "ctco_", **DONE),
    "mcp_list_tools": _kind(McpListItem, "mcpl_"),
    "mcp_call": _kind(McpCallItem, "mcp_", **DONE),
    "mcp_approval_request": _kind(McpRequestItem, "mcpr_"),
    "mcp_approval_response": _kind(McpAnswerItem, "mcpa_"),
    "compaction": _kind(CompactionItem, "cmp_"),
    "compaction_trigger": _kind(ItemBase, "cmpt_"),
    "item_reference": _kind(ReferenceItem, ""),
    "additional_tools": _kind(ToolsItem, "at_", role="developer"),
    "tool_search_call": _kind(HostedItem, "tsc_", execution="server", arguments={}, **DONE),
    "tool_search_output": _kind(ToolsItem, "tso_", execution="server", **DONE),
    "file_search_call": _kind(HostedItem, "fs_", queries=[], **DONE),
    "web_search_call": _kind(HostedItem, "ws_", **DONE),
    "code_interpreter_call": _kind(HostedItem, "ci_", **DONE),
    "image_generation_call": _kind(HostedItem, "ig_", **DONE),
    "computer_call": _kind(PairedItem, "cu_", pending_safety_checks=[], **DONE),
    "computer_call_output": _kind(PairedItem, "cuo_", **DONE),
    "local_shell_call": _kind(PairedItem, "lsh_", **DONE),
    "local_shell_call_output": _kind(HostedItem, "lsho_", **DONE),
    "shell_call": _kind(PairedItem, "sh_", **DONE),
    "shell_call_output": _kind(PairedItem, "sho_", **DONE),
    "apply_patch_call": _kind(PairedItem, "apc_", **DONE),
    "apply_patch_call_output": _kind(PairedItem, "apco_", **DONE),
    "program": _kind(PairedItem, "prog_"),
    "program_output": _kind(PairedItem, "progo_", **DONE),
}

SILENT = frozenset({"additional_tools", "mcp_list_tools", "mcp_approval_response", "compaction_trigger"})
"""Item types that are not shown to the model: they declare tools, or are commands to the server."""
CALLS = frozenset(kind for kind in KINDS if kind.endswith("_call")) | {"program", "mcp_approval_request"}
"""Item types that another item may answer."""


# Items of tools that only hosted services have, as plain text.


# Fields that identify an item or that SDKs require, and that have no content for the model.
ENVELOPE = ("id", "type", "status", "call_id", "caller", "created_by", "fingerprint", "execution")


def plainly(item: ItemDict) -> str:
    """Format an item as text: `{"type": "web_search_call", "action": {"query": "tides"}, ...}` is `query:
    tides`."""
    facts = {key: value for key, value in item.items() if key not in ENVELOPE}
    if isinstance(shown := facts.get("output"), MediaPart):
        facts["output"] = dict(shown)
    if item["type"] == "image_generation_call":
        facts.pop("result", None)
    if item["type"] == "tool_search_output":
        # The tools themselves are offered to the model.
        facts["tools"] = [tool.get("name") for tool in item["tools"]]
    only = facts.get("output") if len(facts) == 1 else None
    return only if isinstance(only, str) else "\n".join(lines(facts))


def lines(value: Any, name: str = "") -> Iterator[str]:
    """Yield the lines of a value; data URLs are replaced, as a text model could only read their bytes."""
    for key, text in leaves(value, name):
        yield f"{key}: {'[data]' if text.startswith('data:') else text}"


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the strings, numbers and booleans of a JSON value as text, each with its key; iterative, because
    the value may be deeply nested."""
    waiting = [(name, value)]
    while waiting:
        key, item = waiting.pop()
        if isinstance(item, MediaPart):
            continue
        if isinstance(item, dict):
            waiting.extend(reversed(item.items()))
        elif isinstance(item, list):
            waiting.extend((key, entry) for entry in reversed(item))
        elif item is not None:
            yield key, str(item)


# The input of a response as items: each with a type, an id and other fields that SDKs require of stored ones.


SCREEN = "computer_call_output"
OUTPUTS = ("function_call_output", "custom_tool_call_output")
SHOWING = ("content", "output")
"""Fields of items that may contain media."""
PARTED = ("content", "output", "outputs", "results", "summary")
"""Fields of items that may be lists of parts."""
_decode = msgspec.json.Decoder().decode


class ContextItems(Struct, frozen=True):
    """The items of a request: the context it continues, and its input."""

    before: list[ItemDict]
    inputs: list[ItemDict]
    size: int
    """Approximate size of all items as JSON, in bytes."""


def normalise(
    value: str | Sequence[ItemDict] | None,
    new_id: Callable[[str], str],
    field: str = "input",
    limits: Limits | None = None,
) -> list[ItemDict]:
    """Return the items as they are stored; raise at the first invalid one, with its field:
    `input[3].content[0].text`.

    `"hi"` is one user message. Items that were normalised before do not change.
    """
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    limits = limits or Limits()
    check_count(sum(map(_parts, value or ())), limits.content_parts, field, "parts of content")
    items = [_normal(item, f"{field}[{number}]", new_id, limits) for number, item in enumerate(value or ())]
    check_shown(items, limits, field)
    return items


def _normal(fields: ItemDict, param: str, new_id: Callable[[str], str], limits: Limits) -> ItemDict:
    item = {key: value for key, value in fields.items() if value is not None}
    item["type"] = name = _type(item, param)
    kind = KINDS[name]
    kind.reader.convert(item, param)
    if name == "message":
        item["content"] = _content(item["content"], f"{param}.content", item["role"], limits)
    if name == "mcp_call" and "content" in item:
        item["content"] = _content(item["content"], f"{param}.content", "user", limits)
    if isinstance(item.get("output"), list) and name in OUTPUTS:
        item["output"] = _content(item["output"], f"{param}.output", "user", limits)
    if name == SCREEN and "output" in item:
        item["output"] = _read_screen(item["output"], limits, f"{param}.output")
    if kind.prefix and "id" not in item:
        item["id"] = new_id(kind.prefix)
    return {**{key: value for key, value in kind.defaults.items() if key not in item}, **item}


def _type(item: ItemDict, param: str) -> str:
    """Return the type; without one, an item with a role is a message, one with only an id a reference."""
    name = item.get(
        "type", "message" if "role" in item else "item_reference" if set(item) == {"id"} else None
    )
    if name == "configuration_update":
        message = (
            "A configuration_update item is not supported; send reasoning and text as fields of the request."
        )
        raise BadRequest(message, param=param, code="unsupported_content")
    if name is None:
        raise BadRequest(f"'{param}.type' is required.", param=f"{param}.type", code="missing_field")
    if not isinstance(name, str):
        raise bad_param(f"{param}.type", "must be a string")
    if name not in KINDS:
        raise bad_param(f"{param}.type", f"is {name[:64]!r}, which is not a valid item type")
    return name


def _content(content: str | Parts, param: str, role: str, limits: Limits) -> Parts:
    if isinstance(content, str):
        content = [{"type": "input_text", "text": content}]
    return [_part(part, f"{param}[{n}]", role, limits) for n, part in enumerate(content)]


def _part(part: dict[str, Any], param: str, role: str, limits: Limits) -> dict[str, Any]:
    if role != "assistant":
        read = read_part(part, limits, param)
        return read if isinstance(read, MediaPart) else {**read, "type": "input_text", "text": read["text"]}
    text = part_text(part, param)
    return (
        part
        if part["type"] == "refusal"
        else {"annotations": [], **part, "type": "output_text", "text": text}
    )


def _read_screen(output: Any, limits: Limits, param: str) -> Any:
    """Decode a screenshot. An invalid one stays as it is, and becomes text, as for models without vision."""
    if isinstance(output, dict) and str(output.get("image_url")).startswith("data:"):
        with suppress(BadRequest):
            return read_media_part(output, "image", limits, param)
    return output


def read_shown(item: ItemDict, limits: Limits, field: str) -> ItemDict:
    """Decode the images of a stored item again."""
    if item.get("type") == SCREEN and "output" in item:
        item["output"] = _read_screen(item["output"], limits, field)
    for name in SHOWING:
        parts = item.get(name)
        if isinstance(parts, list) and any(part.get("type") in MEDIA_PARTS for part in parts):
            item[name] = [read_part(part, limits, field) for part in parts]
    return item


def check_shown(items: Iterable[ItemDict], limits: Limits, field: str) -> None:
    """Check the limits for all media together."""
    show_items(items).check(limits, field)


def show_items(items: Iterable[ItemDict]) -> ConversationMedia:
    gallery = ConversationMedia()
    for item in items:
        for name in SHOWING:
            parts = item.get(name)
            gallery.add(parts if isinstance(parts, list) else [parts] if isinstance(parts, MediaPart) else ())
    return gallery


def without_logprobs(item: ItemDict) -> ItemDict:
    """Return an item without log probabilities, which later requests do not need and which may be a thousand
    times as long as the text."""
    content = item.get("content")
    if item.get("role") != "assistant" or not isinstance(content, list):
        return item
    return {**item, "content": [{**part, "logprobs": []} if "logprobs" in part else part for part in content]}


def references(items: Sequence[ItemDict]) -> list[str]:
    """Return the ids of referenced items, which the store must have."""
    return [item["id"] for item in items if item["type"] == "item_reference"]


def resolve_references(
    stored: Sequence[bytes],
    inputs: Sequence[ItemDict],
    fields: Mapping[str, bytes],
    limits: Limits,
    field: str = "input",
    size: int = 0,
) -> ContextItems:
    """Return the stored items, and the inputs with references resolved; `size` is that of both.

    The total, with each item as often as it is referenced, is checked against the limits before any is
    decoded.
    """
    meant = _count_references(inputs, fields, field)
    bodies = [*((body, 1) for body in stored), *((fields[id_], times) for id_, times in meant.items())]
    _check_values(bodies, limits.json_values, field)
    known = {id_: read_shown(_decode(fields[id_]), limits, field) for id_ in meant}
    before = [read_shown(_decode(body), limits, field) for body in stored]
    after = [known[item["id"]] if item["type"] == "item_reference" else item for item in inputs]
    check_size([*before, *after], limits, field)
    check_shown([*before, *after], limits, field)
    return ContextItems(before, after, size)


def _count_references(
    inputs: Sequence[ItemDict], fields: Mapping[str, bytes], field: str
) -> Mapping[str, int]:
    """Count how often each stored item is referenced."""
    for number, item in enumerate(inputs):
        if item["type"] == "item_reference" and item["id"] not in fields:
            message = f"No item found with id {item['id'][:64]!r}; send the item itself."
            raise BadRequest(message, param=f"{field}[{number}].id", code="item_not_found")
    return Counter(references(inputs))


def _check_values(bodies: Sequence[tuple[bytes, int]], most: int, field: str) -> None:
    # A few counts show that most bodies are fine; the others are counted without their strings.
    for count in (_most_values, values):
        total = 0
        for body, times in bodies:
            total += times * count(body)
            if total > most:
                break
        else:
            return
    check_count(total, most, field, "JSON values of stored items")


def _most_values(body: bytes) -> int:
    return body.count(b",") + body.count(b"[") + body.count(b"{")


def check_size(items: Iterable[ItemDict], limits: Limits, field: str = "input") -> None:
    """Check the limits of the whole context: a chain of small requests may add up to a large one.

    An item that occurs several times is measured once. Adding stops at a limit.
    """
    known: dict[int, tuple[int, int]] = {}
    chars = parts = 0
    for count, item in enumerate(items, 1):
        if id(item) not in known:
            known[id(item)] = (sum(len(text) for _, text in leaves(item)), _parts(item))
        chars, parts = chars + known[id(item)][0], parts + known[id(item)][1]
        check_count(count, limits.messages, field, "items")
        check_count(chars, limits.content_chars, field, "characters of content")
        check_count(parts, limits.content_parts, field, "parts of content")


def _parts(item: ItemDict) -> int:
    return sum(len(value) for name in PARTED if isinstance(value := item.get(name), list))
