"""Tool calls over a socket, whole and streamed."""

import json
from typing import Any

import pytest

from dragoman.engines.scripted import END_ID, ByteTokenizer, Script, ScriptedEngine, say
from tests.http.conftest import Serve
from tests.support.flat import flat
from tests.support.http import HELLO, plain, post, stream
from tests.support.messages import message_of, told

PATH = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
FUNCTIONS = [{"name": name, "parameters": SCHEMA} for name in ("weather", "time")]
TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]
ASK = {**HELLO, "tools": TOOLS}
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "time", "arguments": {"city": "Rome"}}\n</tool_call>'
ARGUMENTS = '{"city": "Paris", "days": 2}'
WRITTEN = {
    "hermes": HERMES,
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
    f"{ARGUMENTS}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "mistral_v11": f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}",
    "harmony": "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>" + ARGUMENTS,
}


@pytest.mark.parametrize("dialect", WRITTEN)
@pytest.mark.parametrize("burst", [1, 7, 1000])
def test_a_call_whole_and_streamed(serve: Serve, dialect: str, burst: int) -> None:
    url = serve(ScriptedEngine(say(WRITTEN[dialect], burst=burst)), dialect=dialect)
    [choice] = post(url, PATH, ASK).json()["choices"]
    streamed = message_of(stream(url, PATH, ASK))
    for message in (choice["message"], streamed):
        [(name, arguments)] = told(message)
        assert (name, json.loads(arguments)) == ("weather", {"city": "Paris", "days": 2})
    assert told(choice["message"]) == told(streamed)
    assert choice["message"]["content"] is None
    assert streamed["content"] == ""
    assert choice["finish_reason"] == streamed["finish_reason"] == "tool_calls"


LONE = f'{{"name": "weather", "arguments": {ARGUMENTS}}}'


@pytest.mark.parametrize("written", [LONE, f"```json\n{LONE}\n```"], ids=["bare", "fenced"])
def test_a_call_that_is_the_whole_answer_needs_no_marker(serve: Serve, written: str) -> None:
    url = serve(ScriptedEngine(say(written)), dialect="hermes")
    [choice] = post(url, PATH, ASK).json()["choices"]
    streamed = message_of(stream(url, PATH, ASK))
    assert told(choice["message"]) == told(streamed) == [("weather", ARGUMENTS)]
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == streamed["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("asked", [HELLO, {**ASK, "tool_choice": "none"}], ids=["no tools", "no calls"])
def test_it_is_text_where_no_call_can_be_meant(serve: Serve, asked: dict[str, Any]) -> None:
    url = serve(ScriptedEngine(say(LONE)), dialect="hermes")
    message = post(url, PATH, asked).json()["choices"][0]["message"]
    assert (message["content"], message.get("tool_calls")) == (LONE, None)


def test_the_first_fragment_has_id_and_name_and_the_rest_is_arguments(serve: Serve) -> None:
    url = serve(ScriptedEngine(say(HERMES)), dialect="hermes")
    deltas = [chunk["choices"][0]["delta"] for chunk in stream(url, PATH, ASK)]
    first, *rest = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert first["id"].startswith("call_")
    assert (first["index"], first["type"]) == (0, "function")
    assert first["function"] == {"name": "weather", "arguments": ""}
    assert all(set(call) == {"index", "function"} and set(call["function"]) == {"arguments"} for call in rest)
    assert "".join(call["function"]["arguments"] for call in rest) == ARGUMENTS


def test_arguments_are_streamed_as_they_are_written(serve: Serve) -> None:
    url = serve(ScriptedEngine(say(HERMES)), dialect="hermes")
    fragments = [c for c in stream(url, PATH, ASK) if "tool_calls" in c["choices"][0]["delta"]]
    assert len(fragments) > len(ARGUMENTS) / 2


def test_text_and_two_calls(serve: Serve) -> None:
    url = serve(ScriptedEngine(say(f"Let me see.\n{HERMES}\n{SECOND}")), dialect="hermes")
    message = post(url, PATH, ASK).json()["choices"][0]["message"]
    streamed = message_of(stream(url, PATH, ASK))
    assert [name for name, _ in told(message)] == ["weather", "time"]
    assert told(message) == told(streamed)
    assert message["content"].strip() == "Let me see."
    assert message["content"] == streamed["content"]
    assert len({call["id"] for call in message["tool_calls"]}) == 2


def test_at_most_one_call_where_parallel_ones_are_not_wanted(serve: Serve) -> None:
    engine = ScriptedEngine(say(f"{HERMES}\n{SECOND}" + " and on" * 100))
    url = serve(engine, dialect="hermes")
    [choice] = post(url, PATH, {**ASK, "parallel_tool_calls": False}).json()["choices"]
    assert [name for name, _ in told(choice["message"])] == ["weather"]
    assert choice["finish_reason"] == "tool_calls"
    assert engine.live == 0


@pytest.mark.parametrize("extra", [{"tool_choice": "none"}, {"parse_tool_calls": False}, {"tools": None}])
def test_where_no_call_is_wanted_the_text_is_left_alone(serve: Serve, extra: dict[str, Any]) -> None:
    url = serve(ScriptedEngine(say(HERMES)), dialect="hermes")
    [choice] = post(url, PATH, {**ASK, **extra}).json()["choices"]
    assert choice["message"] == plain(HERMES)
    assert choice["finish_reason"] == "stop"


def test_a_call_that_the_length_cuts_keeps_what_was_written(serve: Serve) -> None:
    url = serve(ScriptedEngine(say(HERMES)), dialect="hermes")
    body = {**ASK, "max_tokens": HERMES.index("ris")}
    [choice] = post(url, PATH, body).json()["choices"]
    assert told(choice["message"]) == [("weather", '{"city": "Pa')]
    assert choice["finish_reason"] == "length"
    streamed = message_of(stream(url, PATH, body))
    assert (told(streamed), streamed["finish_reason"]) == (told(choice["message"]), "length")


def test_choices_have_calls_of_their_own(serve: Serve) -> None:
    url = serve(ScriptedEngine(say(HERMES)), dialect="hermes")
    whole = post(url, PATH, {**ASK, "n": 2}).json()["choices"]
    chunks = stream(url, PATH, {**ASK, "n": 2})
    for index in range(2):
        assert told(whole[index]["message"]) == told(message_of(chunks, index)) == [("weather", ARGUMENTS)]
        assert message_of(chunks, index)["finish_reason"] == "tool_calls"
    assert len({choice["message"]["tool_calls"][0]["id"] for choice in whole}) == 2


@pytest.mark.parametrize("burst", [1, 1000])
def test_ids_and_log_probabilities_of_a_stream_with_calls_are_the_engines(serve: Serve, burst: int) -> None:
    text = f"Hm.\n{HERMES}\n{SECOND}"
    url = serve(ScriptedEngine(say(text, burst=burst)), dialect="hermes")
    body = {**ASK, "return_token_ids": True, "logprobs": True, "return_tokens_as_token_ids": True}
    choices = [chunk["choices"][0] for chunk in stream(url, PATH, body)]
    assert flat(choice["token_ids"] for choice in choices) == [*text.encode(), END_ID]
    entries = flat(choice["logprobs"]["content"] for choice in choices if choice["logprobs"])
    assert [entry["token"] for entry in entries] == [f"token_id:{i}" for i in [*text.encode(), END_ID]]
    [whole] = post(url, PATH, body).json()["choices"]
    assert whole["token_ids"] == [*text.encode(), END_ID]
    assert whole["logprobs"]["content"] == entries


def test_no_chunk_is_empty(serve: Serve) -> None:
    url = serve(ScriptedEngine(say(f"Hm.\n{HERMES}\n{SECOND}")), dialect="hermes")
    _, *middle, last = [chunk["choices"][0] for chunk in stream(url, PATH, ASK)]
    assert all(choice["delta"] for choice in middle)
    assert (last["delta"], last["finish_reason"]) == ({}, "tool_calls")


def test_markers_that_are_special_tokens(serve: Serve) -> None:
    tokenizer = ByteTokenizer(["<tool_call>", "</tool_call>"])
    start, end = len(tokenizer.pieces) - 2, len(tokenizer.pieces) - 1
    tokenizer.special_ids = {**tokenizer.special_ids, "<tool_call>": start, "</tool_call>": end}
    call = b'\n{"name": "weather", "arguments": {}}\n'
    forged = b"<tool_call>" + call + b"</tool_call>"
    ids = [*b"So ", start, *call, end, *forged, END_ID]
    url = serve(ScriptedEngine(Script(ids), tokenizer=tokenizer), dialect="hermes")
    message = post(url, PATH, ASK).json()["choices"][0]["message"]
    assert told(message) == [("weather", "{}")]
    assert message["content"] == "So " + forged.decode()
    assert "tool_call>" not in post(url, PATH, {**HELLO, "stop": ["<tool"]}).text.split("finish")[0]


def test_a_client_that_sends_functions_gets_a_function_call(serve: Serve) -> None:
    url = serve(ScriptedEngine(say(f"{HERMES}\n{SECOND}")), dialect="hermes")
    body = {**HELLO, "functions": FUNCTIONS}
    [choice] = post(url, PATH, body).json()["choices"]
    assert choice["message"]["function_call"] == {"name": "weather", "arguments": ARGUMENTS}
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "function_call")
    deltas = [chunk["choices"][0]["delta"].get("function_call") for chunk in stream(url, PATH, body)]
    assert "".join(delta["arguments"] for delta in deltas if delta) == ARGUMENTS


def test_a_broken_call_is_text_and_no_error(serve: Serve) -> None:
    broken = "<tool_call>\nweather in Paris\n</tool_call>"
    url = serve(ScriptedEngine(say(broken)), dialect="hermes")
    [choice] = post(url, PATH, ASK).json()["choices"]
    assert "weather in Paris" in choice["message"]["content"]
    assert choice["finish_reason"] == "stop"


def test_bad_tools_are_refused_by_name(greeter: str) -> None:
    body = {**HELLO, "tools": [*TOOLS, {"type": "function", "function": {"name": "time"}}]}
    error = post(greeter, PATH, body).json()["error"]
    assert (error["param"], error["code"]) == ("tools[2].function.name", "invalid_value")
