"""Requests for tests of Messages."""

import json
from typing import Any

from dragoman.api.messages.request import ParsedMessagesRequest, read
from dragoman.api.request_decoder import IgnoredFields
from dragoman.limits import Limits
from dragoman.types import Message

USER = {"role": "user", "content": "hi"}
TOOL = {"name": "look", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
CALL = {"type": "tool_use", "id": "t1", "name": "look", "input": {"city": "Paris"}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "sunny"}


def seal(text: str) -> str:
    return "sealed:" + text


def unseal(sealed: str) -> str | None:
    return sealed.removeprefix("sealed:") if sealed.startswith("sealed:") else None


def asked(
    *messages: dict[str, Any], ignored: IgnoredFields | None = None, **fields: Any
) -> ParsedMessagesRequest:
    """What a body with these messages is read as."""
    body = {"model": "m", "max_tokens": 8, "messages": messages or [USER], **fields}
    return read(json.dumps(body).encode(), Limits(), unseal, ignored or IgnoredFields("error"))


def told(
    *content: dict[str, Any], role: str = "assistant", before: tuple[dict[str, Any], ...] = ()
) -> Message:
    """The last message of a conversation that has this one and a word of the user's behind it."""
    messages = asked(*before, {"role": role, "content": [*content]}, USER).messages
    return messages[-2]
