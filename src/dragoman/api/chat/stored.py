"""Stored chat completions: how requests and answers are stored and returned."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from dragoman.api.chat.request import ChatRequest, MessageBody, MessageToolCall
from dragoman.api.reply import KEEP_ALIVE, StreamWriter
from dragoman.errors import NotFound
from dragoman.store import Record, StoredItem
from dragoman.types import Answer, Event, EventFold, Message, ToolCall

_encode = msgspec.json.Encoder().encode
_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class RecordingWriter:
    """Writes a stream and collects its events into the stored answers.

    The finish chunk of every choice is held back until `end`: by then the answer is stored, so a client that
    has received the finish can rely on it.
    """

    idle = KEEP_ALIVE

    def __init__(self, writer: StreamWriter, choices: int) -> None:
        self._writer = writer
        self._fold = EventFold(choices)
        self._held: list[Event] = []
        self._failed = False

    def write(self, events: Sequence[Event]) -> bytes:
        self._fold.add(events)
        self._failed = self._failed or any(event.error for event in events)
        if self._failed:
            # An answer that failed is not stored, so there is nothing to wait for.
            held, self._held = self._held, []
            return self._writer.write([*held, *events])
        self._held += [event for event in events if event.kind == "finish"]
        return self._writer.write([event for event in events if event.kind != "finish"])

    def answers(self) -> list[Answer]:
        return self._fold.done()

    def end(self) -> bytes:
        return self._writer.write(self._held) + self._writer.end()


def record(reply: dict[str, Any], request: ChatRequest, request_id: str, owner: str) -> Record:
    """Build the record of an answer, with the request fields that the API returns with it."""
    body = {
        **reply,
        "request_id": request_id,
        "metadata": request.metadata or {},
        "input_user": request.user,
        "seed": request.seed,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "presence_penalty": request.presence_penalty or 0.0,
        "frequency_penalty": request.frequency_penalty or 0.0,
        "tools": _read_content(request.tools),
        "tool_choice": request.tool_choice,
        "response_format": _read_content(request.response_format),
        **({"cache_salt": request.cache_salt} if request.cache_salt else {}),
    }
    return Record(
        kind="chat",
        id=body["id"],
        owner=owner,
        created_at=body["created"],
        status="completed",
        model=body["model"],
        metadata=body["metadata"],
        body=_encode(body),
        inputs=_messages(body["id"], request.messages or ()),
    )


def _messages(id_: str, bodies: Sequence[MessageBody]) -> tuple[StoredItem, ...]:
    named = [(f"{id_}-{number}", message) for number, message in enumerate(bodies)]
    return tuple(StoredItem(name, _encode(_message(name, message))) for name, message in named)


def _message(id_: str, message: MessageBody) -> dict[str, Any]:
    parts = message.content if isinstance(message.content, list) else None
    shown = {
        "id": id_,
        "role": message.role,
        "content": message.content if parts is None else None,
        "content_parts": parts,
        "name": message.name,
    }
    return {**_read_content(message), **shown}


def _read_content(value: Any) -> Any:
    """Return a value of a request as the client sent it, without absent fields."""
    if isinstance(value, Struct):
        members = [(spec.encode_name, getattr(value, spec.name)) for spec in msgspec.structs.fields(value)]
        return {name: _read_content(member) for name, member in members if member is not None}
    return [_read_content(item) for item in value] if isinstance(value, list) else value


class _StoredAnswer(Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[MessageToolCall] | None = None


class _StoredChoice(Struct):
    message: _StoredAnswer


class _StoredReply(Struct):
    choices: list[_StoredChoice]
    cache_salt: str | None = None


_reply = msgspec.json.Decoder(_StoredReply).decode


def read_calls(body: bytes) -> list[Message]:
    """Return the answers of a stored reply that reasoned before they called tools; none if it has a cache
    salt."""
    try:
        reply = _reply(body)
    except msgspec.MsgspecError:
        return []
    answers = [choice.message for choice in reply.choices if choice.message.reasoning_content]
    return [
        Message(
            role="assistant",
            content=answer.content,
            reasoning=answer.reasoning_content,
            tool_calls=tuple(
                ToolCall(id=call.id, name=call.function.name, arguments=str(call.function.arguments or "{}"))
                for call in answer.tool_calls
                if call.function is not None
            ),
        )
        for answer in answers
        if answer.tool_calls and not reply.cache_salt
    ]


def relabel(body: bytes, metadata: Mapping[str, str]) -> bytes:
    """Return a stored reply with other metadata; all else stays the same, byte for byte."""
    return _encode({**_members(body), "metadata": metadata})


def describe_deleted(id_: str) -> dict[str, Any]:
    return {"id": id_, "object": "chat.completion.deleted", "deleted": True}


def unknown_completion(id_: str) -> NotFound:
    return NotFound(
        f"There is no stored chat completion '{id_[:128]}'.", param="completion_id", code="not_found"
    )
