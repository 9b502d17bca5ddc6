"""Token ids that the vocabulary does not have, and fields that would run a client's code or data."""

import json
import threading
from typing import Any

import pytest

from tests.attacks.bodies import CHATTING, GENERATING, changed, good
from tests.attacks.frame import AttackedServer, Frame, attacked

SIZE = 259
"""Of the vocabulary: 256 bytes and three special tokens."""
BEYOND = (SIZE, SIZE + 1, 2**16, 2**31 - 1)
PLACES: dict[str, tuple[tuple[str, ...], str, Any]] = {
    "stop_token_ids": (GENERATING, "stop_token_ids", lambda id_: [1, id_]),
    "allowed_token_ids": (GENERATING, "allowed_token_ids", lambda id_: [1, id_]),
    "logit_bias": (GENERATING, "logit_bias", lambda id_: {"1": 1, str(id_): 1}),
    "prompt_token_ids": (("/v1/chat/completions",), "prompt_token_ids", lambda id_: [1, id_]),
    "input_ids": (("/v1/chat/completions",), "input_ids", lambda id_: [1, id_]),
    "prompt": (("/v1/completions",), "prompt", lambda id_: [1, id_]),
    "prompts": (("/v1/completions",), "prompt", lambda id_: [[1], [1, id_]]),
    "input": (("/v1/embeddings",), "input", lambda id_: [1, id_]),
    "tokens": (("/detokenize",), "tokens", lambda id_: [1, id_]),
}


@pytest.mark.parametrize("name", PLACES)
def test_an_id_that_there_is_not_is_refused(frame: Frame, name: str) -> None:
    routes, param, value = PLACES[name]
    for route in routes:
        for id_ in BEYOND:
            error = frame.refused(route, changed(route, param, value(id_)), status=(400,))
            assert (error["param"] or "").startswith(param), error
            assert error["code"] == "invalid_token_id"


@pytest.mark.parametrize("words", [["<|im_end|>"], ["\x00"], [" "], ["\ud83d\ude00", "é"], [""]])
def test_bad_words_are_text_whatever_they_say(frame: Frame, words: list[str]) -> None:
    for route in GENERATING:
        assert frame.sent(route, changed(route, "bad_words", words)).status == 200


def test_a_stream_beside_the_attacks_is_the_same_to_the_byte() -> None:
    with attacked(interval=0.001) as server:
        alone, beside = streamed(server), []
        stream = threading.Thread(target=lambda: beside.append(streamed(server)))
        stream.start()
        frame = Frame(server)
        while stream.is_alive():
            for routes, param, value in PLACES.values():
                frame.refused(routes[0], changed(routes[0], param, value(SIZE)), status=(400,))
        assert beside == [alone]


def streamed(server: AttackedServer) -> list[Any]:
    """The choices of all chunks of one stream."""
    body = {"messages": [{"role": "user", "content": "abc " * 100}], "stream": True, "return_token_ids": True}
    with server.client.stream("POST", "/v1/chat/completions", json=body) as reply:
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: {")]
    return [json.loads(line)["choices"] for line in lines]


CODE: dict[str, Any] = {
    "chat_parser": {"rules": []},
    "custom_logit_processor": "gASVAAAA",
    "logits_processors": ["os.system"],
    "prompt_embeds": "AAAA",
    "input_embeds": [[0.0]],
    "chat_template": "{{ 1 }}",
    "tool_parser": "import os",
    "api_base": "http://127.0.0.1:1/",
    "base_url": "http://127.0.0.1:1/",
    "user_config": {"api_base": "http://127.0.0.1:1/"},
    "lora_path": "/etc/passwd",
    "vllm_xargs": {"a": 1},
    "kv_transfer_params": {"remote_host": "127.0.0.1"},
    "trust_remote_code": True,
}


@pytest.mark.parametrize("field", CODE)
def test_no_field_brings_code_or_chooses_where_it_runs(frame: Frame, field: str) -> None:
    for route in GENERATING:
        error = frame.refused(route, {**good(route), field: CODE[field]}, status=(400,))
        # What is asked for by a path is looked for among the names of adapters.
        assert error["param"] == ("lora" if field == "lora_path" else field)


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "messages", "bos_token", "__class__", "a b"])
def test_no_variable_of_a_template_is_one_of_its_own(frame: Frame, name: str) -> None:
    for route in CHATTING:
        for field in ("chat_template_kwargs", "template_vars"):
            frame.refused(route, changed(route, field, {name: True}), status=(400,))


@pytest.mark.parametrize("path", ["/v1/derender", "/derender", "/v1/completions/derender"])
def test_nothing_decodes_outputs_that_a_client_made(server: AttackedServer, path: str) -> None:
    assert server.client.post(path, json={}).status_code in (404, 405)
