"""Streams put together the way a client does it."""

from collections.abc import Iterable
from typing import Any


def message_of(chunks: Iterable[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """The message that the chunks of one choice tell, with its `finish_reason`."""
    fields: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": [], "finish_reason": None}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        if choice["index"] == index:
            _add(fields, choice["delta"])
            fields["finish_reason"] = choice["finish_reason"] or fields["finish_reason"]
    return fields


def _add(fields: dict[str, Any], delta: dict[str, Any]) -> None:
    fields["content"] += delta.get("content") or ""
    fields["reasoning"] += delta.get("reasoning_content") or ""
    assert delta.get("reasoning") == delta.get("reasoning_content")
    for call in delta.get("tool_calls", ()):
        if call["index"] == len(fields["tool_calls"]):
            fields["tool_calls"].append(
                {"id": call["id"], "type": call["type"], "function": call["function"]}
            )
        else:
            assert set(call) == {"index", "function"}
            fields["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]


def told(message: dict[str, Any]) -> list[tuple[str, str]]:
    """The calls of a message as `(name, arguments)`."""
    calls = message.get("tool_calls") or []
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
