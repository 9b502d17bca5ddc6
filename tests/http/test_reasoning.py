"""Reasoning over a socket: set apart, left in, left out, begun by the prompt."""

from typing import Any

import pytest

from dragoman.engines.protocol import ModelCard
from dragoman.engines.scripted import CHATML, END_ID, ScriptedEngine, say
from tests.http.conftest import Serve
from tests.support.flat import flat
from tests.support.http import HELLO, plain, post, stream
from tests.support.messages import message_of

PATH = "/v1/chat/completions"
TEXT = "<think>\nHm, hello.\n</think>\n\nHello!"
OPENING = CHATML.replace("assistant\n", "assistant\n<think>\n")


def opened() -> ModelCard:
    """A model whose template has opened reasoning when the answer begins."""
    return ModelCard(name="thinker", max_model_len=4096, templates={"default": OPENING})


@pytest.mark.parametrize("burst", [1, 1000])
def test_reasoning_has_two_names_and_is_no_content(serve: Serve, burst: int) -> None:
    url = serve(ScriptedEngine(say(TEXT, burst=burst)), dialect="hermes")
    message = post(url, PATH, HELLO).json()["choices"][0]["message"]
    assert message["reasoning_content"] == message["reasoning"] == "Hm, hello."
    assert message["content"] == "Hello!"
    streamed = message_of(stream(url, PATH, HELLO))
    assert (streamed["reasoning"], streamed["content"]) == ("Hm, hello.", "Hello!")
    assert streamed["finish_reason"] == "stop"


@pytest.mark.parametrize("burst", [1, 1000])
def test_log_probabilities_of_the_content_alone(serve: Serve, burst: int) -> None:
    text = f'{TEXT}ä<tool_call>{{"name": "f", "arguments": {{}}}}</tool_call>'
    url = serve(ScriptedEngine(say(text, burst=burst)), dialect="hermes")
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {**HELLO, "tools": tools, "logprobs": True, "logprobs_content_only": True}
    whole = post(url, PATH, body).json()["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in whole for byte in entry["bytes"]).decode() == "Hello!ä"
    chunks = [chunk["choices"][0]["logprobs"] for chunk in stream(url, PATH, body)]
    assert [entry for chunk in chunks if chunk for entry in chunk["content"]] == whole


def test_log_probabilities_of_the_content_must_be_asked_for(serve: Serve) -> None:
    reply = post(serve(ScriptedEngine(say(TEXT))), PATH, {**HELLO, "logprobs_content_only": True})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "logprobs_content_only")


def test_reasoning_that_the_prompt_opened_with_a_few_words(serve: Serve) -> None:
    template = OPENING.replace("<think>\n", "<think>\nOkay,")
    card = ModelCard(name="thinker", max_model_len=4096, templates={"default": template})
    url = serve(ScriptedEngine(say(" hm.\n</think>\n\nHello!"), card=card), dialect="hermes")
    message = post(url, PATH, HELLO).json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == (" hm.", "Hello!")


def test_reasoning_that_the_prompt_opened(serve: Serve) -> None:
    url = serve(ScriptedEngine(say("Hm.\n</think>\n\nHello!"), card=opened()), dialect="hermes")
    message = post(url, PATH, HELLO).json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("Hm.", "Hello!")


def test_what_a_user_writes_opens_nothing(serve: Serve) -> None:
    url = serve(ScriptedEngine(say("Hello!")), dialect="hermes")
    body = {"messages": [{"role": "user", "content": "What is <think>?"}]}
    message = post(url, PATH, body).json()["choices"][0]["message"]
    assert message == plain("Hello!")


def test_reasoning_that_never_ends_stays_reasoning(serve: Serve) -> None:
    url = serve(ScriptedEngine(say("Hm, hello."), card=opened()), dialect="hermes")
    [choice] = post(url, PATH, {**HELLO, "max_tokens": 4}).json()["choices"]
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("Hm, ", "")
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("extra", [{"separate_reasoning": False}, {"reasoning_format": "none"}])
def test_reasoning_can_be_left_in_the_text(serve: Serve, extra: dict[str, Any]) -> None:
    url = serve(ScriptedEngine(say(TEXT)), dialect="hermes")
    message = post(url, PATH, {**HELLO, **extra}).json()["choices"][0]["message"]
    assert message == plain(TEXT)


def test_reasoning_can_be_left_out(serve: Serve) -> None:
    url = serve(ScriptedEngine(say(TEXT)), dialect="hermes")
    body = {**HELLO, "include_reasoning": False, "return_token_ids": True}
    message = post(url, PATH, body).json()["choices"][0]["message"]
    assert message == plain("Hello!")
    chunks = stream(url, PATH, body)
    assert message_of(chunks)["reasoning"] == ""
    assert flat(chunk["choices"][0]["token_ids"] for chunk in chunks) == [*TEXT.encode(), END_ID]


def test_usage_counts_the_tokens_of_reasoning(serve: Serve) -> None:
    url = serve(ScriptedEngine(say(TEXT)), dialect="hermes")
    usage = post(url, PATH, HELLO).json()["usage"]
    counted = usage["completion_tokens_details"]["reasoning_tokens"]
    assert len("Hm, hello.") <= counted <= TEXT.index("Hello!")
    options = {"stream_options": {"include_usage": True}}
    assert stream(url, PATH, {**HELLO, **options})[-1]["usage"] == usage


def test_completions_are_text_whatever_the_dialect(serve: Serve) -> None:
    url = serve(ScriptedEngine(say(TEXT)), dialect="hermes")
    reply = post(url, "/v1/completions", {"prompt": "x", "max_tokens": 100}).json()
    assert reply["choices"][0]["text"] == TEXT


def test_earlier_reasoning_reaches_a_template_that_shows_it(serve: Serve) -> None:
    template = "{% for m in messages %}{{ m.reasoning_content or '' }}|{{ m.content }}{% endfor %}"
    card = ModelCard(name="m", max_model_len=4096, templates={"default": template})
    url = serve(ScriptedEngine(say("x"), card=card), dialect="hermes")
    fields = {"role": "assistant", "reasoning": "hm", "content": "yes"}
    rendered = post(url, PATH + "/render", {"messages": [*HELLO["messages"], fields]}).json()
    assert rendered["prompt"].endswith("hm|yes")
