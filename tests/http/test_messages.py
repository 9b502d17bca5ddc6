"""Messages over a socket: answers whole and streamed, errors, heads, models and counts."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from dragoman.engines.scripted import ScriptedEngine, say
from dragoman.limits import Limits
from tests.http.conftest import RunningServer, Serve
from tests.support.http import get, post, send
from tests.support.parrot import call, messages_of, parrot
from tests.support.tool_model import prompt_of, tool_model

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
VERSION = {"anthropic-version": "2023-06-01"}
TOOL = {"name": "look", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
THOUGHT = "<think>\nHm.\n</think>\n"


def body(said: Any = "hi", **more: Any) -> dict[str, Any]:
    return {"model": "parrot", "max_tokens": 200, "messages": [{"role": "user", "content": said}], **more}


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, each of which is named by its type."""
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    items = []
    for event in response.text.split("\n\n")[:-1]:
        name, data = event.split("\n")
        items.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {items[-1]['type']}"
    return items


def fold(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that events add up to."""
    assert [rows[0]["type"], rows[-1]["type"]] == ["message_start", "message_stop"]
    message: dict[str, Any] = rows[0]["message"]
    inputs: dict[int, str] = {}
    for event in rows:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            delta = dict(event["delta"])
            block = message["content"][event["index"]]
            if delta.pop("type") == "input_json_delta":
                inputs[event["index"]] = inputs.get(event["index"], "") + delta["partial_json"]
                continue
            for name, text in delta.items():
                block[name] = (block[name] or "") + text
        elif event["type"] == "message_delta":
            message |= {**event["delta"], "usage": event["usage"]}
    for index, text in inputs.items():
        message["content"][index]["input"] = json.loads(text)
    return message


def comparable(message: dict[str, Any]) -> Any:
    """Without what is another one each time."""
    blocks = [
        {k: v for k, v in block.items() if k not in ("id", "signature")} for block in message["content"]
    ]
    return {**message, "id": "", "content": blocks}


@pytest.mark.parametrize(
    "said",
    [
        "hi",
        "",
        " \n",
        THOUGHT + "Yes.",
        THOUGHT + "I look." + call("look", city="Paris") + "\n" + call("look", city="Rome"),
        call("look", city="Paris") + "\nThat was it.",
    ],
)
def test_the_whole_message_is_what_its_events_add_up_to(parrot: RunningServer, said: str) -> None:
    asked = body(said or [], tools=[TOOL]) if said else body("<think></think>", tools=[TOOL])
    whole = post(parrot.url, PATH, asked).json()
    streamed = fold(events(post(parrot.url, PATH, {**asked, "stream": True})))
    assert comparable(whole) == comparable(streamed)
    assert whole["content"]


def test_blocks_come_in_the_order_of_what_was_said(parrot: RunningServer) -> None:
    value = THOUGHT + "I look." + call("look", city="Paris")
    reply = post(parrot.url, PATH, body(value, tools=[TOOL])).json()
    thinking, text, use = reply["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "Hm.")
    assert (text["type"], text["text"]) == ("text", "I look.")
    assert (use["type"], use["name"], use["input"]) == ("tool_use", "look", {"city": "Paris"})
    assert (reply["type"], reply["role"], reply["model"]) == ("message", "assistant", "parrot")
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("tool_use", None)
    assert reply["usage"]["output_tokens"] > 0


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({}, ("end_turn", None)),
        ({"stop_sequences": ["nope", "END"]}, ("stop_sequence", "END")),
        ({"max_tokens": 3}, ("max_tokens", None)),
        ({"max_tokens": 100_000, "messages": [{"role": "user", "content": "x" * 2500}]}, None),
    ],
)
def test_why_it_ended(
    parrot: RunningServer, more: dict[str, Any], reason: tuple[str, str | None] | None
) -> None:
    reply = post(parrot.url, PATH, body("This is the END of it.", **more)).json()
    expected = reason or ("model_context_window_exceeded", None)
    assert (reply["stop_reason"], reply["stop_sequence"]) == expected


def test_a_prompt_is_computed_and_nothing_said(parrot: RunningServer) -> None:
    for stream in (False, True):
        reply = post(parrot.url, PATH, body(max_tokens=0, stream=stream))
        message = fold(events(reply)) if stream else reply.json()
        assert (message["content"], message["stop_reason"]) == ([], "max_tokens")
        assert message["usage"]["output_tokens"] == 0


def test_thinking_that_is_not_shown_comes_back_all_the_same(parrot: RunningServer) -> None:
    hidden = body(THOUGHT + "Yes.", thinking={"type": "adaptive", "display": "omitted"})
    for stream in (False, True):
        reply = post(parrot.url, PATH, {**hidden, "stream": stream})
        content = (fold(events(reply)) if stream else reply.json())["content"]
        assert content[0]["thinking"] == ""
        messages = [*hidden["messages"], {"role": "assistant", "content": content}, body("on")["messages"][0]]
        post(parrot.url, PATH, body(messages=messages))
        assert "Hm." in messages_of(parrot.engine.jobs[-1])[-2][1]


def test_the_next_prompt_goes_on_from_the_ids_of_the_answer(serve: Serve) -> None:
    """Though the template would write them in another way, and thinking stays the client's to send."""
    engine = parrot_of(
        "<think>\nHm. </think>\n\n" + '<tool_call>{"name":"look", "arguments":{"city":"Rome"}}</tool_call>'
    )
    url = serve(engine)
    first = body("hi", tools=[TOOL])
    content = post(url, PATH, first).json()["content"]
    result = {"type": "tool_result", "tool_use_id": content[-1]["id"], "content": "sunny"}
    later = [{"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
    post(url, PATH, {**first, "messages": first["messages"] + later})
    asked, again = engine.jobs[-2:]
    numbers = again.prompt[len(asked.prompt) :]
    assert again.prompt[: len(asked.prompt)] == asked.prompt
    assert (
        bytes(id_ for id_ in numbers if id_ < 256)
        .decode()
        .startswith("<think>\nHm. </think>\n\n<tool_call>{")
    )


def parrot_of(said: str) -> ScriptedEngine:
    return parrot(answer=lambda job: say(said))


# What goes wrong.


def failure(reply: httpx.Response) -> tuple[int, str]:
    result = reply.json()
    assert result["type"] == "error"
    return reply.status_code, result["error"]["type"]


def test_errors_are_anthropics(serve: Serve) -> None:
    url = serve(parrot(), api_key=["k"])
    key = {"x-api-key": "k"}
    assert failure(post(url, PATH, body())) == (401, "authentication_error")
    assert failure(post(url, PATH, body(model="other"), **key)) == (404, "not_found_error")
    assert failure(post(url, "/v1/messages/none", body(), **key)) == (404, "not_found_error")
    assert failure(post(url, "/v1/nothing", body(), **key, **VERSION)) == (404, "not_found_error")
    assert failure(post(url, PATH, body(max_tokens="x"), **key)) == (400, "invalid_request_error")
    assert failure(get(url, PATH, **key)) == (405, "invalid_request_error")
    assert post(url, PATH, body(), authorization="Bearer k").status_code == 200
    assert post(url, f"{PATH}?beta=true", body(), **key, **{"anthropic-beta": "a,b"}).status_code == 200


def test_a_body_that_is_too_large(serve: Serve) -> None:
    url = serve(parrot(), limits=Limits(body_bytes=1000))
    assert failure(post(url, PATH, body("x" * 2000))) == (413, "request_too_large")


def test_a_prompt_that_is_too_long_is_told_in_the_words_that_clients_look_for(parrot: RunningServer) -> None:
    for length in (5000, 500_000):
        reply = post(parrot.url, PATH, body("x" * length))
        assert failure(reply) == (400, "invalid_request_error")
        assert reply.json()["error"]["message"].startswith("prompt is too long: ")
        assert " tokens > " in reply.json()["error"]["message"]


def test_an_engine_that_fails_in_the_middle_is_an_event(parrot: RunningServer) -> None:
    rows = events(post(parrot.url, PATH, body("This BREAKs.", stream=True)))
    assert rows[-1]["type"] == "error"
    assert rows[-1]["error"]["type"] == "api_error"
    assert not [event for event in rows if event["type"] in ("message_delta", "message_stop")]


def test_a_full_server_and_a_key_with_too_much_are_told_apart(serve: Serve) -> None:
    for settings, pair in (
        ({"limits": Limits(in_flight=1, queue=0)}, (529, "overloaded_error")),
        ({"limits": Limits(per_key=1), "api_key": ["k", "l"]}, (429, "rate_limit_error")),
    ):
        url = serve(parrot(), **settings)
        with httpx.stream(
            "POST", url + PATH, json=body("xHANG", stream=True), headers={"x-api-key": "k"}, timeout=60
        ) as held:
            pieces = held.iter_bytes()
            next(pieces)
            reply = post(url, PATH, body(), **{"x-api-key": "k"})
            assert failure(reply) == pair
            assert reply.headers["retry-after"]


def test_the_head_has_anthropics_names(parrot: RunningServer) -> None:
    head = post(parrot.url, PATH, body()).headers
    assert head["request-id"] == head["x-request-id"]
    assert int(head["anthropic-ratelimit-requests-remaining"]) < int(
        head["anthropic-ratelimit-requests-limit"]
    )
    assert head["anthropic-ratelimit-requests-reset"].endswith("Z")
    assert "request-id" not in get(parrot.url, "/v1/models").headers


def test_a_stream_with_nothing_to_say_pings(serve: Serve) -> None:
    url = serve(parrot(), keep_alive=0.05)
    with httpx.stream("POST", url + PATH, json=body("xHANG", stream=True), timeout=60) as held:
        lines = held.iter_lines()
        assert "event: ping" in (next(lines) for _ in range(40))


def test_what_is_too_long_to_be_answered_is_counted(parrot: RunningServer) -> None:
    assert post(parrot.url, COUNT, body("x" * 5000)).json()["input_tokens"] > 5000


# What else Anthropic's clients ask.


def test_models_in_anthropics_form(serve: Serve) -> None:
    url = serve(parrot(), model_alias=["claude"])
    page = get(url, "/v1/models", **VERSION).json()
    assert [model["id"] for model in page["data"]] == ["parrot", "claude"]
    assert (page["first_id"], page["last_id"], page["has_more"]) == ("parrot", "claude", False)
    assert page["data"][0]["type"] == "model"
    short = get(url, "/v1/models?limit=1", **VERSION).json()
    assert ([model["id"] for model in short["data"]], short["has_more"]) == (["parrot"], True)
    after = get(url, "/v1/models?after_id=parrot", **VERSION).json()
    assert [model["id"] for model in after["data"]] == ["claude"]
    assert get(url, "/v1/models/claude", **VERSION).json()["max_input_tokens"] == 4096
    assert failure(get(url, "/v1/models/other", **VERSION)) == (404, "not_found_error")
    assert get(url, "/v1/models/claude").json()["object"] == "model"


def test_whether_somebody_is_there(serve: Serve) -> None:
    url = serve(parrot(), api_key=["k"])
    for path in ("/", "/api/hello"):
        assert send("HEAD", url, path).status_code == 200
    assert get(url, "/").status_code == 200


def test_tokens_are_counted_as_the_answer_has_them(parrot: RunningServer) -> None:
    asked = body("hello", system="Be kind.", tools=[TOOL])
    used = post(parrot.url, PATH, asked).json()["usage"]
    counted = post(
        parrot.url, COUNT, {name: asked[name] for name in ("model", "messages", "system", "tools")}
    )
    assert counted.json() == {"input_tokens": used["input_tokens"] + used["cache_read_input_tokens"]}


def test_many_counts_at_once(parrot: RunningServer) -> None:
    """As Claude Code asks for them, to tell what its context is made of."""
    with ThreadPoolExecutor(24) as pool:
        counts = [pool.submit(post, parrot.url, COUNT, body("x" * n, tools=[TOOL])) for n in range(1, 25)]
        items = [each.result().json()["input_tokens"] for each in counts]
    assert items == [*range(items[0], items[0] + 24)]


# Long conversations.


def test_edits_are_told_and_counted(parrot: RunningServer) -> None:
    content = [
        {"type": "thinking", "thinking": "Long ago.", "signature": ""},
        {"type": "text", "text": "Yes."},
    ]
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": content}] * 2
    edits = {"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}}
    asked = body(messages=[*talk, {"role": "user", "content": "on"}], **edits)
    reply = post(parrot.url, PATH, asked).json()
    (applied,) = reply["context_management"]["applied_edits"]
    assert applied["cleared_thinking_turns"] == 1
    streamed = fold(events(post(parrot.url, PATH, {**asked, "stream": True})))
    counted = post(parrot.url, COUNT, asked).json()
    used = streamed["usage"]["input_tokens"] + streamed["usage"]["cache_read_input_tokens"]
    assert counted["input_tokens"] == used
    original = counted["context_management"]["original_input_tokens"]
    assert original - used == applied["cleared_input_tokens"]


def summarising() -> ScriptedEngine:
    return tool_model(lambda job: say("They had tea." if "summary of our" in prompt_of(job) else "Go on."))


@pytest.mark.parametrize("stream", [False, True])
def test_a_long_conversation_is_made_short(serve: Serve, stream: bool) -> None:
    engine = summarising()
    url = serve(engine)
    wish = {"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 300}}
    talk = [{"role": "user", "content": "tea? " * 100}, {"role": "assistant", "content": "Yes."}]
    talk.append({"role": "user", "content": "More?"})
    asked = body(messages=talk, model="scripted", context_management={"edits": [wish]}, stream=stream)
    reply = post(url, PATH, asked)
    message = fold(events(reply)) if stream else reply.json()
    summary, text = message["content"]
    assert summary["type"] == "compaction"
    assert summary["content"].startswith("They had tea.")
    assert text["text"] == "Go on."
    assert [each["type"] for each in message["usage"]["iterations"]] == ["compaction", "message"]
    later = [*asked["messages"], {"role": "assistant", "content": message["content"]}]
    post(url, PATH, {**asked, "stream": False, "messages": [*later, {"role": "user", "content": "And?"}]})
    shown, before = engine.jobs[-1], engine.jobs[-2]
    assert shown.prompt[: len(before.prompt)] == before.prompt


@pytest.mark.parametrize("stream", [False, True])
def test_a_summary_may_be_all_that_is_asked_for(serve: Serve, stream: bool) -> None:
    url = serve(summarising())
    for wish in (
        {"compaction": {"type": "summarize"}},
        {
            "context_management": {
                "edits": [
                    {
                        "type": "compact_20260112",
                        "trigger": {"type": "input_tokens", "value": 1},
                        "pause_after_compaction": True,
                    }
                ]
            }
        },
    ):
        reply = post(url, PATH, body("tea?", model="scripted", stream=stream, **wish))
        message = fold(events(reply)) if stream else reply.json()
        assert [block["type"] for block in message["content"]] == ["compaction"]
        assert message["stop_reason"] == "compaction"


def test_thinking_that_is_cleared_is_not_given_back_from_memory(serve: Serve) -> None:
    engine = parrot_of(THOUGHT + call("look", city="Rome"))
    url = serve(engine)
    first = body("hi", tools=[TOOL])
    content = post(url, PATH, first).json()["content"]
    result = {"type": "tool_result", "tool_use_id": content[-1]["id"], "content": "sunny"}
    later = [{"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
    edit = {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 0}}
    asked = {**first, "messages": first["messages"] + later, "context_management": {"edits": [edit]}}
    reply = post(url, PATH, asked).json()
    assert reply["context_management"]["applied_edits"]
    assert "Hm." not in prompt_of(engine.jobs[-1])
    forgotten = [{"role": "assistant", "content": content[1:]}, {"role": "user", "content": [result]}]
    outcome = post(url, PATH, {**first, "messages": first["messages"] + forgotten}).json()
    assert "Hm." in prompt_of(engine.jobs[-1])
    assert outcome["usage"]["restored_reasoning_tokens"] > 0
