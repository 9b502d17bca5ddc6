"""The context of a response, which is items: as the messages that a chat template knows, or made short.

What the assistant said in a row (reasoning, text, calls) is one message. Nothing is lost on the way: items
that templates have no words for are told as text.
"""

import json
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, TypeAlias

from msgspec import Struct

from dragoman.api.parts import Gallery, MediaPart, part_text, tell_part
from dragoman.api.responses.items import CALLS, SILENT, ItemDict, Parts, leaves, lines, plainly, read_shown
from dragoman.api.responses.output import ItemPlace
from dragoman.api.tools import as_arguments
from dragoman.errors import BadRequest
from dragoman.limits import Limits
from dragoman.media import MediaKind
from dragoman.types import Message, Role, ToolCall

Content: TypeAlias = str | list[dict[str, Any]]
Unseal: TypeAlias = Callable[[str], str | None]
Visible: TypeAlias = Callable[[str | None, str], str]
"""From a namespace, or the label of an MCP server, and a name to the name that the model knows."""

HEADS = ("system", "developer")
"""Roles of messages that hold for the whole of a conversation."""
SUMMARY = "Summary of the conversation so far:\n"
BETWEEN_THOUGHTS = "\n"
REFUSED = "The user did not allow this call."
UNANSWERED = "The user has not allowed this call yet."


def messages(
    items: Sequence[ItemDict],
    instructions: str | None,
    unseal: Unseal,
    visible: Visible,
    gallery: Gallery | None = None,
    modalities: Set[MediaKind] = frozenset(),
) -> tuple[Message, ...]:
    """`[reasoning, function_call, function_call_output]` gives an assistant's message and a tool's.

    The gallery is told what they show. What tools gave, the model is shown where it takes that, or told of.
    """
    _check_pairs(items)
    start, kept = _after_compaction(items)
    told = _Telling(items, unseal, visible, gallery or Gallery(), modalities)
    shown = [*kept, *items[start:]]
    # Tools that a developer adds are of that role, too, but say nothing.
    told.systems = [item["content"] for item in shown if item.get("role") in HEADS and "content" in item]
    if instructions is not None:
        told.say("system", instructions)
    for item in shown:
        told.take(item)
    return told.finished()


def pending_approvals(items: Sequence[ItemDict]) -> list[tuple[ItemDict, ItemDict]]:
    """The requests that were approved and whose calls have not been made, each with the answer to it."""
    made, answers = _find_approved(items), _answers(items)
    return [
        (item, answers[item["id"]])
        for item in items
        if item["type"] == "mcp_approval_request"
        and item["id"] not in made
        and answers.get(item["id"], {}).get("approve")
    ]


def beginnings(items: Sequence[ItemDict]) -> list[int]:
    """Where a context may begin: with a message of a user, and never between a call and what answers it."""
    found: list[int] = []
    waiting: set[str] = set()
    for number, item in reversed(list(enumerate(items))):
        if (answered := _find_answered_call(item)) is not None:
            waiting.add(answered)
        waiting -= _names(item)
        if item.get("role") == "user" and not waiting:
            found.append(number)
    return found[::-1]


def _find_approved(items: Sequence[ItemDict]) -> set[str | None]:
    return {item.get("approval_request_id") for item in items if item["type"] == "mcp_call"}


def _answers(items: Sequence[ItemDict]) -> Mapping[str, ItemDict]:
    return {item["approval_request_id"]: item for item in items if item["type"] == "mcp_approval_response"}


def _after_compaction(items: Sequence[ItemDict]) -> tuple[int, list[ItemDict]]:
    """Where the context begins, and what of the time before it still holds: instructions are no talk."""
    last = max((at for at, item in enumerate(items) if item["type"] == "compaction"), default=0)
    after = {item["id"] for item in items[last:]}
    systems = [item for item in items[:last] if item.get("role") in HEADS]
    return last, [item for item in systems if item["id"] not in after]


def _check_pairs(items: Sequence[ItemDict]) -> None:
    """Every output and every answer has what it belongs to before it."""
    known: set[str] = set()
    for item in items:
        known |= _names(item)
        answered = _find_answered_call(item)
        if answered is not None and answered not in known:
            message = f"The {item['type']} for {answered[:64]!r} has no item before it that it answers."
            raise BadRequest(message, param="input", code="invalid_value")


def _names(item: ItemDict) -> set[str]:
    """By which an answer may know a call."""
    if item["type"] not in CALLS:
        return set()
    return {_call_id(item), *([item["id"]] if item["type"] == "local_shell_call" else ())}


def _find_answered_call(item: ItemDict) -> str | None:
    """The call that an item answers, if it is an answer."""
    if item["type"] == "mcp_approval_response":
        return str(item["approval_request_id"])
    searched = item["type"] == "tool_search_output" and "call_id" not in item
    return _call_id(item) if item["type"].endswith("_output") and not searched else None


def _call_id(item: ItemDict) -> str:
    """Some kinds of calls have no id beside that of the item."""
    return str(item.get("call_id", item["id"]))


class _Telling:
    """The messages so far, and what the assistant is in the middle of saying."""

    def __init__(
        self,
        items: Sequence[ItemDict],
        unseal: Unseal,
        visible: Visible,
        gallery: Gallery,
        modalities: Set[MediaKind],
    ) -> None:
        self._gallery = gallery
        self._modalities = modalities
        self._answers = _answers(items)
        self._made = _find_approved(items)
        self._unseal = unseal
        self._visible = visible
        self.systems: Sequence[Parts] = ()
        """What is said as a system: a summary does not say it again."""
        self._told: list[Message] = []
        self._reasoning: list[str] = []
        self._texts: list[str] = []
        self._calls: list[ToolCall] = []

    def finished(self) -> tuple[Message, ...]:
        self._close()
        return tuple(self._told)

    def take(self, item: ItemDict) -> None:
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
        """Whether these show something, and nothing that the model cannot take."""
        kinds = {part.media.kind for part in parts if isinstance(part, MediaPart)}
        return bool(kinds) and kinds <= self._modalities

    def say(self, role: Role, content: Content) -> None:
        self._close()
        self._told.append(Message(role=role, content=content))

    def _summary(self, text: str, kept: Sequence[ItemDict]) -> None:
        self.say("system", SUMMARY + text)
        for item in kept:
            if item["role"] not in HEADS or item["content"] not in self.systems:
                self.take(read_shown(item, Limits(), "input"))

    def _message(self, role: Role, parts: Parts) -> None:
        if role == "assistant":
            self._texts.extend(part_text(part, "input") for part in parts)
        else:
            self.say(role, self._content(parts))

    def _call(self, id_: str, space: str | None, name: str, arguments: str) -> None:
        self._calls.append(ToolCall(id=id_, name=self._visible(space, name), arguments=arguments or "{}"))

    def _result(self, call_id: str, content: Content) -> None:
        self._close()
        self._told.append(Message(role="tool", content=content, tool_call_id=call_id))

    def _server_call(self, item: ItemDict, outcome: Content) -> None:
        self._call(item["id"], item["server_label"], item["name"], item["arguments"])
        self._result(item["id"], outcome)

    def _approval(self, item: ItemDict) -> None:
        """A call that was allowed comes as an item of its own; the model is told of the others."""
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

    def _content(self, given: str | Parts) -> Content:
        if isinstance(given, str):
            return given
        self._gallery.add(given)
        parts = [tell_part(part, "input") for part in given]
        return str(parts[0]["text"]) if len(parts) == 1 and "text" in parts[0] else parts

    def _close(self) -> None:
        """What the assistant said in a row is one message."""
        if self._reasoning or self._texts or self._calls:
            said = Message(
                role="assistant",
                content=_join_texts(self._texts) if self._texts else None,
                reasoning=BETWEEN_THOUGHTS.join(self._reasoning) if self._reasoning else None,
                tool_calls=tuple(self._calls),
            )
            self._told.append(said)
        self._reasoning, self._texts, self._calls = [], [], []


def _join_texts(texts: list[str]) -> Content:
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]


def _outcome(item: ItemDict) -> str:
    """The result of a call; or what went wrong, in the words that the model has for it in every API."""
    texts = [item["output"]] if item.get("output") is not None else []
    if (error := item.get("error")) is not None:
        said = [text for key, text in leaves(error, "message") if key in ("message", "text")]
        texts.append("Error: " + "\n".join(said or lines(error, "error")))
    return "\n".join(texts)


# A long conversation made short: a summary that the model writes, sealed, and what is kept as it was.
#
# Messages that are kept are sealed with it: those of users and systems are no output of a response.


TRIGGER = "compaction_trigger"
PREFIX = "cmp_"
ASK = (
    "Write a summary of our conversation so far, for yourself to go on from when you have nothing else of"
    " it. Keep every fact, decision, name, number, file, open question and next step that may matter. Write"
    " nothing but the summary."
)


_SEALED = ("user", *HEADS)
_KEPT = "\0"
"""What a sealed summary begins with that has messages beside it."""


class Compacted(Struct, frozen=True):
    item: ItemDict
    """The summary, with the messages that stay as they were."""
    kept: list[ItemDict]
    """Other items that stay as they were, and follow the summary."""

    @property
    def items(self) -> list[ItemDict]:
        return [self.item, *self.kept]


def is_triggered(inputs: Sequence[ItemDict]) -> bool:
    """Whether the client wants what was said to be made short, and nothing else."""
    found = [number for number, item in enumerate(inputs) if item.get("type") == TRIGGER]
    if found and found[0] != len(inputs) - 1:
        place = f"input[{found[0]}]"
        raise BadRequest(f"A {TRIGGER} must be the last item.", param=place, code="invalid_value")
    return bool(found)


def to_summarise(items: Sequence[ItemDict], id_: str) -> list[ItemDict]:
    """The conversation with the question for its summary at the end."""
    asked = {"id": id_, "type": "message", "role": "user", "content": [{"type": "input_text", "text": ASK}]}
    return [*(item for item in items if item.get("type") != TRIGGER), asked]


def compact(items: Sequence[ItemDict], summary: str, seal: Callable[[str], str], id_: str) -> Compacted:
    """System messages are kept, and the last exchange if it still waits for its answer."""
    kept = [one for one in items if one.get("role") in HEADS]
    users = [number for number, one in enumerate(items) if one.get("role") == "user"]
    last = items[-1] if items else {}
    waits = last.get("role") == "user" or str(last.get("type")).endswith("_output")
    if waits and users:
        rest = (one for one in items[users[-1] :] if one.get("role") not in HEADS)
        kept += [one for one in rest if one.get("type") != TRIGGER]
    told = [one for one in kept if one.get("role") in _SEALED]
    item = {"id": id_, "type": "compaction", "encrypted_content": seal(_pack(summary, told))}
    return Compacted(item, [one for one in kept if one.get("role") not in _SEALED])


def _pack(summary: str, kept: list[ItemDict]) -> str:
    if not kept and not summary.startswith(_KEPT):
        return summary
    # A model may write a lone surrogate, which only this encoder has a way to write.
    return _KEPT + json.dumps([summary, kept])


def _unpack(sealed: str) -> tuple[str, Sequence[ItemDict]]:
    if not sealed.startswith(_KEPT):
        return sealed, ()
    text, kept = json.loads(sealed.removeprefix(_KEPT))
    return text, kept


def compaction_events(place: ItemPlace, item: ItemDict) -> bytes:
    return place.added({**item, "encrypted_content": ""}) + place.done(item)
