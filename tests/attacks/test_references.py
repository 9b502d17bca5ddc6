"""A small request that stands for much: references, chains and conversations. It is refused unread."""

import json
from typing import Any

import pytest

from dragoman.limits import Limits
from tests.attacks.bodies import SOCKET, good
from tests.attacks.frame import Frame

MEMORY_MB = 64
"""What is stored stays, and the allocator keeps of the largest for the next one."""
ROUTES = ("/v1/responses", "/v1/responses/input_tokens", "/v1/responses/compact", SOCKET)
PARTS = 10_000
TIMES = 1024
LIMITS = Limits()


def reference(id_: str) -> dict[str, str]:
    return {"type": "item_reference", "id": id_}


def kept(frame: Frame, *items: dict[str, Any]) -> str:
    """A conversation with these items."""
    reply = frame.sent("/v1/conversations", {"items": list(items)})
    assert reply.status == 200, reply.body
    return str(json.loads(reply.body)["id"])


def asked(route: str, **fields: Any) -> dict[str, Any]:
    return {**good(route), **fields}


@pytest.fixture
def large(frame: Frame) -> str:
    """The id of a stored message of many parts."""
    parts = [{"type": "input_text", "text": "a"}] * PARTS
    kept(frame, {"id": "msg_large", "role": "user", "content": parts})
    return "msg_large"


@pytest.mark.parametrize("route", ROUTES)
def test_references_count_as_often_as_they_are_made(frame: Frame, route: str, large: str) -> None:
    error = frame.refused(route, asked(route, input=[reference(large)] * TIMES))
    assert "bytes of stored items" in error["message"]
    error = frame.refused(route, asked(route, input=[reference(large)] * 2))
    assert f"At most {LIMITS.content_parts} parts of content" in error["message"]


@pytest.mark.parametrize("route", ROUTES)
def test_references_to_a_part_of_the_conversation_count_too(frame: Frame, route: str) -> None:
    talk = kept(frame, {"id": "msg_mine", "role": "user", "content": "a" * 100_000})
    error = frame.refused(route, asked(route, conversation=talk, input=[reference("msg_mine")] * TIMES))
    assert "bytes of stored items" in error["message"]


def test_a_conversation_that_has_grown_too_large_is_not_read(frame: Frame) -> None:
    talk = kept(frame)
    for _ in range(3):
        item = {"role": "user", "content": "a" * (LIMITS.context_bytes // 3)}
        assert frame.sent(f"/v1/conversations/{talk}/items", {"items": [item]}).status == 200
    for route in ROUTES:
        error = frame.refused(route, asked(route, conversation=talk))
        assert "bytes of stored items" in error["message"]
    assert frame.server.client.delete(f"/v1/conversations/{talk}").status_code == 200


@pytest.mark.parametrize("route", ROUTES)
def test_unknown_references_are_named(frame: Frame, route: str) -> None:
    error = frame.refused(
        route, asked(route, input=[reference(f"msg_{number}") for number in range(LIMITS.messages)])
    )
    assert (error["code"], error["param"]) == ("item_not_found", "input[0].id")


@pytest.mark.parametrize("route", [*ROUTES, "/v1/conversations"])
def test_parts_are_counted_before_they_are_looked_at(frame: Frame, route: str) -> None:
    parts = [{"type": "input_text", "text": "a"}] * (LIMITS.content_parts + 1)
    field = "items" if route == "/v1/conversations" else "input"
    error = frame.refused(route, asked(route, **{field: [{"role": "user", "content": parts}]}))
    assert error["param"] == field


def test_tools_within_a_tool_are_counted_before_they_are_read(frame: Frame) -> None:
    inner = [{"type": "nothing"}] * (LIMITS.tools + 1)
    tools = [{"type": "namespace", "name": "a", "tools": inner}]
    error = frame.refused("/v1/responses", asked("/v1/responses", tools=tools))
    assert (error["param"], error["code"]) == ("tools", "limit_exceeded")


def test_what_every_event_repeats_is_short(frame: Frame) -> None:
    error = frame.refused(SOCKET, asked(SOCKET, stream_id="a" * 100_000))
    assert error["param"] == "stream_id"
