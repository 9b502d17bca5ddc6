from itertools import count
from typing import Any

import pytest

from dragoman.api.responses.history import messages, pending_approvals
from dragoman.api.responses.items import normalise
from dragoman.errors import BadRequest
from dragoman.types import Message, ToolCall

SEALED = {"sealed": "secret thoughts"}


def normal(*items: dict[str, Any]) -> list[dict[str, Any]]:
    numbers = count(1)
    return normalise(items, lambda prefix: f"{prefix}{next(numbers)}")


def told(*items: dict[str, Any], instructions: str | None = None) -> list[Message]:
    shown = messages(normal(*items), instructions, SEALED.get, lambda space, name: f"{space}.{name}")
    return list(shown)


def refused(*items: dict[str, Any]) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        told(*items)
    return caught.value


def say(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def call(id_: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": id_, "name": "f", "arguments": '{"a": 1}', **fields}


def output(id_: str, output: Any = "done") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": id_, "output": output}


def thought(**fields: Any) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [{"type": "summary_text", "text": "in short"}], **fields}


def called(id_: str, name: str = "None.f", arguments: str = '{"a": 1}') -> ToolCall:
    return ToolCall(id=id_, name=name, arguments=arguments)


MCP = {"server_label": "files", "name": "read", "arguments": "{}"}
REQUEST = {"type": "mcp_approval_request", "id": "mcpr_1", **MCP}


def answer(approve: bool, **fields: Any) -> dict[str, Any]:
    return {"type": "mcp_approval_response", "approval_request_id": "mcpr_1", "approve": approve, **fields}


def test_messages_keep_their_roles_and_order() -> None:
    roles = ["developer", "developer", "user", "assistant", "system", "user"]
    shown = told(*(say(role, role) for role in roles), instructions="first")
    assert [(one.role, one.content) for one in shown] == [("system", "first"), *((r, r) for r in roles)]


def test_parts_stay_parts() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    [message] = told({"role": "user", "content": parts})
    assert message.content == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


def test_what_the_assistant_says_in_a_row_is_one_message() -> None:
    shown = told(thought(), say("assistant", "let me see"), call("1"), call("2"), output("1"), output("2"))
    first = Message(
        role="assistant",
        content="let me see",
        reasoning="in short",
        tool_calls=(called("1"), called("2")),
    )
    results = [Message(role="tool", content="done", tool_call_id=id_) for id_ in ("1", "2")]
    assert shown == [first, *results]


def test_a_result_ends_what_the_assistant_says() -> None:
    shown = told(call("1"), output("1"), call("2"), output("2"), say("assistant", "ok"))
    assert [message.role for message in shown] == ["assistant", "tool", "assistant", "tool", "assistant"]


@pytest.mark.parametrize(
    ("item", "text"),
    [
        (thought(content=[{"type": "reasoning_text", "text": "open"}], encrypted_content="junk"), "open"),
        (thought(encrypted_content="sealed"), "secret thoughts"),
        (thought(), "in short"),
        (thought(summary=[]), None),
    ],
)
def test_reasoning_is_told_as_fully_as_it_is_known(item: dict[str, Any], text: str | None) -> None:
    [message] = told(item, say("assistant", "x"))
    assert message.reasoning == text


def test_items_as_a_response_has_them_may_have_nulls() -> None:
    empty: dict[str, Any] = {
        "id": "rs",
        "type": "reasoning",
        "summary": [],
        "content": None,
        "encrypted_content": None,
    }
    fields = {
        "id": "mcp_1",
        "type": "mcp_call",
        **MCP,
        "output": "1",
        "error": None,
        "approval_request_id": None,
    }
    shown = messages([empty, fields], None, SEALED.get, lambda space, name: name)
    assert [message.role for message in shown] == ["assistant", "tool"]


def test_a_foreign_seal_is_named() -> None:
    error = refused(thought(id="rs_9", encrypted_content="junk"))
    assert error.code == "invalid_encrypted_content" and "'rs_9'" in error.message


def test_a_call_of_a_namespace_has_the_name_that_the_model_sees() -> None:
    [message] = told(call("1", namespace="n", arguments=""))
    assert message.tool_calls == (called("1", "n.f", "{}"),)


def test_a_custom_call_is_a_call_of_the_function_that_stands_for_it() -> None:
    shown = told(
        {"type": "custom_tool_call", "call_id": "1", "name": "c", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "y"}]},
    )
    assert shown == [
        Message(role="assistant", tool_calls=(called("1", "None.c", '{"input":"x"}'),)),
        Message(role="tool", content="y", tool_call_id="1"),
    ]


@pytest.mark.parametrize(
    "items",
    [
        [output("lost")],
        [output("1"), call("1")],
        [say("user", "x"), {"type": "shell_call_output", "call_id": "lost", "output": []}],
        [{"type": "mcp_approval_response", "approval_request_id": "lost", "approve": True}],
    ],
)
def test_an_answer_to_nothing_is_refused(items: list[dict[str, Any]]) -> None:
    error = refused(*items)
    assert error.param == "input" and ("'lost'" in error.message or "'1'" in error.message)


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ({"output": "42"}, "42"),
        ({"error": "gone"}, "Error: gone"),
        ({"error": {"type": "http_error", "code": 500, "message": "oh"}}, "Error: oh"),
        ({"error": {"content": [{"type": "text", "text": "oh"}]}}, "Error: oh"),
        ({"error": {"code": 500}}, "Error: code: 500"),
        ({}, ""),
    ],
)
def test_a_call_of_a_server_brings_its_result(result: dict[str, Any], text: str) -> None:
    shown = told({"type": "mcp_call", "id": "mcp_1", **MCP, **result})
    assert shown == [
        Message(role="assistant", tool_calls=(called("mcp_1", "files.read", "{}"),)),
        Message(role="tool", content=text, tool_call_id="mcp_1"),
    ]


def test_the_model_is_told_of_a_refusal() -> None:
    shown = told(REQUEST, answer(False, reason="too risky"))
    assert shown[0].tool_calls == (called("mcpr_1", "files.read", "{}"),)
    assert shown[1].content == "The user did not allow this call. Reason: too risky"


def test_the_model_is_told_that_nobody_has_answered() -> None:
    assert told(REQUEST)[1].content == "The user has not allowed this call yet."


def test_an_approved_call_is_told_once() -> None:
    fields = {"type": "mcp_call", "id": "mcp_1", **MCP, "approval_request_id": "mcpr_1", "output": "x"}
    shown = told(REQUEST, answer(True), fields)
    assert [message.role for message in shown] == ["assistant", "tool"]
    assert told(REQUEST, answer(True)) == []


def test_approved_calls_wait_until_they_are_made() -> None:
    items = normal(REQUEST, {**REQUEST, "id": "mcpr_2"}, answer(True))
    assert pending_approvals(items) == [(items[0], items[2])]
    rows = normal({"type": "mcp_call", **MCP, "approval_request_id": "mcpr_1"})
    assert pending_approvals([*items, *rows]) == []
    assert pending_approvals(normal(REQUEST, answer(False))) == []


def test_a_summary_replaces_the_talk_before_it() -> None:
    summary = {"type": "compaction", "encrypted_content": "sealed"}
    shown = told(
        say("developer", "rules"), say("user", "a"), call("1"), summary, output("1"), say("user", "b")
    )
    assert [(one.role, one.content) for one in shown] == [
        ("developer", "rules"),
        ("system", "Summary of the conversation so far:\nsecret thoughts"),
        ("tool", "done"),
        ("user", "b"),
    ]


def test_rules_that_were_kept_are_told_once() -> None:
    rules = {**say("developer", "rules"), "id": "msg_rules"}
    shown = told(rules, {"type": "compaction", "encrypted_content": "sealed"}, rules)
    assert [message.role for message in shown] == ["system", "developer"]


def test_only_the_last_summary_counts() -> None:
    summary = {"type": "compaction", "encrypted_content": "sealed"}
    assert len(told({**summary, "encrypted_content": "foreign"}, say("user", "a"), summary)) == 1


def test_hosted_calls_are_told_as_calls() -> None:
    shown = told(
        {"type": "shell_call", "call_id": "s", "action": {"commands": ["ls", "pwd"]}},
        {"type": "shell_call_output", "call_id": "s", "output": [{"stdout": "a.txt", "stderr": ""}]},
    )
    assert shown == [
        Message(
            role="assistant",
            tool_calls=(called("s", "None.shell", '{"input":"commands: ls\\ncommands: pwd"}'),),
        ),
        Message(role="tool", content="stdout: a.txt\nstderr: ", tool_call_id="s"),
    ]


def test_hosted_calls_without_an_output_are_text() -> None:
    [message] = told(
        {"type": "web_search_call", "action": {"type": "search", "query": "tides"}},
        say("assistant", "High at noon."),
    )
    assert message.content == [
        {"type": "text", "text": "[web_search_call]\ntype: search\nquery: tides"},
        {"type": "text", "text": "High at noon."},
    ]


def test_the_output_of_a_local_shell_names_its_call() -> None:
    shown = told(
        {"type": "local_shell_call", "id": "lsh", "call_id": "s", "action": {"command": ["ls"]}},
        {"type": "local_shell_call_output", "id": "s", "output": "a.txt"},
    )
    assert shown[1] == Message(role="tool", content="a.txt", tool_call_id="s")


def test_pictures_are_not_told() -> None:
    picture = {"type": "computer_screenshot", "image_url": "data:image/png;base64,AAAA"}
    shown = told(
        {"type": "image_generation_call", "result": "AAAA"},
        {"type": "computer_call", "call_id": "c", "action": {"type": "screenshot"}},
        {"type": "computer_call_output", "call_id": "c", "output": picture},
    )
    assert "AAAA" not in str(shown)


def test_lists_of_tools_are_not_told() -> None:
    tools = [{"name": "f", "input_schema": {}}]
    assert told({"type": "mcp_list_tools", "server_label": "l", "tools": tools}) == []


def test_fields_that_belong_to_other_kinds_do_no_harm() -> None:
    shown = told(call("1"), {**output("1"), "approval_request_id": [None]})
    assert [message.role for message in shown] == ["assistant", "tool"]
