"""Ids in, ids out: vLLM's `/inference/v1/generate`, and what its tokenizer is asked."""

from typing import Any

import pytest

from dragoman.engines.scripted import CHATML, END_ID, ScriptedEngine, say
from tests.http.conftest import Serve
from tests.support.http import get_json, post, refusal

PATH = "/inference/v1/generate"
IDS = [*b"Say hi."]


def asked(url: str, **fields: Any) -> dict[str, Any]:
    reply = post(url, PATH, {"token_ids": IDS, **fields})
    assert reply.status_code == 200, reply.text
    body: dict[str, Any] = reply.json()
    return body


def test_ids_are_answered_with_ids(serve: Serve) -> None:
    engine = ScriptedEngine(say("hi"))
    reply = asked(serve(engine), request_id="mine")
    [choice] = reply["choices"]
    assert (reply["request_id"], choice["token_ids"]) == ("mine", [*b"hi", END_ID])
    assert (choice["finish_reason"], choice["logprobs"]) == ("stop", None)
    assert engine.jobs[0].prompt == tuple(IDS)
    assert reply["usage"]["prompt_tokens"] == len(IDS)


def test_each_id_has_its_log_probability(serve: Serve) -> None:
    params = {"logprobs": 1, "stop_token_ids": [END_ID], "temperature": 1.0, "max_tokens": 5}
    [choice] = asked(serve(ScriptedEngine(say("hi"))), sampling_params=params)["choices"]
    items = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert items == [f"token_id:{id_}" for id_ in choice["token_ids"]]


def test_several_answers_are_numbered(serve: Serve) -> None:
    reply = asked(serve(ScriptedEngine(say("hi"))), sampling_params={"n": 2})
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [10**6]}, "token_ids"),
        ({"token_ids": ["a"]}, "token_ids[0]"),
        ({"token_ids": [1] * 5000}, "token_ids"),
        ({"stream": True}, "stream"),
        ({"features": {}}, "features"),
        ({"sampling_params": {"temperature": 9}}, "sampling_params.temperature"),
        ({"sampling_params": {"prompt": "x"}}, "sampling_params.prompt"),
        ({"sampling_params": {"stop_token_ids": [10**6]}}, "sampling_params.stop_token_ids"),
        ({"model": "other"}, "model"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(greeter: str, fields: dict[str, Any], param: str) -> None:
    status, named = refusal(post(greeter, PATH, {"token_ids": IDS, **fields}))
    assert (status in (400, 404), named) == (True, param)


def test_the_tokenizer_is_described(greeter: str) -> None:
    json = get_json(greeter, "/tokenizer_info")
    assert (json["eos_token"], json["bos_token"]) == ("<|im_end|>", None)
    assert (json["chat_template"], json["model_max_length"]) == (CHATML, 4096)
    eos = post(greeter, "/tokenize", {"prompt": json["eos_token"], "add_special_tokens": False}).json()
    assert eos["tokens"] == [END_ID]
