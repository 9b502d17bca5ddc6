import pytest

from dragoman.engines.scripted import END_ID, ByteTokenizer, ScriptedEngine, say
from tests.http.conftest import Serve
from tests.support.flat import flat
from tests.support.http import HELLO, plain, post, stream

PATH = "/v1/chat/completions"
TEXT = "Hello, wörld!"


def test_whole_answer(greeter: str) -> None:
    reply = post(greeter, PATH, HELLO).json()
    [choice] = reply["choices"]
    assert choice["message"] == plain(TEXT)
    assert (choice["finish_reason"], choice["index"]) == ("stop", 0)
    assert (reply["object"], reply["model"]) == ("chat.completion", "scripted")


def test_usage_counts_prompt_and_answer(greeter: str) -> None:
    usage = post(greeter, PATH, HELLO).json()["usage"]
    assert usage["completion_tokens"] == len(TEXT.encode()) + 1
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_stream_begins_with_the_role_and_ends_with_the_reason(greeter: str) -> None:
    first, *middle, last = stream(greeter, PATH, HELLO)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in middle) == TEXT
    assert (last["choices"][0]["delta"], last["choices"][0]["finish_reason"]) == ({}, "stop")


def test_stream_has_one_event_per_character_and_none_is_empty(greeter: str) -> None:
    _, *middle, _ = stream(greeter, PATH, HELLO)
    assert [chunk["choices"][0]["delta"]["content"] for chunk in middle] == list(TEXT)


def test_all_chunks_share_one_envelope(greeter: str) -> None:
    envelopes = {
        (chunk["id"], chunk["object"], chunk["created"], chunk["model"])
        for chunk in stream(greeter, PATH, HELLO)
    }
    assert len(envelopes) == 1


def test_usage_chunk_comes_last_and_the_others_say_null(greeter: str) -> None:
    *others, last = stream(greeter, PATH, {**HELLO, "stream_options": {"include_usage": True}})
    assert all(chunk["usage"] is None for chunk in others)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == len(TEXT.encode()) + 1


def test_running_usage_is_in_every_chunk(greeter: str) -> None:
    body = {**HELLO, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    counts = [chunk["usage"]["completion_tokens"] for chunk in stream(greeter, PATH, body)]
    assert counts == sorted(counts)
    assert counts[-1] == len(TEXT.encode()) + 1


def test_token_ids_of_the_stream_are_the_engines(greeter: str) -> None:
    seen = stream(greeter, PATH, {**HELLO, "return_token_ids": True})
    ids = flat(chunk["choices"][0]["token_ids"] for chunk in seen)
    assert ids == [*TEXT.encode(), END_ID]
    assert len(seen[0]["prompt_token_ids"]) > 0


def test_token_ids_of_the_whole_answer(greeter: str) -> None:
    reply = post(greeter, PATH, {**HELLO, "return_token_ids": True}).json()
    assert reply["choices"][0]["token_ids"] == [*TEXT.encode(), END_ID]
    rendered = post(greeter, PATH + "/render", HELLO).json()
    assert reply["prompt_token_ids"] == rendered["prompt_token_ids"]


def test_choices(greeter: str) -> None:
    reply = post(greeter, PATH, {**HELLO, "n": 3}).json()
    assert [(c["index"], c["message"]["content"]) for c in reply["choices"]] == [(i, TEXT) for i in range(3)]


def test_streamed_choices_each_have_role_text_and_reason(greeter: str) -> None:
    seen = [chunk["choices"][0] for chunk in stream(greeter, PATH, {**HELLO, "n": 2})]
    for index in range(2):
        own = [choice for choice in seen if choice["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        assert "".join(choice["delta"].get("content", "") for choice in own) == TEXT
        assert [choice["finish_reason"] for choice in own if choice["finish_reason"]] == ["stop"]


def test_stop_string_ends_the_answer_and_is_named(greeter: str) -> None:
    [choice] = post(greeter, PATH, {**HELLO, "stop": ["wör"]}).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Hello, ", "stop")
    assert choice["stop_reason"] == "wör"


def test_length(greeter: str) -> None:
    [choice] = post(greeter, PATH, {**HELLO, "max_completion_tokens": 3}).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Hel", "length")


def test_logprobs_have_an_entry_per_token(greeter: str) -> None:
    reply = post(greeter, PATH, {**HELLO, "logprobs": True, "top_logprobs": 2, "max_tokens": 3}).json()
    content = reply["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == list("Hel")
    assert [entry["bytes"] for entry in content] == [[72], [101], [108]]
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)


def test_streamed_logprobs_are_those_of_the_whole(greeter: str) -> None:
    body = {**HELLO, "logprobs": True, "top_logprobs": 1}
    whole = post(greeter, PATH, body).json()["choices"][0]["logprobs"]["content"]
    parts = [chunk["choices"][0]["logprobs"] for chunk in stream(greeter, PATH, body)]
    assert flat(part["content"] for part in parts if part) == whole


def test_echo_puts_the_response_prefix_in_front(greeter: str) -> None:
    body = {**HELLO, "echo": True, "response_prefix": "Well: "}
    assert post(greeter, PATH, body).json()["choices"][0]["message"]["content"] == "Well: " + TEXT
    assert stream(greeter, PATH, body)[1]["choices"][0]["delta"]["content"] == "Well: "


def test_special_tokens_are_shown_on_demand(serve: Serve) -> None:
    url = serve(ScriptedEngine(say("a<|im_start|>b")))
    reply = post(url, PATH, {**HELLO, "skip_special_tokens": False}).json()
    assert reply["choices"][0]["message"]["content"] == "a<|im_start|>b"


@pytest.mark.parametrize("stream_it", [True, False])
def test_context_overflow_has_the_code_that_clients_key_on(greeter: str, stream_it: bool) -> None:
    body = {"messages": [{"role": "user", "content": "x" * 5000}], "stream": stream_it}
    reply = post(greeter, PATH, body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_encoded(serve: Serve) -> None:
    class WatchedTokenizer(ByteTokenizer):
        longest_encoded = 0

        def encode(self, text: str) -> list[int]:
            WatchedTokenizer.longest_encoded = max(WatchedTokenizer.longest_encoded, len(text))
            return super().encode(text)

    url = serve(ScriptedEngine(say("hi"), tokenizer=WatchedTokenizer()))
    body = {"messages": [{"role": "user", "content": "x" * 1_000_000}]}
    assert post(url, PATH, body).json()["error"]["code"] == "context_length_exceeded"
    assert WatchedTokenizer.longest_encoded < 1000


def test_unknown_model_is_404(greeter: str) -> None:
    reply = post(greeter, PATH, {**HELLO, "model": "gpt-9"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids"])
def test_ids_outside_of_the_vocabulary_are_refused(greeter: str, field: str) -> None:
    reply = post(greeter, PATH, {**HELLO, field: [10**6]})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)
