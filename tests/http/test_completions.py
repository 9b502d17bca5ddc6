import pytest

from dragoman.engines.scripted import END_ID, ScriptedEngine, say
from dragoman.limits import Limits
from tests.http.conftest import Serve
from tests.support.flat import flat
from tests.support.http import post, stream

PATH = "/v1/completions"
TEXT = "Hello, wörld!"
ASK = {"prompt": "Say: ", "max_tokens": 100}


def test_whole_answer(greeter: str) -> None:
    reply = post(greeter, PATH, ASK).json()
    [choice] = reply["choices"]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]) == (TEXT, "stop", None)
    assert reply["object"] == "text_completion"


def test_default_length_is_openais(greeter: str) -> None:
    reply = post(greeter, PATH, {"prompt": "Say: "}).json()
    assert reply["usage"]["completion_tokens"] == min(16, len(TEXT.encode()) + 1)


def test_stream_is_the_whole_answer_in_pieces(greeter: str) -> None:
    seen = stream(greeter, PATH, ASK)
    assert "".join(chunk["choices"][0]["text"] for chunk in seen) == TEXT
    assert seen[-1]["choices"][0]["finish_reason"] == "stop"


def test_several_prompts_times_n_are_numbered_by_prompt(greeter: str) -> None:
    reply = post(greeter, PATH, {**ASK, "prompt": ["a", "b"], "n": 2, "echo": True}).json()
    assert [(c["index"], c["text"][0]) for c in reply["choices"]] == [(0, "a"), (1, "a"), (2, "b"), (3, "b")]


def test_streamed_prompts_are_numbered_alike(greeter: str) -> None:
    texts = ["", "", "", ""]
    for chunk in stream(greeter, PATH, {**ASK, "prompt": ["a", "b"], "n": 2, "echo": True}):
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == ["a" + TEXT, "a" + TEXT, "b" + TEXT, "b" + TEXT]


def test_prompts_as_ids(greeter: str) -> None:
    reply = post(greeter, PATH, {**ASK, "prompt": [[1, 2, 3], [4]], "return_token_ids": True}).json()
    assert [choice["prompt_token_ids"] for choice in reply["choices"]] == [[1, 2, 3], [4]]
    assert reply["choices"][0]["token_ids"] == [*TEXT.encode(), END_ID]
    assert reply["usage"]["prompt_tokens"] == 4


def test_streamed_ids_come_one_token_an_event(greeter: str) -> None:
    seen = [c["choices"][0] for c in stream(greeter, PATH, {**ASK, "prompt": [1], "return_token_ids": True})]
    assert seen[0]["prompt_token_ids"] == [1]
    assert [choice["text"] for choice in seen[1:-1]] == list(TEXT)
    assert flat(choice["token_ids"] for choice in seen) == [*TEXT.encode(), END_ID]


def test_no_tokens_at_all_are_an_answer(greeter: str) -> None:
    reply = post(greeter, PATH, {"prompt": "ab", "max_tokens": 0, "echo": True, "logprobs": 1}).json()
    [choice] = reply["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
    assert choice["logprobs"]["tokens"] == ["a", "b"]
    assert reply["usage"]["completion_tokens"] == 0


def test_no_tokens_at_all_are_streamed(greeter: str) -> None:
    body = {"prompt": "ab", "max_tokens": 0, "echo": True, "stream_options": {"include_usage": True}}
    *chunks, last = stream(greeter, PATH, body)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "ab"
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert last["usage"]["completion_tokens"] == 0


def test_a_length_of_minus_one_is_no_bound(greeter: str) -> None:
    assert post(greeter, PATH, {"prompt": "a", "max_tokens": -1}).json()["choices"][0]["text"] == TEXT


def test_echo_with_logprobs_covers_the_prompt(greeter: str) -> None:
    reply = post(greeter, PATH, {"prompt": "ab", "max_tokens": 2, "echo": True, "logprobs": 1}).json()
    logprobs = reply["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "H", "e"]
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert logprobs["text_offset"] == [0, 1, 2, 3]


def test_text_offsets_are_places_in_the_text(greeter: str) -> None:
    body = {"prompt": "<|im_start|>ab", "max_tokens": 1, "echo": True, "logprobs": 0}
    hidden = post(greeter, PATH, body).json()["choices"][0]
    assert (hidden["text"], hidden["logprobs"]["text_offset"]) == ("abH", [0, 0, 1, 2])
    as_ids = post(greeter, PATH, {**body, "return_tokens_as_token_ids": True}).json()["choices"][0]
    assert as_ids["logprobs"]["tokens"][1] == "token_id:97"
    assert as_ids["logprobs"]["text_offset"] == [0, 0, 1, 2]


def test_streamed_logprob_offsets_go_on(greeter: str) -> None:
    seen = stream(greeter, PATH, {"prompt": "ab", "max_tokens": 3, "logprobs": 0})
    offsets = [chunk["choices"][0]["logprobs"] for chunk in seen]
    assert flat(part["text_offset"] for part in offsets if part) == [0, 1, 2]


def test_best_of_answers_with_fewer_than_it_computes(serve: Serve) -> None:
    engine = ScriptedEngine(say("hi"))
    reply = post(serve(engine), PATH, {**ASK, "best_of": 3, "n": 2}).json()
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]
    assert engine.jobs[0].n == 3


def test_suffix_is_refused_where_the_model_cannot(greeter: str) -> None:
    reply = post(greeter, PATH, {**ASK, "suffix": "end"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "suffix")


def test_prompt_logprobs_are_one_per_prompt_id(greeter: str) -> None:
    reply = post(greeter, PATH, {**ASK, "prompt": "abc", "prompt_logprobs": 1}).json()
    entries = reply["choices"][0]["prompt_logprobs"]
    assert entries[0] is None
    assert [list(entry) for entry in entries[1:]] == [["98"], ["99"]]


@pytest.mark.parametrize("field", ["echo", "return_token_ids"])
def test_prompts_that_many_answers_repeat_have_a_limit(serve: Serve, field: str) -> None:
    url = serve(ScriptedEngine(say("hi")), limits=Limits(told_ids=8))
    body = {"prompt": [97, 98, 99], "max_tokens": 1, field: True}
    assert post(url, PATH, {**body, "n": 2}).status_code == 200
    refused = post(url, PATH, {**body, "n": 3})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
