"""Engines with `generate_request`, served: what clients see of them over a socket."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from dragoman.engines.asyncllm import AsyncLLMEngine
from dragoman.engines.scripted import END_ID
from dragoman.engines.steps import seed_of
from tests.http.conftest import Serve
from tests.support.fake_asyncllm import FakeAsyncLLM, Manner
from tests.support.fake_sglang import FakeSglang
from tests.support.http import HELLO, chunks, post, refusal, send, stream
from tests.support.wait import becomes

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def choice(reply: httpx.Response) -> dict[str, Any]:
    assert reply.status_code == 200, reply.text
    fields: dict[str, Any] = reply.json()["choices"][0]
    return fields


def broken(url: str, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream that fails: the error is the last of them, and no end mark follows it."""
    text = post(url, CHAT, {**HELLO, **fields, "stream": True}).text
    return [json.loads(event.removeprefix("data: ")) for event in text.split("\n\n") if event]


@pytest.mark.parametrize(
    ("finish", "told"),
    [
        ({"type": "stop", "matched": END_ID}, "stop"),
        ({"type": "length", "length": 6}, "length"),
        ("stop", "stop"),
    ],
)
def test_finish_reasons_are_those_of_the_engine(serve: Serve, finish: Any, told: str) -> None:
    url = serve(AsyncLLMEngine(FakeAsyncLLM(Manner(finish=finish))))
    assert choice(post(url, CHAT, HELLO))["finish_reason"] == told
    assert stream(url, CHAT, HELLO)[-1]["choices"][0]["finish_reason"] == told


@pytest.mark.parametrize("status", [400, 429, 503])
def test_an_abort_of_the_engine_has_its_status(serve: Serve, status: int) -> None:
    finish = {"type": "abort", "message": "The input is too long.", "status_code": status}
    url = serve(AsyncLLMEngine(FakeAsyncLLM(Manner(finish=finish))))
    assert post(url, CHAT, HELLO).status_code == status
    assert "error" in broken(url)[-1]


def test_a_request_that_the_engine_refuses_is_no_fault_of_the_server(serve: Serve) -> None:
    url = serve(AsyncLLMEngine(FakeAsyncLLM(Manner(fault=ValueError("max_new_tokens ...")))))
    reply = post(url, CHAT, HELLO)
    assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")


def test_an_error_after_the_first_token_ends_the_stream_with_an_event(serve: Serve) -> None:
    url = serve(AsyncLLMEngine(FakeAsyncLLM(Manner(fault=RuntimeError("cuda"), fault_at=2))))
    *rows, last = broken(url)
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in rows) == "He"
    assert last["error"]["code"] == "engine_failed"
    assert post(url, CHAT, HELLO).status_code == 500


def test_a_logprob_that_is_no_number_is_an_event_and_no_hole(serve: Serve) -> None:
    url = serve(AsyncLLMEngine(FakeAsyncLLM(Manner(logprob=float("nan")))))
    assert broken(url, logprobs=True)[-1]["error"]["code"] == "engine_failed"
    assert post(url, CHAT, {**HELLO, "logprobs": True}).status_code == 500


def test_a_logprob_of_minus_infinity_can_be_said(serve: Serve) -> None:
    url = serve(AsyncLLMEngine(FakeAsyncLLM(Manner(logprob=float("-inf")))))
    result = choice(post(url, CHAT, {**HELLO, "logprobs": True}))["logprobs"]["content"]
    assert {entry["logprob"] for entry in result} == {-9999.0}


@pytest.mark.parametrize("whole", [True, False])
def test_logprobs_stand_beside_their_tokens(serve: Serve, whole: bool) -> None:
    manner = Manner(cuts=(2, 3), whole_ids=whole, whole_logprobs=whole)
    url = serve(AsyncLLMEngine(FakeAsyncLLM(manner)))
    body = {**HELLO, "logprobs": True, "top_logprobs": 2}
    result = choice(post(url, CHAT, body))["logprobs"]["content"]
    assert "".join(entry["token"] for entry in result[:5]) == "Hello"
    assert all(len(entry["top_logprobs"]) == 2 for entry in result)
    streamed = [
        e for c in stream(url, CHAT, body) for e in (c["choices"][0].get("logprobs") or {}).get("content", [])
    ]
    assert streamed == result


def test_the_prompt_has_logprobs_too(serve: Serve) -> None:
    url = serve(AsyncLLMEngine(FakeAsyncLLM()))
    result = choice(post(url, COMPLETIONS, {"prompt": "abc", "echo": True, "logprobs": 1}))["logprobs"]
    assert result["tokens"][:4] == ["a", "b", "c", "H"]
    assert result["token_logprobs"][:4] == [None, -1.5, -1.5, -0.5]


def test_choices_are_requests_of_their_own(serve: Serve) -> None:
    """So that one can end at a stop string while the others go on."""
    texts = iter([b"abXcd", b"efgh", b"ijXkl"])
    llm = FakeAsyncLLM(lambda _: Manner(ids=(*next(texts), END_ID)))
    reply = post(serve(AsyncLLMEngine(llm)), CHAT, {**HELLO, "n": 3, "stop": "X", "seed": 5})
    assert [one["message"]["content"] for one in reply.json()["choices"]] == ["ab", "efgh", "ij"]
    assert reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 2
    seeds = {request.sampling_params["seed"] for request in llm.requests}
    assert seeds == {5, seed_of(5, 1), seed_of(5, 2)}
    assert becomes(lambda: not llm.live)


def test_200_streams_at_once(serve: Serve) -> None:
    def echo(request: Any) -> Manner:
        return Manner(
            ids=(*request.input_ids, END_ID), cuts=(3, 1, 7), whole_ids=len(request.input_ids) % 2 == 0
        )

    llm = FakeAsyncLLM(echo)
    url = serve(AsyncLLMEngine(llm))

    async def ask(client: httpx.AsyncClient, number: int) -> str:
        body = {"prompt": f"{number} " * (1 + number % 5), "stream": True, "max_tokens": 99}
        return "".join(
            c["choices"][0]["text"] for c in chunks(await client.post(url + COMPLETIONS, json=body))
        )

    async def run() -> list[str]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=60, limits=limits, verify=False) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(200)))

    assert asyncio.run(run()) == [f"{number} " * (1 + number % 5) for number in range(200)]
    assert becomes(lambda: not llm.live)


@pytest.mark.parametrize("closing_aborts", [True, False])
def test_a_storm_of_leavers_leaves_nothing_behind(serve: Serve, closing_aborts: bool) -> None:
    """Some leave streams after a few bytes, others lose patience with a whole answer."""
    llm = FakeAsyncLLM(Manner(ids=[120] * 4000, interval=0.01, closing_aborts=closing_aborts))
    url = serve(AsyncLLMEngine(llm))
    body = {**HELLO, "n": 2, "max_tokens": 4000}

    async def glance(client: httpx.AsyncClient, parts: int) -> None:
        async with client.stream("POST", url + CHAT, json={**body, "stream": True}) as reply:
            seen = reply.aiter_raw()
            for _ in range(parts):
                await anext(seen)

    async def run() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=60, limits=limits, verify=False) as client:
            waiting = [asyncio.create_task(client.post(url + CHAT, json=body)) for _ in range(20)]
            await asyncio.gather(*(glance(client, number % 5) for number in range(40)))
            while len(llm.live) < 2 * len(waiting):
                await asyncio.sleep(0.01)
            for task in waiting:
                task.cancel()
            await asyncio.wait(waiting)

    asyncio.run(run())
    assert becomes(lambda: not llm.live)


def test_a_slow_engine_does_not_hold_up_the_first_bytes(serve: Serve) -> None:
    llm = FakeAsyncLLM(Manner(hang_at=0, closing_aborts=False))
    url = serve(AsyncLLMEngine(llm))
    with httpx.stream("POST", url + CHAT, json={**HELLO, "stream": True}) as reply:
        parts = reply.iter_raw()
        assert b'"role":"assistant"' in next(parts)
        assert becomes(lambda: len(llm.live) == 1)
    assert becomes(lambda: not llm.live)


def test_a_schema_is_handed_to_the_engine(serve: Serve) -> None:
    llm = FakeAsyncLLM()
    url = serve(AsyncLLMEngine(llm))
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    assert post(url, CHAT, {**HELLO, "response_format": form}).status_code == 200
    assert (
        llm.requests[0].sampling_params["json_schema"]
        == '{"type": "object", "properties": {"a": {"type": "integer"}}}'
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"typical_p": 0.5}, "typical_p"),
        ({"cache_salt": "s"}, "cache_salt"),
        ({"grammar": 'start: "a"'}, "grammar"),
    ],
)
def test_what_the_engine_cannot_do_is_refused_by_name(
    serve: Serve, fields: dict[str, Any], param: str
) -> None:
    llm = FakeAsyncLLM()
    url = serve(AsyncLLMEngine(llm))
    for streaming in (False, True):
        reply = post(url, CHAT, {**HELLO, **fields, "stream": streaming})
        assert refusal(reply) == (400, param)
    assert not llm.requests


@pytest.mark.parametrize(
    ("backend", "field", "part"),
    [("xgrammar", "structural_tag", '"tags_with_separator"'), ("llguidance", "ebnf", "start:")],
)
def test_a_call_is_forced_by_the_engine(serve: Serve, backend: str, field: str, part: str) -> None:
    outer = FakeSglang(grammar_backend=backend)
    url = serve(AsyncLLMEngine(outer), dialect="hermes")
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    assert post(url, CHAT, {**HELLO, "tools": tools, "tool_choice": "required"}).status_code == 200
    assert part in outer.tokenizer_manager.requests[0].sampling_params[field]


def test_the_model_has_the_name_of_the_engine(serve: Serve) -> None:
    url = serve(AsyncLLMEngine(FakeAsyncLLM()))
    assert send("GET", url, "/v1/models").json()["data"][0]["id"] == "fake"


def test_an_answer_says_which_weights_computed_it(serve: Serve) -> None:
    url = serve(AsyncLLMEngine(FakeAsyncLLM(Manner(weight_version="v7"))))
    assert post(url, CHAT, HELLO).json()["weight_version"] == "v7"
