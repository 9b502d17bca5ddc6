from collections.abc import Callable, Iterator
from itertools import count, repeat
from typing import Any

import pytest
from msgspec.json import encode
from openai.types.responses import ResponseItem
from pydantic import TypeAdapter

from dragoman.api.responses.items import KINDS, check_size, normalise, references, resolve_references
from dragoman.errors import BadRequest
from dragoman.json_size import values
from dragoman.limits import Limits


def numbered() -> Callable[[str], str]:
    numbers = count(1)
    return lambda prefix: f"{prefix}{next(numbers)}"


def normal(*items: dict[str, Any]) -> list[dict[str, Any]]:
    return normalise(items, numbered())


def refused(*items: dict[str, Any]) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        normal(*items)
    return caught.value


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}


def test_a_text_is_a_message_of_the_user() -> None:
    assert normalise("hi", numbered()) == [
        {
            "type": "message",
            "id": "msg_1",
            "role": "user",
            "status": "completed",
            "content": [{"type": "input_text", "text": "hi"}],
        }
    ]


def test_the_assistant_speaks_in_output_texts() -> None:
    [item] = normal({"role": "assistant", "content": "hi", "phase": "commentary"})
    assert item["content"] == [{"type": "output_text", "text": "hi", "annotations": []}]
    assert item["phase"] == "commentary"


def test_a_refusal_stays_one() -> None:
    part = {"type": "refusal", "refusal": "no"}
    assert normal({"role": "assistant", "content": [part]})[0]["content"] == [part]


@pytest.mark.parametrize("kind", ["input_text", "text", "output_text"])
def test_texts_of_the_user_have_one_name(kind: str) -> None:
    [item] = normal({"role": "user", "content": [{"type": kind, "text": "x"}]})
    assert item["content"] == [{"type": "input_text", "text": "x"}]


def test_what_is_there_stays() -> None:
    [item] = normal({**CALL, "id": "mine", "status": "incomplete", "namespace": "n", "later": {"a": [1]}})
    assert item == {**CALL, "id": "mine", "status": "incomplete", "namespace": "n", "later": {"a": [1]}}


def test_null_means_unset() -> None:
    [item] = normal({**CALL, "id": None, "status": None, "namespace": None})
    assert item == {**CALL, "id": "fc_1", "status": "completed"}


@pytest.mark.parametrize("arguments", ['{"a', "", "{'a': 1}", "[]"])
def test_a_call_comes_back_as_the_model_wrote_it(arguments: str) -> None:
    """A client that keeps everything itself sends wrong calls back too, with what was wrong with them."""
    [item] = normal({**CALL, "arguments": arguments})
    assert item["arguments"] == arguments


PICTURE = {"type": "input_image", "image_url": "https://example.com/a.png"}


@pytest.mark.parametrize(
    ("item", "place", "code"),
    [
        ({}, "type", "missing_field"),
        ({"type": "telepathy"}, "type", "invalid_value"),
        ({"type": ["message"]}, "type", "invalid_value"),
        ({"role": "user"}, "content", "missing_field"),
        ({"role": "robot", "content": "x"}, "role", "invalid_value"),
        ({"role": "user", "content": 3}, "content", "invalid_value"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "content[0].text", "invalid_value"),
        ({"role": "user", "content": [{"type": {}, "text": "x"}]}, "content[0].type", "invalid_value"),
        ({"role": "user", "content": [PICTURE]}, "content[0].image_url", "unsupported_content"),
        ({"role": "user", "content": [{"type": "input_file"}]}, "content[0]", "unsupported_content"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "content[0]", "invalid_value"),
        ({"type": "function_call", "name": "f", "arguments": ""}, "call_id", "missing_field"),
        ({**CALL, "status": "lost"}, "status", "invalid_value"),
        ({**CALL, "id": 3}, "id", "invalid_value"),
        ({"type": "function_call_output", "call_id": "c"}, "output", "missing_field"),
        (
            {"type": "function_call_output", "call_id": "c", "output": [PICTURE]},
            "output[0].image_url",
            "unsupported_content",
        ),
        ({"type": "custom_tool_call", "call_id": "c", "name": "f"}, "input", "missing_field"),
        ({"type": "reasoning", "summary": [{"text": "x"}]}, "summary[0].type", "missing_field"),
        ({"type": "mcp_call", "server_label": "l", "name": "f"}, "arguments", "missing_field"),
        ({"type": "mcp_approval_response", "approval_request_id": "m"}, "approve", "missing_field"),
        ({"type": "compaction"}, "encrypted_content", "missing_field"),
        ({"type": "item_reference"}, "id", "missing_field"),
        ({"type": "shell_call", "action": {}}, "call_id", "missing_field"),
    ],
)
def test_a_bad_item_is_named_by_its_place(item: dict[str, Any], place: str, code: str) -> None:
    error = refused(user("first"), item)
    assert (error.param, error.code) == (f"input[1].{place}", code)


def test_settings_cannot_change_midway() -> None:
    error = refused({"type": "configuration_update", "reasoning": {"effort": "low"}})
    assert (error.param, error.code) == ("input[0]", "unsupported_content")


def test_items_of_another_field_are_named_by_it() -> None:
    with pytest.raises(BadRequest) as caught:
        normalise([{}], numbered(), "items")
    assert caught.value.param == "items[0].type"


SCREEN = {"type": "computer_screenshot", "image_url": "data:image/png;base64,AAAA"}
PATCH = {"type": "delete_file", "path": "a.txt"}
EVERY_KIND: dict[str, dict[str, Any]] = {
    "message": user("hi"),
    "reasoning": {"content": [{"type": "reasoning_text", "text": "hm"}]},
    "function_call": CALL,
    "function_call_output": {"call_id": "c", "output": [{"type": "input_text", "text": "1"}]},
    "custom_tool_call": {"call_id": "c", "name": "f", "input": "x"},
    "custom_tool_call_output": {"call_id": "c", "output": "1"},
    "mcp_list_tools": {"server_label": "l", "tools": [{"name": "f", "input_schema": {}}]},
    "mcp_call": {"server_label": "l", "name": "f", "arguments": "{}", "output": "1"},
    "mcp_approval_request": {"server_label": "l", "name": "f", "arguments": "{}"},
    "mcp_approval_response": {"approval_request_id": "m", "approve": True},
    "compaction": {"encrypted_content": "x"},
    "additional_tools": {"tools": [{"type": "function", "name": "f", "parameters": {}, "strict": True}]},
    "tool_search_call": {"arguments": {"query": "x"}},
    "tool_search_output": {"tools": []},
    "file_search_call": {"queries": ["x"]},
    "web_search_call": {"action": {"type": "search", "query": "x"}},
    "code_interpreter_call": {"code": "1", "container_id": "c"},
    "image_generation_call": {"result": "AAAA"},
    "computer_call": {"call_id": "c", "action": {"type": "wait"}},
    "computer_call_output": {"call_id": "c", "output": SCREEN},
    "local_shell_call": {"call_id": "c", "action": {"type": "exec", "command": ["ls"], "env": {}}},
    "local_shell_call_output": {"id": "c", "output": "a.txt"},
    "shell_call": {"call_id": "c", "action": {"commands": ["ls"]}},
    "shell_call_output": {"call_id": "c", "output": []},
    "apply_patch_call": {"call_id": "c", "operation": PATCH},
    "apply_patch_call_output": {"call_id": "c", "output": "done"},
    "program": {"call_id": "c", "code": "1", "fingerprint": "f"},
    "program_output": {"call_id": "c", "result": "1"},
}


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_the_sdk_can_read_what_is_stored(kind: str) -> None:
    [item] = normal({"type": kind, **EVERY_KIND[kind]})
    read = TypeAdapter[Any](ResponseItem).validate_python(item)
    assert (read.type, read.id) == (kind, item["id"])


def test_every_kind_is_shown_to_the_sdk() -> None:
    """Except those that are only ever sent."""
    assert set(KINDS) - set(EVERY_KIND) == {"compaction_trigger", "item_reference"}


@pytest.mark.parametrize(
    "reference", [{"type": "item_reference", "id": "m"}, {"id": "m"}, {"type": None, "id": "m"}]
)
def test_a_reference_becomes_the_item(reference: dict[str, Any]) -> None:
    items = normal(user("a"), reference)
    fields = normal({**user("b"), "id": "m"})[0]
    assert references(items) == ["m"]
    assert resolve_references([], items, {"m": encode(fields)}, Limits()).inputs == [items[0], fields]


def test_a_lost_reference_is_named() -> None:
    with pytest.raises(BadRequest) as caught:
        resolve_references([], normal(user("a"), {"id": "lost"}), {}, Limits())
    assert (caught.value.param, caught.value.code) == ("input[1].id", "item_not_found")


@pytest.mark.parametrize("limits", [Limits(messages=1), Limits(content_chars=100), Limits(content_parts=1)])
def test_a_context_has_a_size(limits: Limits) -> None:
    items = normal(user("x" * 60), user("y" * 60))
    with pytest.raises(BadRequest) as caught:
        check_size(items, limits)
    assert (caught.value.param, caught.value.code) == ("input", "limit_exceeded")


def test_more_parts_than_a_context_may_have_are_refused_unread() -> None:
    parts = [{"type": "not looked at"}] * 3
    with pytest.raises(BadRequest, match="At most 2 parts of content are allowed, got 3"):
        normalise([{"role": "user", "content": parts}], numbered(), limits=Limits(content_parts=2))


def test_what_references_stand_for_counts_as_often_as_it_is_meant() -> None:
    body = encode(normal({**user("a, b, c"), "id": "m"})[0])
    items = normal(*[{"id": "m"}] * 10)
    assert (
        resolve_references([], items, {"m": body}, Limits(json_values=10 * values(body))).inputs[0]["id"]
        == "m"
    )
    with pytest.raises(BadRequest, match="JSON values of stored items"):
        resolve_references([], items, {"m": body}, Limits(json_values=10 * values(body) - 1))
    with pytest.raises(BadRequest, match="parts of content"):
        resolve_references([], items, {"m": body}, Limits(content_parts=9))


def test_an_item_that_is_meant_often_is_decoded_once() -> None:
    body = encode(normal({**user("a"), "id": "m"})[0])
    inputs = resolve_references([], normal(*[{"id": "m"}] * 10), {"m": body}, Limits()).inputs
    assert len({id(item) for item in inputs}) == 1


def test_a_sum_ends_at_its_limit() -> None:
    def endless() -> Iterator[dict[str, Any]]:
        yield from repeat(normal(user("a"))[0])

    with pytest.raises(BadRequest, match="At most 9 items are allowed, got 10"):
        check_size(endless(), Limits(messages=9))
