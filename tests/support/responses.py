"""What a client makes of the events of a response, written apart from the code that makes them."""

import copy
import json
from collections.abc import Iterable
from typing import Any

import httpx

from tests.support.http import post

PATH = "/v1/responses"
DONE = b"data: [DONE]\n\n"
ENDS = ("response.completed", "response.incomplete", "response.failed")
TEXT_PARTS = {
    "response.output_text": ("content", "content_index"),
    "response.reasoning_text": ("content", "content_index"),
    "response.reasoning_summary_text": ("summary", "summary_index"),
}
PARTS = {
    "response.content_part": ("content", "content_index"),
    "response.reasoning_summary_part": ("summary", "summary_index"),
}
CALL_TEXTS = {
    "response.function_call_arguments": "arguments",
    "response.mcp_call_arguments": "arguments",
    "response.custom_tool_call_input": "input",
}
STREAMED = ("id", "type", "content", "summary", "arguments", "input")
"""The fields of an item that are whole before the item is done."""


def payloads(events: bytes) -> list[dict[str, Any]]:
    """The events of a stream, whose frames are checked; its end mark is left out."""
    items = []
    for block in events.split(b"\n\n")[:-1]:
        name, _, data = block.partition(b"\ndata: ")
        if block in (DONE.strip(), b": keep-alive"):
            continue
        items.append(json.loads(data))
        assert name == b"event: " + items[-1]["type"].encode()
    return items


class EventFolder:
    def __init__(self) -> None:
        self.output: list[dict[str, Any]] = []
        self._open: set[int] = set()

    def take(self, event: dict[str, Any]) -> None:
        if "output_index" not in event:
            return
        kind, _, step = event["type"].rpartition(".")
        index = event["output_index"]
        if event["type"] == "response.output_item.added":
            assert index == len(self.output)
            self.output.append(copy.deepcopy(event["item"]))
            self._open.add(index)
            return
        assert index in self._open
        item = self.output[index]
        if event["type"] == "response.output_item.done":
            self._done(index, event["item"])
            return
        assert event["item_id"] == item["id"]
        if kind in PARTS:
            _part(item, PARTS[kind], event, step)
        elif kind in TEXT_PARTS:
            field, index_name = TEXT_PARTS[kind]
            _text(item[field][event[index_name]], "text", event, step)
        elif kind in CALL_TEXTS:
            _text(item, CALL_TEXTS[kind], event, step)

    def _done(self, index: int, item: dict[str, Any]) -> None:
        built = self.output[index]
        if built["type"] == "reasoning" and item["content"]:
            # It says in other words what the summary says.
            built["content"] = [{"type": "reasoning_text", "text": part["text"]} for part in built["summary"]]
        assert {name: built.get(name) for name in STREAMED} == {name: item.get(name) for name in STREAMED}
        self.output[index] = item
        self._open.remove(index)

    def finished(self) -> list[dict[str, Any]]:
        assert not self._open
        return self.output


def _part(item: dict[str, Any], position: tuple[str, str], event: dict[str, Any], step: str) -> None:
    field, index_name = position
    if step == "added":
        assert event[index_name] == len(item[field])
        item[field].append(copy.deepcopy(event["part"]))
    else:
        assert event["part"] == item[field][event[index_name]]


def _text(holder: dict[str, Any], field: str, event: dict[str, Any], step: str) -> None:
    if step == "delta":
        holder[field] += event["delta"]
        if "logprobs" in event:
            holder["logprobs"] += event["logprobs"]
    else:
        assert event[field] == holder[field]


def fold(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that events build up. Fails if one is about an item that is not there, or is done already."""
    folding = EventFolder()
    for event in events:
        folding.take(event)
    return folding.finished()


def numbers(events: Iterable[dict[str, Any]]) -> list[int]:
    return [event["sequence_number"] for event in events]


def kinds(events: Iterable[dict[str, Any]]) -> list[str]:
    """The types of events, without what they all begin with; deltas in a row are one."""
    names = [event["type"].removeprefix("response.") for event in events]
    return [name for at, name in enumerate(names) if not (name.endswith(".delta") and names[at - 1] == name)]


def create(url: str, input: Any = "hi", *, key: str | None = None, **fields: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return post(url, PATH, {"input": input, **fields}, **headers)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def created(url: str, input: Any = "hi", **fields: Any) -> dict[str, Any]:
    """A response that was made as asked."""
    reply = create(url, input, **fields)
    assert reply.status_code == 200, reply.text
    body: dict[str, Any] = reply.json()
    return body


def streamed(url: str, input: Any = "hi", **fields: Any) -> list[dict[str, Any]]:
    """The events of a response; their end mark is checked."""
    reply = create(url, input, stream=True, **fields)
    assert reply.status_code == 200, reply.text
    assert reply.content.endswith(DONE)
    return payloads(reply.content)


def texts(response: dict[str, Any]) -> str:
    """All that the messages of a response say."""
    parts = [part for item in response["output"] if item["type"] == "message" for part in item["content"]]
    return "".join(part["text"] for part in parts)


def get(url: str, id_: str, query: str = "", key: str | None = None) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.get(f"{url}{PATH}/{id_}{query}", headers=headers, timeout=30)


def error_of(reply: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error
