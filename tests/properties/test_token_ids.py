"""Law 4 at the socket: the ids of a reply, put together, are the engine's, however it is asked for."""

import asyncio
from typing import Any

import httpx
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.engines.scripted import END_ID, Script, ScriptedEngine
from dragoman.http.app import App
from dragoman.settings import Settings
from tests.support.http import chunks
from tests.support.responses import payloads

CALL = '{"name": "f", "arguments": {"a": "b"}}'
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
PIECES = (*MARKERS, "\n", " ", "hm", "é", "{", "}", '"', CALL, CALL[:12], "<", "STOP")

said = st.lists(st.sampled_from(PIECES), min_size=1, max_size=12).map(lambda parts: "".join(parts).encode())
scripts = st.builds(
    lambda item, ends, burst: Script([*item, END_ID] if ends else list(item), burst),
    said,
    st.booleans(),
    st.integers(1, 60),
)
shared = {
    "n": st.integers(1, 3),
    "stop": st.sampled_from([None, ["STOP"], ["m", "}"]]),
    "max_tokens": st.sampled_from([None, 7]),
    "skip_special_tokens": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
}
chat_bodies = st.fixed_dictionaries(
    {
        **shared,
        "logprobs": st.booleans(),
        "tools": st.sampled_from([None, TOOLS]),
        "parallel_tool_calls": st.sampled_from([None, False]),
        "include_reasoning": st.booleans(),
        "response_prefix": st.sampled_from([None, "So: ", "<think>"]),
        "echo": st.booleans(),
    }
).map(lambda body: body | {"messages": [{"role": "user", "content": "hi"}]})
# What is echoed has log probabilities too, which cannot be streamed.
echo_or_logprobs = st.sampled_from([{}, {"echo": True}, {"logprobs": 0}])
completion_bodies = st.builds(
    lambda body, more: {"max_tokens": 1000, **body, **more, "prompt": [[104, 105], [END_ID, 33]]},
    st.fixed_dictionaries({**shared, "max_tokens": st.sampled_from([7, 1000])}),
    echo_or_logprobs,
)
stream_options = st.fixed_dictionaries(
    {"include_usage": st.booleans(), "continuous_usage_stats": st.booleans()}
)


async def ask(engine: ScriptedEngine, path: str, bodies: list[dict[str, Any]]) -> list[httpx.Response]:
    app = App(engine, Settings(dialect="hermes", store="none"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        return [await client.post(path, json=body) for body in bodies]


def both_ways(
    script: Script, path: str, body: dict[str, Any], options: dict[str, bool]
) -> tuple[ScriptedEngine, dict[str, Any], list[dict[str, Any]]]:
    """The same request, whole and streamed."""
    body = body | {"return_token_ids": True, "return_tokens_as_token_ids": True}
    streamed = body | {"stream": True, "stream_options": options}
    engine = ScriptedEngine(script)
    whole, stream = asyncio.run(ask(engine, path, [body, streamed]))
    assert whole.status_code == 200, whole.text
    return engine, whole.json(), chunks(stream)


def choices_of(stream: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [choice for chunk in stream for choice in chunk["choices"]]


def streamed_ids(stream: list[dict[str, Any]], choices: int) -> list[list[int]]:
    ids: list[list[int]] = [[] for _ in range(choices)]
    for choice in choices_of(stream):
        ids[choice["index"]] += choice["token_ids"]
    return ids


def check_ids(
    script: Script, whole: dict[str, Any], stream: list[dict[str, Any]], body: dict[str, Any]
) -> None:
    items = [choice["token_ids"] for choice in whole["choices"]]
    assert streamed_ids(stream, len(items)) == items
    most = list(script.ids)[: body["max_tokens"]]
    for ids, choice in zip(items, whole["choices"], strict=True):
        cut_short = choice["stop_reason"] is not None or body.get("parallel_tool_calls") is False
        assert ids == (most[: len(ids)] if cut_short else most)
    assert whole["usage"]["completion_tokens"] == sum(map(len, items))


def named(ids: list[int]) -> list[str]:
    return [f"token_id:{id_}" for id_ in ids]


@settings(max_examples=100)
@given(scripts, chat_bodies, stream_options)
def test_of_a_chat(script: Script, body: dict[str, Any], options: dict[str, bool]) -> None:
    engine, whole, stream = both_ways(script, "/v1/chat/completions", body, options)
    check_ids(script, whole, stream, body)
    items = [chunk["prompt_token_ids"] for chunk in stream if "prompt_token_ids" in chunk]
    assert items == [whole["prompt_token_ids"]] == [list(engine.jobs[0].prompt)]
    for choice in whole["choices"] + choices_of(stream):
        entries = choice["logprobs"]["content"] if choice["logprobs"] else []
        expected = named(choice["token_ids"]) if body["logprobs"] else []
        assert [entry["token"] for entry in entries] == expected


@settings(max_examples=100)
@given(scripts, completion_bodies, stream_options)
def test_of_completions(script: Script, body: dict[str, Any], options: dict[str, bool]) -> None:
    engine, whole, stream = both_ways(script, "/v1/completions", body, options)
    check_ids(script, whole, stream, body)
    prompts = [list(job.prompt) for job in engine.jobs[:2] for _ in range(body["n"])]
    assert [choice["prompt_token_ids"] for choice in whole["choices"]] == prompts
    rows = [choice for choice in choices_of(stream) if "prompt_token_ids" in choice]
    assert [choice["prompt_token_ids"] for choice in sorted(rows, key=lambda one: one["index"])] == prompts
    for choice in whole["choices"] + choices_of(stream):
        tokens = choice["logprobs"]["tokens"] if choice["logprobs"] else []
        assert tokens == (named(choice["token_ids"]) if "logprobs" in body else [])


@settings(max_examples=100)
@given(scripts, st.sampled_from([[], [{"type": "function", "name": "f", "parameters": {"type": "object"}}]]))
def test_of_a_response(script: Script, tools: list[dict[str, Any]]) -> None:
    body = {"input": "hi", "tools": tools, "stream": True, "return_token_ids": True}
    [stream] = asyncio.run(ask(ScriptedEngine(script), "/v1/responses", [body]))
    items = [id_ for event in payloads(stream.content) for id_ in event.get("token_ids", ())]
    assert items == list(script.ids)
