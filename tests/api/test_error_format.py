"""The words in which each API says what is wrong with which part of a request."""

from collections.abc import Callable
from typing import Any

import pytest

from dragoman.api import completions as completions_reply
from dragoman.api import embeddings
from dragoman.api.chat import reply as chat_reply
from dragoman.api.chat import request as chat_request
from dragoman.api.reply import OpenAIErrorSerializer, format_error
from dragoman.api.responses import request as responses
from dragoman.api.responses.response import ERRORS as RESPONSES
from dragoman.errors import CONVERSATION, LOGPROBS, OUTPUT, PROMPT, TOP_LOGPROBS, BadRequest, ParamKey
from dragoman.limits import Limits

CHAT, COMPLETIONS, EMBEDDINGS = chat_reply.ERRORS, completions_reply.ERRORS, embeddings.ERRORS


@pytest.mark.parametrize(
    ("errors", "part", "field"),
    [
        (CHAT, CONVERSATION, "messages"),
        (CHAT, PROMPT, "messages"),
        (CHAT, OUTPUT, "response_format"),
        (CHAT, TOP_LOGPROBS, "top_logprobs"),
        (CHAT, LOGPROBS, "logprobs"),
        (CHAT, ParamKey("reuse_prefix"), "cache_prompt"),
        (CHAT, ParamKey("logit_bias"), "logit_bias"),
        (COMPLETIONS, PROMPT, "prompt"),
        (COMPLETIONS, TOP_LOGPROBS, "logprobs"),
        (COMPLETIONS, LOGPROBS, "logprobs"),
        (RESPONSES, CONVERSATION, "input"),
        (RESPONSES, OUTPUT, "text.format"),
        (RESPONSES, LOGPROBS, "include"),
        (EMBEDDINGS, PROMPT, "input"),
    ],
)
def test_a_part_has_a_word_in_each_api(errors: OpenAIErrorSerializer, part: ParamKey, field: str) -> None:
    body = errors.body(BadRequest(f"'{part}' is wrong.", param=part))
    assert body["error"] == {
        "message": f"'{field}' is wrong.",
        "type": "invalid_request_error",
        "param": field,
        "code": None,
    }


@pytest.mark.parametrize(
    ("read", "field"), [(chat_request.read, "response_format"), (responses.read, "text.format")]
)
def test_a_field_of_others_is_led_to_the_apis_own(read: Callable[[bytes, Limits], Any], field: str) -> None:
    with pytest.raises(BadRequest, match=f"send it in {field}"):
        read(b'{"response_schema": {}}', Limits())


def test_what_an_api_has_said_itself_stays() -> None:
    error = BadRequest("'prompt' is not supported.", param="prompt")
    assert format_error(error, {PROMPT: "input"}) == ("'prompt' is not supported.", "prompt")


def test_a_long_name_is_shortened_and_still_a_field() -> None:
    assert len(format_error(BadRequest("no", param="x" * 10_000), {})[1] or "") < 300
