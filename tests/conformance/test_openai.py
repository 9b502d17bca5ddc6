"""The newest `openai` client, told to check every reply against its own types."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types import Completion
from openai.types.chat import ChatCompletionMessageParam

from tests.conformance.conftest import FROM_SCRATCH, MODEL

ASK: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Name three colours."}]


@pytest.fixture(scope="module")
def client(base_url: str) -> Iterator[OpenAI]:
    with OpenAI(
        base_url=base_url, api_key="none", max_retries=0, _strict_response_validation=True
    ) as open_ai:
        yield open_ai


def test_chat(client: OpenAI) -> None:
    reply = client.chat.completions.create(model=MODEL, messages=ASK, max_completion_tokens=8, temperature=0)
    assert reply.choices[0].message.content
    assert reply.usage is not None
    assert 0 < reply.usage.completion_tokens <= 8


def test_chat_stream_is_the_whole_answer(client: OpenAI) -> None:
    whole = client.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=12, temperature=0, extra_body=FROM_SCRATCH
    )
    stream = client.chat.completions.create(
        model=MODEL,
        messages=ASK,
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=FROM_SCRATCH,
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_chat_logprobs(client: OpenAI) -> None:
    reply = client.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=4, temperature=0, logprobs=True, top_logprobs=5
    )
    assert reply.choices[0].logprobs is not None
    entries = reply.choices[0].logprobs.content or []
    assert len(entries) == 4
    for entry in entries:
        assert entry.top_logprobs[0].token == entry.token, "greedy takes the most likely"
        assert [top.logprob for top in entry.top_logprobs] == sorted(
            (top.logprob for top in entry.top_logprobs), reverse=True
        )


def test_chat_choices_share_a_prompt(client: OpenAI) -> None:
    reply = client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=6, n=3, seed=1)
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in reply.choices}) > 1


def test_stop(client: OpenAI) -> None:
    whole = client.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=12, temperature=0, extra_body=FROM_SCRATCH
    )
    text = whole.choices[0].message.content or ""
    reply = client.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=12, temperature=0, stop=[text[4:8]], extra_body=FROM_SCRATCH
    )
    assert reply.choices[0].message.content == text[: text.index(text[4:8])]
    assert reply.choices[0].finish_reason == "stop"


def test_seed_reproduces(client: OpenAI) -> None:
    def answer(seed: int) -> str | None:
        reply = client.chat.completions.create(
            model=MODEL, messages=ASK, max_tokens=16, temperature=1.5, seed=seed, extra_body=FROM_SCRATCH
        )
        return reply.choices[0].message.content

    assert answer(7) == answer(7)
    assert len({answer(seed) for seed in range(4)}) > 1


def test_prefix_is_reused(client: OpenAI) -> None:
    long: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Tell me of the sea. " * 20}]
    for _ in range(2):
        reply = client.chat.completions.create(model=MODEL, messages=long, max_tokens=2)
    assert reply.usage is not None
    assert reply.usage.prompt_tokens_details is not None
    assert (reply.usage.prompt_tokens_details.cached_tokens or 0) > reply.usage.prompt_tokens // 2


def test_completions(client: OpenAI) -> None:
    reply = client.completions.create(model=MODEL, prompt=["One, two,", "A, B,"], max_tokens=4, temperature=0)
    assert [choice.index for choice in reply.choices] == [0, 1]
    assert all(choice.text for choice in reply.choices)


@pytest.fixture(scope="module")
def usual(base_url: str) -> Iterator[OpenAI]:
    """The client as people use it, for the places where its types refuse what OpenAI itself sends."""
    with OpenAI(base_url=base_url, api_key="none", max_retries=0) as open_ai:
        yield open_ai


def test_completions_stream(usual: OpenAI) -> None:
    """The SDK's type has no null finish_reason, which every chunk but the last has; the rest is checked."""
    asked: Any = {"model": MODEL, "prompt": "One, two,", "max_tokens": 6, "temperature": 0}
    whole = usual.completions.create(**asked, extra_body=FROM_SCRATCH)
    stream = usual.completions.create(**asked, extra_body=FROM_SCRATCH, stream=True)
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    for chunk in chunks:
        chunk.choices[0].finish_reason = chunk.choices[0].finish_reason or "stop"
        Completion.model_validate(chunk.to_dict())


def test_completions_echo_and_logprobs(usual: OpenAI) -> None:
    """Nothing precedes the first token, so its entry is null, which the SDK's type does not foresee."""
    reply = usual.completions.create(model=MODEL, prompt="One, two,", max_tokens=2, echo=True, logprobs=2)
    logprobs = reply.choices[0].logprobs
    assert reply.choices[0].text.startswith("One, two,")
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert "".join(logprobs.tokens) == reply.choices[0].text


def test_completions_logprobs(client: OpenAI) -> None:
    reply = client.completions.create(model=MODEL, prompt="One, two,", max_tokens=3, logprobs=2)
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert "".join(logprobs.tokens) == reply.choices[0].text


def test_models(client: OpenAI) -> None:
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL


def test_embeddings(client: OpenAI) -> None:
    reply = client.embeddings.create(model=MODEL, input=["sea", "ocean"], encoding_format="float")
    assert [round(sum(value * value for value in item.embedding), 3) for item in reply.data] == [1.0, 1.0]


def test_embeddings_as_base64_decode_to_the_floats(client: OpenAI, usual: OpenAI) -> None:
    floats = client.embeddings.create(model=MODEL, input="sea", encoding_format="float").data[0].embedding
    decoded = usual.embeddings.create(model=MODEL, input="sea").data[0].embedding
    assert decoded == pytest.approx(floats, abs=1e-6)


def test_bad_request_is_the_sdks_exception(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=ASK, temperature=3)
    assert caught.value.param == "temperature"


def test_unknown_model_is_the_sdks_exception(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="nobody", messages=ASK)
    assert caught.value.code == "model_not_found"


def test_overflow_has_its_code(client: OpenAI) -> None:
    long: list[ChatCompletionMessageParam] = [{"role": "user", "content": "word " * 5000}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=long)
    assert caught.value.code == "context_length_exceeded"
