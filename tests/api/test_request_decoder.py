import pytest

from dragoman.api import completions as completions_request
from dragoman.api.chat import request as chat_request
from dragoman.api.chat.request import ChatRequest
from dragoman.errors import BadRequest
from dragoman.limits import Limits

HELLO = b'"messages":[{"role":"user","content":"hi"}]'


def read(body: bytes) -> ChatRequest:
    return chat_request.read(body, Limits())


def refused(body: bytes) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        read(body)
    return caught.value


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{%s,"n":1.5}', "n"),
        (b'{%s,"n":true}', "n"),
        (b'{%s,"n":0}', "n"),
        (b'{%s,"n":"one"}', "n"),
        (b'{%s,"temperature":-1}', "temperature"),
        (b'{%s,"temperature":1e308}', "temperature"),
        (b'{%s,"top_p":1.1}', "top_p"),
        (b'{%s,"min_p":-0.1}', "min_p"),
        (b'{%s,"typical_p":2}', "typical_p"),
        (b'{%s,"repetition_penalty":0}', "repetition_penalty"),
        (b'{%s,"presence_penalty":2.1}', "presence_penalty"),
        (b'{%s,"frequency_penalty":-2.1}', "frequency_penalty"),
        (b'{%s,"max_tokens":0}', "max_tokens"),
        (b'{%s,"max_completion_tokens":0}', "max_completion_tokens"),
        (b'{%s,"max_completion_tokens":-2}', "max_completion_tokens"),
        (b'{%s,"logprobs":true,"top_logprobs":-1}', "top_logprobs"),
        (b'{%s,"top_logprobs":2}', "top_logprobs"),
        (b'{%s,"stop":""}', "stop"),
        (b'{%s,"stop":["a",1]}', "stop[1]"),
        (b'{%s,"logit_bias":{"x":1}}', "logit_bias"),
        (b'{%s,"logit_bias":{"1_0":1}}', "logit_bias"),
        (b'{%s,"logit_bias":{"1":101}}', "logit_bias[...]"),
        (b'{%s,"stop_token_ids":[-1]}', "stop_token_ids[0]"),
        (b'{%s,"allowed_token_ids":[]}', "allowed_token_ids"),
        (b'{%s,"min_tokens":5,"max_tokens":4}', "min_tokens"),
        (b'{%s,"stream":true,"stream_options":{"x":1}}', "stream_options.x"),
        (b'{%s,"metadata":{"a":1}}', "metadata[...]"),
        (b'{%s,"metadata":{"' + b"a" * 65 + b'":""}}', "metadata"),
        (b'{%s,"response_format":{"type":"json_schema"}}', "response_format.json_schema.schema"),
        (b'{%s,"response_format":{"type":"xml"}}', "response_format.type"),
        (b'{%s,"tools":[{"type":"function","function":{"name":""}}]}', "tools[0].function.name"),
        (b'{%s,"tools":[{"type":"retrieval","function":{"name":"f"}}]}', "tools[0].type"),
        (b'{%s,"tool_choice":"required"}', "tool_choice"),
        (b'{%s,"modalities":["audio"]}', "modalities[0]"),
        (b'{%s,"add_generation_prompt":true,"continue_final_message":true}', "continue_final_message"),
    ],
)
def test_bad_value_names_its_field(body: bytes, param: str) -> None:
    request = body % HELLO

    def ask() -> None:
        chat_request.spec(read(request))

    with pytest.raises(BadRequest) as caught:
        ask()
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "empty_body"),
        (b"{", "invalid_json"),
        (b'{"prediction":%s' % (b"[" * 100_000), "invalid_json"),
        (b'{"messages":NaN}', "invalid_json"),
        (b'{%s,"user":"\xff"}' % HELLO, "invalid_json"),
        (b'{%s,"user":"\\ud800"}' % HELLO, "invalid_json"),
        (b'{%s,"n":%s}' % (HELLO, b"1" * 5000), "invalid_value"),
        (b"[]", "invalid_value"),
        (b"{}", "missing_field"),
        (b'{"messages":[]}', "missing_field"),
        (b'{"messages":[{"content":"hi"}]}', "missing_field"),
        (b'{"messages":[{"role":"robot","content":"hi"}]}', "invalid_value"),
    ],
)
def test_broken_body_is_a_clear_400(body: bytes, code: str) -> None:
    assert refused(body).code == code


def test_unknown_field_gets_the_nearest_name() -> None:
    error = refused(b'{%s,"temprature":1}' % HELLO)
    assert (error.param, error.code) == ("temprature", "unknown_field")
    assert "Did you mean 'temperature'?" in error.message


def test_field_of_other_servers_says_why_not() -> None:
    error = refused(b'{%s,"web_search_options":{}}' % HELLO)
    assert (error.param, error.code) == ("web_search_options", "unsupported_field")


def test_null_means_unset() -> None:
    names = [name for name in ChatRequest.__struct_fields__ if name != "messages"]
    nulls = ",".join(f'"{name}":null' for name in names).encode()
    assert read(b"{%s,%s}" % (HELLO, nulls)) == read(b"{%s}" % HELLO)


@pytest.mark.parametrize("kind", ["file", "input_file", "video_url", "images"])
def test_parts_that_no_model_takes_say_so(kind: str) -> None:
    error = refused(b'{"messages":[{"role":"user","content":[{"type":"%s"}]}]}' % kind.encode())
    assert (error.param, error.code) == ("messages[0].content[0]", "unsupported_content")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"prompt":{}}', "prompt"),
        (b'{"prompt":[]}', "prompt"),
        (b'{"prompt":[[]]}', "prompt[0]"),
        (b'{"prompt":[1,"a"]}', "prompt[0]"),
        (b'{"prompt":[1.5]}', "prompt[0]"),
        (b'{"prompt":[true]}', "prompt"),
        (b'{"prompt":"x","best_of":1,"n":2}', "best_of"),
        (b'{"prompt":"x","best_of":2,"stream":true}', "best_of"),
        (b'{"prompt":"x","stream":true,"echo":true,"logprobs":1}', "echo"),
        (b'{"prompt":[1],"suffix":"x"}', "suffix"),
        (b'{"prompt":[%s"a"]}' % (b'"a",' * 256), "prompt"),
        (b'{"promt":"x"}', "promt"),
    ],
)
def test_bad_completion_names_its_field(body: bytes, param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        completions_request.spec(completions_request.read(body, Limits()))
    assert caught.value.param == param
