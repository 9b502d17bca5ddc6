"""Responses over a socket: made whole, streamed and read back, and everything the object says."""

from typing import Any

import httpx
import pytest

from dragoman.engines.scripted import ScriptedEngine, say
from tests.http.conftest import RunningServer, Serve
from tests.support.parrot import BREAK, call, messages_of
from tests.support.responses import (
    PATH,
    create,
    created,
    error_of,
    fold,
    get,
    kinds,
    numbers,
    streamed,
    texts,
)

# fmt: off
FIELDS = (
    "id", "object", "created_at", "completed_at", "status", "error", "incomplete_details",
    "instructions", "model", "output", "parallel_tool_calls", "previous_response_id", "conversation",
    "metadata", "tool_choice", "tools", "temperature", "top_p", "presence_penalty", "frequency_penalty",
    "top_logprobs", "truncation", "text", "reasoning", "usage", "max_output_tokens", "max_tool_calls",
    "store", "background", "service_tier", "safety_identifier", "prompt_cache_key",
)
# fmt: on
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
ANSWERS = ["Hello, wörld!", "<think>\nHm.\n</think>\n\nHi.", call("weather", city="Rome"), "\n", " a\n\nb "]


def timeless(response: dict[str, Any]) -> dict[str, Any]:
    """Without what no two responses share."""
    output = [{**item, "id": "", "call_id": ""} for item in response["output"]]
    return {**response, "output": output, "id": "", "created_at": 0, "completed_at": 0}


def test_the_text_of_all_messages_is_there_for_clients_without_an_sdk(parrot: RunningServer) -> None:
    whole = created(parrot.url, "Hi.")
    assert whole["output_text"] == texts(whole) == "Hi."


@pytest.mark.parametrize(("asked", "told"), [("flex", "flex"), ("auto", "default"), ("gold", "default")])
def test_a_service_tier_that_there_is_is_told_back(parrot: RunningServer, asked: str, told: str) -> None:
    assert created(parrot.url, "Hi.", service_tier=asked)["service_tier"] == told


@pytest.mark.parametrize("answer", ANSWERS)
def test_whole_streamed_and_stored_are_the_same(parrot: RunningServer, answer: str) -> None:
    whole = created(parrot.url, answer, tools=[WEATHER])
    events = streamed(parrot.url, answer, tools=[WEATHER])
    last = events[-1]["response"]
    assert fold(events) == last["output"]
    assert timeless(last) == timeless(whole)
    assert get(parrot.url, whole["id"]).json() == whole
    assert get(parrot.url, last["id"]).json() == last


def test_events_of_a_message(parrot: RunningServer) -> None:
    events = streamed(parrot.url, "Hello!")
    assert kinds(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert numbers(events) == list(range(len(events)))


def test_every_field_is_there(parrot: RunningServer) -> None:
    response = created(parrot.url)
    assert set(FIELDS) <= set(response)
    assert (response["object"], response["status"], response["error"]) == ("response", "completed", None)
    assert response["completed_at"] >= response["created_at"]


def test_the_request_is_repeated(parrot: RunningServer) -> None:
    fields: dict[str, Any] = {
        "instructions": "Be brief.",
        "metadata": {"a": "b"},
        "temperature": 0.5,
        "top_p": 0.25,
        "max_output_tokens": 99,
        "max_tool_calls": 3,
        "parallel_tool_calls": False,
        "truncation": "auto",
        "tool_choice": "none",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "user": "u",
        "store": False,
    }
    response = created(parrot.url, **fields)
    assert {name: response[name] for name in fields} == fields


def test_usage_counts_tokens(parrot: RunningServer) -> None:
    response = created(parrot.url, "<think>\nHm.\n</think>\n\nHi.")
    job, usage = parrot.engine.jobs[-1], response["usage"]
    assert usage["input_tokens"] == len(job.prompt)
    assert usage["output_tokens"] == len("<think>\nHm.\n</think>\n\nHi.") + 1
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert 0 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]
    assert usage["input_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 0}


def test_an_answer_that_the_length_cuts_is_incomplete(parrot: RunningServer) -> None:
    events = streamed(parrot.url, "Hello!", max_output_tokens=4)
    last = events[-1]["response"]
    assert events[-1]["type"] == "response.incomplete"
    assert (last["status"], last["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (texts(last), last["output"][0]["status"]) == ("Hell", "incomplete")
    assert last["completed_at"] is None
    assert get(parrot.url, last["id"]).json() == last


def test_log_probabilities_only_where_they_are_included(parrot: RunningServer) -> None:
    asked: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    [item] = created(parrot.url, "ab", **asked)["output"]
    entries = item["content"][0]["logprobs"]
    assert [entry["token"] for entry in entries] == ["a", "b"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    assert created(parrot.url, "ab", top_logprobs=2)["output"][0]["content"][0]["logprobs"] == []


def test_log_probabilities_of_a_stream_are_those_of_its_end(parrot: RunningServer) -> None:
    events = streamed(parrot.url, "ab", include=["message.output_text.logprobs"])
    deltas = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    [item] = events[-1]["response"]["output"]
    assert [entry for each in deltas for entry in each] == item["content"][0]["logprobs"]


def test_fragments_are_padded_where_that_is_wanted(parrot: RunningServer) -> None:
    options = {"include_obfuscation": True}
    padded = [event for event in streamed(parrot.url, "ab", stream_options=options) if "delta" in event]
    plain = [event for event in streamed(parrot.url, "ab") if "delta" in event]
    assert all(event["obfuscation"] for event in padded)
    assert not any("obfuscation" in event for event in plain)


def test_a_schema_reaches_the_engine(parrot: RunningServer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    wish = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    response = created(parrot.url, '{"a": 1}', text={"format": wish})
    assert parrot.engine.jobs[-1].constraint is not None
    assert response["text"] == {"format": wish, "verbosity": "medium"}


def test_instructions_come_first(parrot: RunningServer) -> None:
    created(parrot.url, "hi", instructions="Be brief.")
    assert messages_of(parrot.engine.jobs[-1]) == [("system", "Be brief."), ("user", "hi")]


def test_not_stored_is_not_there(parrot: RunningServer) -> None:
    response = created(parrot.url, store=False)
    assert response["store"] is False
    reply = get(parrot.url, response["id"])
    assert (reply.status_code, error_of(reply)["code"]) == (404, "not_found")


def test_without_a_store_responses_are_made_and_not_kept(serve: Serve) -> None:
    url = serve(ScriptedEngine(say("Hi")), store="none")
    response = created(url)
    assert response["store"] is False
    assert get(url, response["id"]).status_code == 404
    for field, reply in (("store", create(url, store=True)), ("background", create(url, background=True))):
        assert (reply.status_code, error_of(reply)["param"]) == (400, field)


def test_deleted_is_gone(parrot: RunningServer) -> None:
    id_ = created(parrot.url)["id"]
    reply = httpx.delete(f"{parrot.url}{PATH}/{id_}")
    assert reply.json() == {"id": id_, "object": "response", "deleted": True}
    assert get(parrot.url, id_).status_code == 404
    assert httpx.delete(f"{parrot.url}{PATH}/{id_}").status_code == 404


def test_an_answer_that_fails_whole_is_an_error(parrot: RunningServer) -> None:
    reply = create(parrot.url, f"Hello{BREAK}")
    assert (reply.status_code, error_of(reply)["code"]) == (500, "engine_failed")


def test_an_answer_that_fails_on_the_way_is_a_failed_response(parrot: RunningServer) -> None:
    events = streamed(parrot.url, f"Hello{BREAK}")
    last = events[-1]["response"]
    assert events[-1]["type"] == "response.failed"
    assert (last["status"], last["error"]["code"]) == ("failed", "server_error")
    assert fold(events) == last["output"]
    assert (texts(last), last["output"][0]["status"]) == ("Hello", "incomplete")
    assert get(parrot.url, last["id"]).json() == last


@pytest.mark.parametrize("query", ["?include=nothing", "?starting_after=1", "?stream=perhaps"])
def test_a_bad_query_is_refused(parrot: RunningServer, query: str) -> None:
    reply = get(parrot.url, created(parrot.url)["id"], query)
    assert reply.status_code == 400
    assert error_of(reply)["param"]


def test_tokens_are_counted_without_the_engine(parrot: RunningServer) -> None:
    before = len(parrot.engine.jobs)
    body = {"input": "hi", "instructions": "Be brief.", "tools": [WEATHER]}
    counted = httpx.post(f"{parrot.url}{PATH}/input_tokens", json=body).json()
    assert len(parrot.engine.jobs) == before
    assert created(parrot.url, **body)["usage"]["input_tokens"] == counted["input_tokens"]
    assert counted["object"] == "response.input_tokens"
