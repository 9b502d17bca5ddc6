"""What vLLM's server is asked, and how its streams are read."""

import json
from typing import Any

import pytest
from msgspec.structs import replace

from dragoman.engines.remote import RemoteEngine
from dragoman.engines.remote.upstreams import BadUpstream
from dragoman.engines.scripted import END_ID, ByteTokenizer
from dragoman.errors import BadRequest, EngineFailed
from dragoman.types import Step, TokenLogprob
from tests.engines.remote.support import QUICK, ids_of, job_of, run, steps_of
from tests.support.raw_server import SSE_HEAD, RawServer, Script, raw_server, reply

CALM = replace(QUICK, check_s=600)
MODELS = {"object": "list", "data": [{"id": "big", "owned_by": "vllm", "max_model_len": 512, "parent": None}]}


def chunk(ids: list[int], text: str, finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "text": text, "token_ids": ids, "logprobs": None, "finish_reason": finish, **more}
    return b"data: " + json.dumps({"id": "cmpl-1", "choices": [choice]}).encode() + b"\n\n"


END = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\ndata: [DONE]\n\n'
LOOK: list[Script] = [
    [reply(200, json.dumps(MODELS).encode())],
    [reply(200, json.dumps({"tokens": ByteTokenizer().encode("The quick brown fox")}).encode())],
    [SSE_HEAD, chunk([72], "H", "length"), END],
]
"""The replies to the first look: models, /tokenize, one token."""


def ask(*said: bytes, **sampling: Any) -> tuple[list[Step], dict[str, Any]]:
    """The steps of a job that is answered so, and the body of its request."""
    look = [LOOK[0], [reply(404)], LOOK[2]]
    with raw_server(*look, [SSE_HEAD, *said]) as server:
        steps = run([server.url], lambda engine: steps_of(engine, job_of(**sampling)), CALM)
    return steps, body_of(server)


def body_of(server: RawServer) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(server.heard[-1].partition(b"\r\n\r\n")[2])
    return body


def test_what_is_sent() -> None:
    _, body = ask(
        chunk([END_ID], "", "stop"), END, seed=3, stop_token_ids=frozenset({66}), logit_bias={65: 1.0}
    )
    assert body == {
        "model": "big",
        "prompt": [1, 2, 3],
        "max_tokens": 64,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": {"65": 1.0},
        "seed": 3,
        "min_tokens": 0,
        "ignore_eos": False,
        "stop_token_ids": [66, *sorted(ByteTokenizer().end_ids)],
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_steps_of_several_ids_and_the_end_in_one_chunk() -> None:
    steps, _ = ask(chunk([104, 105], "hi"), chunk([END_ID], "", "stop", stop_reason=END_ID), END)
    assert ids_of(steps) == [104, 105, END_ID]
    assert (steps[-1].ids, steps[-1].finish, steps[-1].stop_id) == ([END_ID], "stop", None)


def test_a_stop_id_is_told_as_such() -> None:
    steps, _ = ask(chunk([66], "", "stop", stop_reason=66), END, stop_token_ids=frozenset({66}))
    assert (steps[-1].ids, steps[-1].stop_id) == ([66], 66)


def test_an_end_that_does_not_end_is_passed_on() -> None:
    steps, _ = ask(chunk([END_ID], ""), chunk([104], "h"), chunk([105], "i", "length"), END, ignore_eos=True)
    assert ids_of(steps) == [END_ID, 104, 105]
    assert steps[-1].finish == "length"


def test_logprobs_by_id() -> None:
    logprobs = {
        "tokens": ["token_id:104"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"token_id:9": -2.0, "token_id:104": -0.5, "token_id:7": -1.0}],
        "text_offset": [0],
    }
    steps, body = ask(chunk([104], "h", "length", logprobs=logprobs), END, logprobs=2)
    assert steps[0].logprobs == [TokenLogprob(104, -0.5, ((104, -0.5), (7, -1.0)))]
    assert (body["logprobs"], body["return_tokens_as_token_ids"]) == (2, True)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ([chunk([104], "h"), chunk([], "i")], "without its token ids"),
        ([chunk([9999], "h")], "not in the vocabulary"),
        ([chunk([104], "h", "content_filter"), END], "unknown finish reason"),
    ],
)
def test_what_cannot_be_is_an_error(said: list[bytes], message: str) -> None:
    with pytest.raises(EngineFailed, match=message):
        ask(*said)


def test_a_refusal_inside_of_a_stream() -> None:
    error = b'data: {"error":{"message":"Too long.","type":"BadRequestError","param":null,"code":400}}\n\n'
    with pytest.raises(BadRequest) as caught:
        ask(error)
    assert (caught.value.message, caught.value.code) == ("Too long.", None)


def test_another_tokenizer_there_is_noticed() -> None:
    with raw_server(*LOOK) as server, pytest.raises(BadUpstream, match="different tokenizer"):
        RemoteEngine.open([server.url], ByteTokenizer(), CALM)
    assert len(server.heard) == 2
