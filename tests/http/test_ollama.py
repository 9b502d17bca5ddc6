"""Ollama's API over a socket: lines instead of events, and its own names for everything."""

import json
import socket
from typing import Any

import pytest

from dragoman.engines.scripted import ScriptedEngine, say
from tests.http.conftest import RunningServer, Serve
from tests.support.http import get, post, send

MODEL = "scripted"
PARROT = {"model": "parrot"}
HELLO: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
PROMPT: dict[str, Any] = {"model": MODEL, "prompt": "hi"}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def lines(url: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    reply = post(url, path, body)
    assert reply.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in reply.text.splitlines()]


def test_a_chat_is_a_stream_unless_it_is_said_not_to_be(greeter: str) -> None:
    *some, last = lines(greeter, "/api/chat", HELLO)
    assert "".join(line["message"]["content"] for line in some) == "Hello, wörld!"
    assert not any(line["done"] for line in some)
    assert (last["done"], last["done_reason"], last["message"]["content"]) == (True, "stop", "")


def test_the_whole_is_what_the_lines_say(greeter: str) -> None:
    whole = post(greeter, "/api/chat", {**HELLO, "stream": False}).json()
    *some, last = lines(greeter, "/api/chat", HELLO)
    assert whole["message"] == {"role": "assistant", "content": "Hello, wörld!"}
    assert whole["message"]["content"] == "".join(line["message"]["content"] for line in some)
    assert whole.keys() == last.keys()


def test_what_was_used_is_told_in_counts_and_nanoseconds(greeter: str) -> None:
    body = post(greeter, "/api/chat", {**HELLO, "stream": False}).json()
    assert body["prompt_eval_count"] > 0
    assert body["eval_count"] == len("Hello, wörld!".encode()) + 1
    assert body["total_duration"] >= body["eval_duration"] >= 0
    assert body["total_duration"] >= body["prompt_eval_duration"] >= 0


def test_options_are_the_sampling(parrot: RunningServer) -> None:
    options = {
        "num_predict": 1,
        "temperature": 0.5,
        "top_k": 7,
        "repeat_penalty": 1.5,
        "stop": ["x"],
        "seed": 4,
    }
    body = post(parrot.url, "/api/chat", {**HELLO, **PARROT, "options": options, "stream": False}).json()
    asked = parrot.engine.jobs[-1].sampling
    assert (body["done_reason"], asked.max_tokens, asked.temperature) == ("length", 1, 0.5)
    assert (asked.top_k, asked.repetition_penalty, asked.seed) == (7, 1.5, 4)


def test_options_without_effect_are_named(greeter: str) -> None:
    reply = post(greeter, "/api/chat", {**HELLO, "options": {"num_ctx": 4096}, "keep_alive": "5m"})
    assert reply.headers["x-dragoman-ignored"] == "num_ctx, keep_alive"


@pytest.mark.parametrize("streams", [True, False])
def test_reasoning_is_thinking(serve: Serve, streams: bool) -> None:
    url = serve(ScriptedEngine(say("<think>Hm.</think>Yes.")), dialect="qwen3")
    rows = lines(url, "/api/chat", {**HELLO, "stream": True})
    whole = post(url, "/api/chat", {**HELLO, "stream": False}).json()["message"]
    thought = "".join(line["message"].get("thinking", "") for line in rows) if streams else whole["thinking"]
    assert thought == "Hm."


def test_a_call_is_told_when_it_is_whole_with_its_arguments_as_an_object(serve: Serve) -> None:
    url = serve(ScriptedEngine(say(CALL)), dialect="hermes")
    ask = {**HELLO, "tools": TOOLS}
    [called] = [
        line["message"]["tool_calls"]
        for line in lines(url, "/api/chat", ask)
        if "tool_calls" in line["message"]
    ]
    [whole] = post(url, "/api/chat", {**ask, "stream": False}).json()["message"]["tool_calls"]
    assert called[0]["function"] == whole["function"]
    assert whole["function"] == {"index": 0, "name": "weather", "arguments": {"city": "Paris"}}


@pytest.mark.parametrize("streams", [True, False])
def test_arguments_that_are_cut_off_are_text(serve: Serve, streams: bool) -> None:
    url = serve(ScriptedEngine(say(CALL)), dialect="hermes")
    ask = {**HELLO, "tools": TOOLS, "options": {"num_predict": CALL.index("Paris")}, "stream": streams}
    reply = post(url, "/api/chat", ask).text.splitlines()
    items = [json.loads(line)["message"] for line in reply]
    assert "".join(message["content"] for message in items) == '{"city": "'
    assert not any("tool_calls" in message for message in items)


def test_a_loop_of_calls_comes_back(parrot: RunningServer) -> None:
    call = {"function": {"name": "weather", "arguments": {"city": "Paris"}}}
    items = [
        *HELLO["messages"],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "Sun.", "tool_name": "weather"},
    ]
    reply = post(
        parrot.url, "/api/chat", {**HELLO, **PARROT, "messages": items, "tools": TOOLS, "stream": False}
    )
    assert reply.json()["message"]["content"] == "The tool says: Sun."


def test_a_schema_is_the_format(serve: Serve) -> None:
    url = serve(ScriptedEngine(say("{}")))
    reply = post(url, "/api/chat", {**HELLO, "format": {"type": 7}})
    assert reply.status_code == 400
    assert "format" in reply.json()["error"]


def test_a_prompt_is_a_question_of_one_message(parrot: RunningServer) -> None:
    asked = {**PROMPT, **PARROT, "system": "Be short."}
    items = lines(parrot.url, "/api/generate", asked)
    assert "".join(line["response"] for line in items) == "hi"
    prompt = parrot.engine.jobs[-1].prompt
    rows = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "hi"}]
    post(parrot.url, "/v1/chat/completions", {"messages": rows})
    assert parrot.engine.jobs[-1].prompt == prompt


def test_a_raw_prompt_has_no_template(parrot: RunningServer) -> None:
    post(parrot.url, "/api/generate", {**PROMPT, **PARROT, "raw": True})
    raw = parrot.engine.jobs[-1].prompt
    post(parrot.url, "/v1/completions", {"prompt": "hi"})
    assert parrot.engine.jobs[-1].prompt == raw


def test_the_context_of_a_reply_goes_on(parrot: RunningServer) -> None:
    first = post(parrot.url, "/api/generate", {**PROMPT, **PARROT, "stream": False}).json()
    context = first["context"]
    assert len(context) == first["prompt_eval_count"] + first["eval_count"]
    post(
        parrot.url, "/api/generate", {**PROMPT, **PARROT, "prompt": "on", "context": context, "stream": False}
    )
    assert list(parrot.engine.jobs[-1].prompt[: len(context)]) == context
    assert len(parrot.engine.jobs[-1].prompt) > len(context)


@pytest.mark.parametrize(
    ("path", "body"), [("/api/chat", {"model": MODEL}), ("/api/generate", {"model": MODEL})]
)
def test_nothing_asked_is_a_model_that_is_to_be_loaded(greeter: str, path: str, body: dict[str, Any]) -> None:
    [loaded] = lines(greeter, path, body)
    [unloaded] = lines(greeter, path, {**body, "keep_alive": 0})
    assert (loaded["done"], loaded["done_reason"], unloaded["done_reason"]) == (True, "load", "unload")


def test_a_body_is_json_whatever_its_type_says(greeter: str) -> None:
    # As `curl -d` sends it.
    how = {"content-type": "application/x-www-form-urlencoded"}
    assert send("POST", greeter, "/api/chat", content=json.dumps(HELLO), headers=how).status_code == 200


def test_models_are_known_with_and_without_a_tag(greeter: str) -> None:
    [model] = get(greeter, "/api/tags").json()["models"]
    assert model["model"] == f"{MODEL}:latest"
    for name in (MODEL, model["model"]):
        assert post(greeter, "/api/show", {"model": name}).json()["capabilities"][0] == "completion"
        assert post(greeter, "/api/chat", {**HELLO, "model": name}).status_code == 200
    assert get(greeter, "/api/ps").json()["models"][0]["model"] == model["model"]


def test_a_model_that_is_not_there_is_404(greeter: str) -> None:
    for path, more in {"/api/chat": HELLO, "/api/generate": PROMPT, "/api/show": {}, "/api/pull": {}}.items():
        reply = post(greeter, path, {**more, "model": "other"})
        assert (reply.status_code, list(reply.json())) == (404, ["error", "type", "param", "code"])
    assert post(greeter, "/api/pull", {"name": MODEL, "stream": False}).json() == {"status": "success"}


def test_models_are_neither_made_nor_is_a_file_deleted(greeter: str) -> None:
    assert post(greeter, "/api/create", {"model": MODEL}).status_code == 403
    assert send("DELETE", greeter, "/api/delete", json={"model": MODEL}).status_code == 403


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/chat", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/api/chat", {**HELLO, "options": {"temperature": "warm"}}),
        ("/api/chat", {**HELLO, "n": 2}),
        ("/api/chat", {**HELLO, "messages": [{"role": "user", "content": "", "images": ["aGk="]}]}),
        ("/api/generate", {**PROMPT, "images": ["aGk="]}),
        ("/api/generate", {**PROMPT, "template": "{{ .Prompt }}"}),
        ("/api/generate", {**PROMPT, "raw": True, "system": "Be short."}),
        ("/api/generate", {**PROMPT, "context": [10**6]}),
        ("/api/embed", {"model": MODEL, "input": [7]}),
        ("/api/embed", {"model": MODEL, "input": ["a", ""]}),
    ],
)
def test_what_is_wrong_is_said_in_a_line(greeter: str, path: str, body: dict[str, Any]) -> None:
    reply = post(greeter, path, body)
    assert (reply.status_code, [*reply.json()]) == (400, ["error", "type", "param", "code"])


def test_what_goes_wrong_later_is_the_last_line(serve: Serve) -> None:
    url = serve(ScriptedEngine(say("Hello", fault="exception", fault_at=3)))
    assert "error" in lines(url, "/api/chat", HELLO)[-1]


def test_a_second_port(serve: Serve) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve(ScriptedEngine(say("Hello")), ollama_port=port)
    assert get(f"http://127.0.0.1:{port}", "/api/version").json()["version"]
