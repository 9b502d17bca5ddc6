"""Tools that the client runs: calls as items, and their outputs sent back."""

import json
from typing import Any

import pytest

from tests.http.conftest import RunningServer
from tests.support.parrot import call, messages_of
from tests.support.responses import created, fold, kinds, streamed, texts

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "name": "weather", "parameters": SCHEMA}
PATCH = {"type": "custom", "name": "patch", "description": "Changes files."}
FILES = {
    "type": "namespace",
    "name": "files",
    "description": "Files.",
    "tools": [
        {"type": "function", "name": "read", "parameters": SCHEMA},
        {"type": "custom", "name": "write"},
    ],
}
ROME = call("weather", city="Rome")


def only(response: dict[str, Any]) -> dict[str, Any]:
    [item] = response["output"]
    assert isinstance(item, dict)
    return item


def test_a_call_is_an_item(parrot: RunningServer) -> None:
    item = only(created(parrot.url, ROME, tools=[WEATHER]))
    assert (item["type"], item["name"], item["status"]) == ("function_call", "weather", "completed")
    assert json.loads(item["arguments"]) == {"city": "Rome"}
    assert item["id"].startswith("fc_")
    assert item["call_id"].startswith("call_")


def test_events_of_a_call(parrot: RunningServer) -> None:
    events = streamed(parrot.url, ROME, tools=[WEATHER])
    assert kinds(events)[2:6] == [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    [done] = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    assert (done["name"], json.loads(done["arguments"])) == ("weather", {"city": "Rome"})


def test_the_output_of_a_call_reaches_the_model(parrot: RunningServer) -> None:
    first = created(parrot.url, ROME, tools=[WEATHER])
    output = {"type": "function_call_output", "call_id": only(first)["call_id"], "output": "21 degrees"}
    second = created(parrot.url, [output], tools=[WEATHER], previous_response_id=first["id"])
    assert texts(second) == "The tool says: 21 degrees"
    assert [role for role, _ in messages_of(parrot.engine.jobs[-1])] == [
        "system",
        "user",
        "assistant",
        "tool",
    ]


def test_the_output_of_a_call_may_be_parts(parrot: RunningServer) -> None:
    first = created(parrot.url, ROME, tools=[WEATHER])
    parts = [{"type": "input_text", "text": "21 degrees"}]
    output = {"type": "function_call_output", "call_id": only(first)["call_id"], "output": parts}
    history = [{"role": "user", "content": "hi"}, *first["output"], output]
    assert texts(created(parrot.url, history, tools=[WEATHER])) == "The tool says: 21 degrees"


def test_a_custom_call_has_a_text(parrot: RunningServer) -> None:
    answer = call("patch", input="*** Begin\n+ a\n")
    events = streamed(parrot.url, answer, tools=[PATCH])
    [item] = fold(events)
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "patch", "*** Begin\n+ a\n")
    assert kinds(events)[2:6] == [
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
    ]
    output = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "done"}
    id_ = events[-1]["response"]["id"]
    assert texts(created(parrot.url, [output], previous_response_id=id_)) == "The tool says: done"


@pytest.mark.parametrize(("name", "kind"), [("read", "function_call"), ("write", "custom_tool_call")])
def test_a_call_says_its_namespace(parrot: RunningServer, name: str, kind: str) -> None:
    arguments = {"city": "Rome"} if name == "read" else {"input": "text"}
    item = only(created(parrot.url, call(f"files__{name}", **arguments), tools=[FILES]))
    assert (item["type"], item["namespace"], item["name"]) == (kind, "files", name)


def test_a_call_of_a_namespace_is_told_by_its_visible_name(parrot: RunningServer) -> None:
    first = created(parrot.url, call("files__read", city="Rome"), tools=[FILES])
    output = {"type": "function_call_output", "call_id": only(first)["call_id"], "output": "x"}
    created(parrot.url, [output], tools=[FILES], previous_response_id=first["id"])
    [value] = [text for role, text in messages_of(parrot.engine.jobs[-1]) if role == "assistant"]
    assert '"name": "files__read"' in value


def test_text_and_two_calls_in_one_answer(parrot: RunningServer) -> None:
    response = created(parrot.url, f"Let me see.\n{ROME}\n{call('weather', city='Oslo')}", tools=[WEATHER])
    assert [item["type"] for item in response["output"]] == ["message", "function_call", "function_call"]
    assert len({item["id"] for item in response["output"]}) == 3


def test_one_call_where_parallel_ones_are_not_wanted(parrot: RunningServer) -> None:
    answer = f"{ROME}\n{call('weather', city='Oslo')}"
    item = only(created(parrot.url, answer, tools=[WEATHER], parallel_tool_calls=False))
    assert "Rome" in item["arguments"]


def test_a_call_that_the_length_cuts_is_incomplete(parrot: RunningServer) -> None:
    most = ROME.index("Rome") + len("Rom")
    response = created(parrot.url, ROME, tools=[WEATHER], max_output_tokens=most)
    item = only(response)
    assert (response["status"], item["status"]) == ("incomplete", "incomplete")
    assert item["arguments"].endswith('"Rom')


def test_hosted_tools_are_kept_and_not_offered(parrot: RunningServer) -> None:
    tools = [{"type": "web_search"}, {"type": "local_shell"}, WEATHER]
    response = created(parrot.url, "hi", tools=tools)
    assert [tool["type"] for tool in response["tools"]] == ["web_search", "local_shell", "function"]
    assert "web_search" not in messages_of(parrot.engine.jobs[-1])[0][1]


def test_tools_that_items_bring_are_offered(parrot: RunningServer) -> None:
    more = {"type": "additional_tools", "role": "developer", "tools": [WEATHER]}
    item = only(created(parrot.url, [more, {"role": "user", "content": ROME}]))
    assert (item["type"], item["name"]) == ("function_call", "weather")


def test_a_required_call_is_required(parrot: RunningServer) -> None:
    created(parrot.url, ROME, tools=[WEATHER], tool_choice="required")
    assert parrot.engine.jobs[-1].constraint is not None
