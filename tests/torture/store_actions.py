"""What clients ask of the store, and how each can see whether what it was told is so."""

from collections.abc import Callable
from typing import Any, TypeAlias

import httpx
from msgspec import Struct

from tests.support.responses import payloads, texts, user
from tests.support.wait import becomes

CHAT, RESPONSES, CONVERSATIONS = "/v1/chat/completions", "/v1/responses", "/v1/conversations"
TEXT = "kept"
ASKED: dict[str, Any] = {"messages": [user(TEXT)], "store": True}
NEW: dict[str, Any] = {"metadata": {"new": "1"}}


def _so() -> bool:
    return True


class ActionResult(Struct):
    """What a client was told of one action."""

    acknowledged: bool
    clear: bool = True
    """Whether a refusal says that it is the store."""
    holds: Callable[[], bool] = _so
    """Whether what is there is what the client was told."""


Action: TypeAlias = Callable[[httpx.Client], Callable[[], ActionResult]]
"""Makes ready what it needs, and gives what is to be done while the store fails."""


def _found(client: httpx.Client, path: str) -> dict[str, Any] | None:
    reply = client.get(path)
    assert reply.status_code in (200, 404), reply.text
    body: dict[str, Any] = reply.json()
    return body if reply.status_code == 200 else None


def _refused(reply: httpx.Response, holds: Callable[[], bool] = _so) -> ActionResult:
    clear = reply.status_code == 503 and reply.json()["error"]["code"] == "store_unavailable"
    return ActionResult(False, clear, holds)


def _says(client: httpx.Client, id_: str) -> bool:
    """Whether a response is there and whole."""
    fields = _found(client, f"{RESPONSES}/{id_}")
    return fields is not None and fields["status"] == "completed" and texts(fields) == TEXT


def _response(client: httpx.Client, **fields: Any) -> Callable[[], ActionResult]:
    def act() -> ActionResult:
        reply = client.post(RESPONSES, json={"input": TEXT, **fields})
        if reply.status_code != 200:
            return _refused(reply)
        return ActionResult(True, holds=lambda: _says(client, reply.json()["id"]))

    return act


def _continued(client: httpx.Client) -> Callable[[], ActionResult]:
    before = client.post(RESPONSES, json={"input": TEXT}).json()["id"]
    return _response(client, previous_response_id=before)


def _streamed(client: httpx.Client) -> Callable[[], ActionResult]:
    def act() -> ActionResult:
        reply = client.post(RESPONSES, json={"input": TEXT, "stream": True})
        if reply.status_code != 200:
            return _refused(reply)
        last = payloads(reply.content)[-1]
        if last["type"] == "response.completed":
            return ActionResult(True, holds=lambda: _says(client, last["response"]["id"]))
        return ActionResult(False, "database" in last["response"]["error"]["message"])

    return act


def _in_background(client: httpx.Client) -> Callable[[], ActionResult]:
    def act() -> ActionResult:
        reply = client.post(RESPONSES, json={"input": TEXT, "background": True})
        if reply.status_code != 200:
            return _refused(reply)
        path, seen = f"{RESPONSES}/{reply.json()['id']}", list[dict[str, Any]]()

        def over() -> bool:
            if not seen:
                # To look may fail as well.
                response = client.get(path)
                ended = response.status_code == 200 and response.json()["status"] not in (
                    "queued",
                    "in_progress",
                )
                seen.extend([response.json()] if ended else [])
            return bool(seen)

        assert becomes(over)
        if seen[0]["status"] == "completed":
            return ActionResult(True, holds=lambda: _says(client, seen[0]["id"]))
        return ActionResult(False, "database" in seen[0]["error"]["message"])

    return act


def _in_conversation(client: httpx.Client, **fields: Any) -> Callable[[], ActionResult]:
    path = _conversation(client)

    def act() -> ActionResult:
        asked = {"input": TEXT, "conversation": path.rpartition("/")[2], **fields}
        reply = client.post(RESPONSES, json=asked)
        if reply.status_code != 200:
            return _refused(reply, lambda: _items(client, path) == [])
        id_ = reply.json()["id"]
        return ActionResult(True, holds=lambda: _says(client, id_) and len(_items(client, path)) == 2)

    return act


def _with_ids(client: httpx.Client) -> Callable[[], ActionResult]:
    return _in_conversation(client, return_token_ids=True)


def _chat(client: httpx.Client) -> Callable[[], ActionResult]:
    def act() -> ActionResult:
        reply = client.post(CHAT, json=ASKED)
        if reply.status_code != 200:
            return _refused(reply)
        body = reply.json()

        def holds() -> bool:
            fields = _found(client, f"{CHAT}/{body['id']}")
            return fields is not None and fields["choices"] == body["choices"]

        return ActionResult(True, holds=holds)

    return act


def _streamed_chat(client: httpx.Client) -> Callable[[], ActionResult]:
    def act() -> ActionResult:
        reply = client.post(CHAT, json={**ASKED, "stream": True})
        if reply.status_code != 200:
            return _refused(reply)
        if '"finish_reason":"stop"' not in reply.text and "[DONE]" not in reply.text:
            return ActionResult(False, "store_unavailable" in reply.text)
        id_ = reply.text.partition('"id":"')[2].partition('"')[0]
        return ActionResult(True, holds=lambda: _found(client, f"{CHAT}/{id_}") is not None)

    return act


def _conversation(client: httpx.Client) -> str:
    return f"{CONVERSATIONS}/{client.post(CONVERSATIONS, json={}).json()['id']}"


def _items(client: httpx.Client, path: str) -> list[Any]:
    fields = _found(client, f"{path}/items")
    return list(fields["data"]) if fields else []


def _new_conversation(client: httpx.Client) -> Callable[[], ActionResult]:
    def act() -> ActionResult:
        reply = client.post(CONVERSATIONS, json={"items": [user(TEXT)]})
        if reply.status_code != 200:
            return _refused(reply)
        return ActionResult(
            True, holds=lambda: len(_items(client, f"{CONVERSATIONS}/{reply.json()['id']}")) == 1
        )

    return act


def _new_items(client: httpx.Client) -> Callable[[], ActionResult]:
    path = _conversation(client)

    def act() -> ActionResult:
        reply = client.post(f"{path}/items", json={"items": [user(TEXT), user(TEXT)]})
        if reply.status_code != 200:
            return _refused(reply, lambda: _items(client, path) == [])
        return ActionResult(True, holds=lambda: len(_items(client, path)) == 2)

    return act


def _changed(make: Callable[[httpx.Client], str]) -> Action:
    """A refusal may come after the change: to ask for it again is then no harm."""

    def ready(client: httpx.Client) -> Callable[[], ActionResult]:
        path = make(client)

        def act() -> ActionResult:
            reply = client.post(path, json=NEW)
            if reply.status_code != 200:
                return _refused(reply, lambda: _found(client, path) is not None)
            return ActionResult(
                True, holds=lambda: (_found(client, path) or {}).get("metadata") == NEW["metadata"]
            )

        return act

    return ready


def _deleted(make: Callable[[httpx.Client], str]) -> Action:
    def ready(client: httpx.Client) -> Callable[[], ActionResult]:
        path = make(client)

        def act() -> ActionResult:
            reply = client.delete(path)
            if reply.status_code != 200:
                return _refused(reply)
            return ActionResult(True, holds=lambda: _found(client, path) is None)

        return act

    return ready


def _kept_response(client: httpx.Client) -> str:
    return f"{RESPONSES}/{client.post(RESPONSES, json={'input': TEXT}).json()['id']}"


def _kept_chat(client: httpx.Client) -> str:
    return f"{CHAT}/{client.post(CHAT, json=ASKED).json()['id']}"


def _kept_item(client: httpx.Client) -> str:
    path = _conversation(client)
    added = client.post(f"{path}/items", json={"items": [user(TEXT)]}).json()
    return f"{path}/items/{added['data'][0]['id']}"


ACTIONS: dict[str, Action] = {
    "a response": _response,
    "a response that continues another": _continued,
    "a streamed response": _streamed,
    "a response in the background": _in_background,
    "a response in a conversation": _in_conversation,
    "a response in a conversation, with its ids": _with_ids,
    "a chat completion": _chat,
    "a streamed chat completion": _streamed_chat,
    "a new conversation": _new_conversation,
    "new items of a conversation": _new_items,
    "new metadata of a conversation": _changed(_conversation),
    "new metadata of a chat completion": _changed(_kept_chat),
    "deleting a response": _deleted(_kept_response),
    "deleting a chat completion": _deleted(_kept_chat),
    "deleting a conversation": _deleted(_conversation),
    "deleting an item": _deleted(_kept_item),
}
