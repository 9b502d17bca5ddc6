"""The context of a response, a list of items: converted to messages for a chat template, or compacted.

Consecutive reasoning, text and calls of the assistant become one message. Nothing is dropped: items that
templates have no form for become text.
"""

import json
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, TypeAlias

from msgspec import Struct

from dragoman.api.content_parts import ConversationMedia, MediaPart, part_text, template_part
from dragoman.api.responses.event_encoder import ItemEventEncoder
from dragoman.api.responses.items import CALLS, SILENT, ItemDict, Parts, leaves, lines, plainly, read_shown
from dragoman.api.tools import as_arguments
from dragoman.errors import BadRequest
from dragoman.limits import Limits
from dragoman.media import MediaKind
from dragoman.types import Message, Role, ToolCall

Content: TypeAlias = str | list[dict[str, Any]]
Unseal: TypeAlias = Callable[[str], str | None]
Visible: TypeAlias = Callable[[str | None, str], str]
"""Maps a namespace or MCP server label, and a name, to the name that the model sees."""

HEADS = ("system", "developer")
"""Roles of messages that apply to the whole conversation."""
SUMMARY = "Summary of the conversation so far:\n"
BETWEEN_THOUGHTS = "\n"
REFUSED = "The user did not allow this call."
UNANSWERED = "The user has not allowed this call yet."


def messages(
    items: Sequence[ItemDict],
    instructions: str | None,
    unseal: Unseal,
    visible: Visible,
    gallery: ConversationMedia | None = None,
    modalities: Set[MediaKind] = frozenset(),
) -> tuple[Message, ...]:
    """Convert items to messages: `[reasoning, function_call, function_call_output]` becomes an assistant's
    and a tool's message.

    `gallery` collects their media. Media in tool results are passed to the model if it supports their kind,
    and described as text otherwise.
    """
    _check_pairs(items)
    start, kept = _after_compaction(items)
    builder = ItemMessageBuilder(items, unseal, visible, gallery or ConversationMedia(), modalities)
    shown = [*kept, *items[start:]]
    # An item of additional tools has the role developer, too, but no content.
    builder.systems = [item["content"] for item in shown if item.get("role") in HEADS and "content" in item]
    if instructions is not None:
        builder.add_message("system", instructions)
    for item in shown:
        builder.add_item(item)
    return builder.finished()


def pending_approvals(items: Sequence[ItemDict]) -> list[tuple[ItemDict, ItemDict]]:
    """Return the approved requests whose calls were not made yet, each with its approval."""
    texts, answers = _find_approved(items), _answers(items)
    return [
        (item, answers[item["id"]])
        for item in items
        if item["type"] == "mcp_approval_request"
        and item["id"] not in texts
        and answers.get(item["id"], {}).get("approve")
    ]


def beginnings(items: Sequence[ItemDict]) -> list[int]:
    """Return the positions at which a context may begin: at user messages, never between a call and its
    output."""
    numbers: list[int] = []
    waiting: set[str] = set()
    for number, item in reversed(list(enumerate(items))):
        if (answered := _find_answered_call(item)) is not None:
            waiting.add(answered)
        waiting -= _names(item)
        if item.get("role") == "user" and not waiting:
            numbers.append(number)
    return numbers[::-1]


def _find_approved(items: Sequence[ItemDict]) -> set[str | None]:
    return {item.get("approval_request_id") for item in items if item["type"] == "mcp_call"}


def _answers(items: Sequence[ItemDict]) -> Mapping[str, ItemDict]:
    return {item["approval_request_id"]: item for item in items if item["type"] == "mcp_approval_response"}


def _after_compaction(items: Sequence[ItemDict]) -> tuple[int, list[ItemDict]]:
    """Return where the context begins, and earlier instructions, which stay valid after a compaction."""
    last = max((at for at, item in enumerate(items) if item["type"] == "compaction"), default=0)
    after = {item["id"] for item in items[last:]}
    systems = [item for item in items[:last] if item.get("role") in HEADS]
    return last, [item for item in systems if item["id"] not in after]


def _check_pairs(items: Sequence[ItemDict]) -> None:
    """Check that the call of every output, and the request of every approval, precedes it."""
    known: set[str] = set()
    for item in items:
        known |= _names(item)
        answered = _find_answered_call(item)
        if answered is not None and answered not in known:
            message = (
                f"The {item['type']} for {answered[:64]!r} matches no earlier item; send that item first."
            )
            raise BadRequest(message, param="input", code="invalid_value")


def _names(item: ItemDict) -> set[str]:
    """Return the ids by which an output may name a call."""
    if item["type"] not in CALLS:
        return set()
    return {_call_id(item), *([item["id"]] if item["type"] == "local_shell_call" else ())}


def _find_answered_call(item: ItemDict) -> str | None:
    """Return the id of the call that an item answers, or None."""
    if item["type"] == "mcp_approval_response":
        return str(item["approval_request_id"])
    searched = item["type"] == "tool_search_output" and "call_id" not in item
    return _call_id(item) if item["type"].endswith("_output") and not searched else None


def _call_id(item: ItemDict) -> str:
    """Return the id of a call; some types have only the item's id."""
    return str(item.get("call_id", item["id"]))


class ItemMessageBuilder:
    """The messages so far, and the parts of the current assistant message."""

    def __init__(
        self,
        items: Sequence[ItemDict],
        unseal: Unseal,
        visible: Visible,
        gallery: ConversationMedia,
        modalities: Set[MediaKind],
    ) -> None:
        self._gallery = gallery
        self._modalities = modalities
        self._answers = _answers(items)
        self._made = _find_approved(items)
        self._unseal = unseal
        self._visible = visible
        self.systems: Sequence[Parts] = ()
        """Contents of system messages, which a summary does not repeat."""
        self._told: list[Message] = []
        self._reasoning: list[str] = []
        self._texts: list[str] = []
        self._calls: list[ToolCall] = []

    def finished(self) -> tuple[Message, ...]:
        self._close()
        return tuple(self._told)

    def add_item(self, item: ItemDict) -> None:
        match item["type"]:
            case "message":
                self._message(item["role"], item["content"])
            case "reasoning":
                self._reasoning.extend(self._thoughts(item))
            case "function_call":
                self._call(_call_id(item), item.get("namespace"), item["name"], item["arguments"])
            case "custom_tool_call":
                self._call(_call_id(item), item.get("namespace"), item["name"], as_arguments(item["input"]))
            case "function_call_output" | "custom_tool_call_output":
                self._result(_call_id(item), self._content(item["output"]))
            case "mcp_call":
                shown = self._takes(item.get("content") or ())
                self._server_call(item, self._content(item["content"]) if shown else _outcome(item))
            case "computer_call_output" if self._takes([item.get("output")]):
                self._result(_call_id(item), self._content([item["output"]]))
            case "mcp_approval_request":
                self._approval(item)
            case "compaction":
                self._summary(*_unpack(self._opened(item)))
            case kind if kind not in SILENT:
                self._hosted(item)

    def _takes(self, parts: Sequence[Any]) -> bool:
        """Return whether parts have media, all of kinds that the model supports."""
        kinds = {part.media.kind for part in parts if isinstance(part, MediaPart)}
        return bool(kinds) and kinds <= self._modalities

    def add_message(self, role: Role, content: Content) -> None:
        self._close()
        self._told.append(Message(role=role, content=content))

    def _summary(self, text: str, kept: Sequence[ItemDict]) -> None:
        self.add_message("system", SUMMARY + text)
        for item in kept:
            if item["role"] not in HEADS or item["content"] not in self.systems:
                self.add_item(read_shown(item, Limits(), "input"))

    def _message(self, role: Role, parts: Parts) -> None:
        if role == "assistant":
            self._texts.extend(part_text(part, "input") for part in parts)
        else:
            self.add_message(role, self._content(parts))

    def _call(self, id_: str, space: str | None, name: str, arguments: str) -> None:
        self._calls.append(ToolCall(id=id_, name=self._visible(space, name), arguments=arguments or "{}"))

    def _result(self, call_id: str, content: Content) -> None:
        self._close()
        self._told.append(Message(role="tool", content=content, tool_call_id=call_id))

    def _server_call(self, item: ItemDict, outcome: Content) -> None:
        self._call(item["id"], item["server_label"], item["name"], item["arguments"])
        self._result(item["id"], outcome)

    def _approval(self, item: ItemDict) -> None:
        """Add a request that was not approved, with the reason; an approved call has its own item."""
        answer = self._answers.get(item["id"])
        if item["id"] in self._made or (answer and answer["approve"]):
            return
        reason = f" Reason: {answer['reason']}" if answer and answer.get("reason") else ""
        self._server_call(item, (REFUSED if answer else UNANSWERED) + reason)

    def _hosted(self, item: ItemDict) -> None:
        kind, text = item["type"], plainly(item)
        if "call_id" not in item and kind != "local_shell_call_output":
            self._texts.append(f"[{kind}]\n{text}")
        elif kind.endswith("_output"):
            self._result(_call_id(item), text)
        else:
            self._call(item["call_id"], None, kind.removesuffix("_call"), as_arguments(text))

    def _thoughts(self, item: ItemDict) -> list[str]:
        if item.get("content"):
            return [part["text"] for part in item["content"]]
        if item.get("encrypted_content") is not None:
            return [self._opened(item)]
        return [part["text"] for part in item.get("summary") or ()]

    def _opened(self, item: ItemDict) -> str:
        text = self._unseal(item["encrypted_content"])
        if text is None:
            message = (
                f"The encrypted_content of {item['id'][:64]!r} was not made by this server for this key;"
                " leave it out."
            )
            raise BadRequest(message, param="input", code="invalid_encrypted_content")
        return text

    def _content(self, value: str | Parts) -> Content:
        if isinstance(value, str):
            return value
        self._gallery.add(value)
        parts = [template_part(part, "input") for part in value]
        return str(parts[0]["text"]) if len(parts) == 1 and "text" in parts[0] else parts

    def _close(self) -> None:
        """Add the consecutive parts of the assistant as one message."""
        if self._reasoning or self._texts or self._calls:
            message = Message(
                role="assistant",
                content=_join_texts(self._texts) if self._texts else None,
                reasoning=BETWEEN_THOUGHTS.join(self._reasoning) if self._reasoning else None,
                tool_calls=tuple(self._calls),
            )
            self._told.append(message)
        self._reasoning, self._texts, self._calls = [], [], []


def _join_texts(texts: list[str]) -> Content:
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]


def _outcome(item: ItemDict) -> str:
    """Return the result of a call, or its error in the format that the model gets in every API."""
    texts = [item["output"]] if item.get("output") is not None else []
    if (error := item.get("error")) is not None:
        items = [text for key, text in leaves(error, "message") if key in ("message", "text")]
        texts.append("Error: " + "\n".join(items or lines(error, "error")))
    return "\n".join(texts)


# Compaction of a long conversation: a sealed summary written by the model, and items kept unchanged.
#
# Kept user and system messages are sealed with the summary: they cannot be output items of a response.


TRIGGER = "compaction_trigger"
PREFIX = "cmp_"
ASK = (
    "Write a summary of our conversation so far, for yourself to go on from when you have nothing else of"
    " it. Keep every fact, decision, name, number, file, open question and next step that may matter. Write"
    " nothing but the summary."
)


_SEALED = ("user", *HEADS)
_KEPT = "\0"
"""Prefix of a sealed summary that contains messages."""


class CompactionResult(Struct, frozen=True):
    item: ItemDict
    """The summary item, with the sealed messages."""
    kept: list[ItemDict]
    """Other items kept unchanged, after the summary."""

    @property
    def items(self) -> list[ItemDict]:
        return [self.item, *self.kept]


def is_triggered(inputs: Sequence[ItemDict]) -> bool:
    """Return whether the client asks only for a compaction."""
    triggers = [number for number, item in enumerate(inputs) if item.get("type") == TRIGGER]
    if triggers and triggers[0] != len(inputs) - 1:
        param = f"input[{triggers[0]}]"
        raise BadRequest(
            f"A {TRIGGER} must be the last item of the input.", param=param, code="invalid_value"
        )
    return bool(triggers)


def with_summary_request(items: Sequence[ItemDict], id_: str) -> list[ItemDict]:
    """Return the conversation with the request for its summary at the end."""
    asked = {"id": id_, "type": "message", "role": "user", "content": [{"type": "input_text", "text": ASK}]}
    return [*(item for item in items if item.get("type") != TRIGGER), asked]


def compact(
    items: Sequence[ItemDict], summary: str, seal: Callable[[str], str], id_: str
) -> CompactionResult:
    """Build a compaction; it keeps system messages, and the last exchange if it is not answered yet."""
    kept = [item for item in items if item.get("role") in HEADS]
    users = [number for number, item in enumerate(items) if item.get("role") == "user"]
    last = items[-1] if items else {}
    waits = last.get("role") == "user" or str(last.get("type")).endswith("_output")
    if waits and users:
        rest = (item for item in items[users[-1] :] if item.get("role") not in HEADS)
        kept += [item for item in rest if item.get("type") != TRIGGER]
    sealed = [item for item in kept if item.get("role") in _SEALED]
    compaction = {"id": id_, "type": "compaction", "encrypted_content": seal(_pack(summary, sealed))}
    return CompactionResult(compaction, [item for item in kept if item.get("role") not in _SEALED])


def _pack(summary: str, kept: list[ItemDict]) -> str:
    if not kept and not summary.startswith(_KEPT):
        return summary
    # A model may write a lone surrogate, which only this encoder supports.
    return _KEPT + json.dumps([summary, kept])


def _unpack(sealed: str) -> tuple[str, Sequence[ItemDict]]:
    if not sealed.startswith(_KEPT):
        return sealed, ()
    text, kept = json.loads(sealed.removeprefix(_KEPT))
    return text, kept


def compaction_events(encoder: ItemEventEncoder, item: ItemDict) -> bytes:
    return encoder.added({**item, "encrypted_content": ""}) + encoder.done(item)
