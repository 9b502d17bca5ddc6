"""What an engine owes, kept by real vLLM: a small model, so that nothing but vLLM takes time."""

import asyncio
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError, OpenAI

from tests.engines.vllm.conftest import RunningServer

LONG = 3900


@pytest.fixture(scope="module")
def client(tiny: RunningServer) -> OpenAI:
    return OpenAI(base_url=tiny.url + "/v1", api_key="none", max_retries=0)


def complete(client: OpenAI, prompt: str = "Hello there", model: str = "tiny", **fields: Any) -> Any:
    own = {
        name: fields.pop(name) for name in ("n", "logprobs", "echo", "logit_bias", "seed") if name in fields
    }
    asked = {"max_tokens": 6, "temperature": 0} | fields
    body = asked | {"return_token_ids": True}
    return client.completions.create(model=model, prompt=prompt, extra_body=body, **own)


def ids(client: OpenAI, **fields: Any) -> list[int]:
    numbers: list[int] = complete(client, **fields).choices[0].token_ids
    return numbers


def test_continuations_differ_and_a_seed_brings_them_back(client: OpenAI) -> None:
    first, again = (complete(client, n=3, seed=7, temperature=1).choices for _ in range(2))
    assert [choice.text for choice in first] == [choice.text for choice in again]
    assert len({choice.text for choice in first}) == 3


def test_log_probabilities_stand_beside_every_token(client: OpenAI) -> None:
    result = complete(client, logprobs=2).choices[0].logprobs
    assert len(result.tokens) == len(result.token_logprobs) == 6
    for chosen, likeliest in zip(result.token_logprobs, result.top_logprobs, strict=True):
        assert chosen == max(likeliest.values()) < 0


def test_the_prompt_has_log_probabilities_of_its_own(client: OpenAI) -> None:
    result = complete(client, "one two three four", echo=True, logprobs=1, max_tokens=1).choices[0].logprobs
    assert result.token_logprobs[0] is None
    assert len(result.token_logprobs) == 5 and all(value < 0 for value in result.token_logprobs[1:])


def test_a_known_prefix_is_counted_unless_a_salt_keeps_it_apart(client: OpenAI) -> None:
    prompt = "time way day man " * 40
    cached = []
    for salt in ("a", "a", "b"):
        usage = complete(client, prompt, cache_salt=salt).usage
        cached.append(usage.prompt_tokens_details.cached_tokens)
    assert cached[0] == cached[2] == 0 < cached[1]


def test_an_adapter_is_a_model_of_its_own(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "poet"]
    assert ids(client) == ids(client) != ids(client, model="poet")


def test_an_adapter_comes_and_goes(client: OpenAI, tiny: RunningServer) -> None:
    """The same weights by another name say the same, and are not there any more afterwards."""
    load = {"lora_name": "bard", "lora_path": "poet"}
    assert httpx.post(tiny.url + "/v1/load_lora_adapter", json=load, timeout=60).status_code == 200
    assert ids(client, model="bard") == ids(client, model="poet") != ids(client)
    gone = httpx.post(tiny.url + "/v1/unload_lora_adapter", json={"lora_name": "bard"}, timeout=60)
    assert gone.status_code == 200
    with pytest.raises(NotFoundError):
        ids(client, model="bard")
    assert httpx.post(tiny.url + "/v1/load_lora_adapter", json=load, timeout=60).status_code == 200
    assert ids(client, model="bard") == ids(client, model="poet")
    httpx.post(tiny.url + "/v1/unload_lora_adapter", json={"lora_name": "bard"}, timeout=60)
    wrong = {"lora_name": "bard", "lora_path": "tiny"}
    assert httpx.post(tiny.url + "/v1/load_lora_adapter", json=wrong, timeout=60).status_code == 400


def test_ids_are_favoured_forbidden_and_enforced(client: OpenAI) -> None:
    usual = ids(client)[0]
    assert usual not in ids(client, logit_bias={str(usual): -100})
    assert set(ids(client, allowed_token_ids=[usual + 1, usual + 2])) <= {usual + 1, usual + 2}


def test_a_stop_id_ends_the_answer_and_is_told(client: OpenAI) -> None:
    usual = ids(client)[0]
    choice = complete(client, stop_token_ids=[usual]).choices[0]
    assert (choice.finish_reason, choice.stop_reason, choice.token_ids) == ("stop", usual, [usual])
    late = complete(client, stop_token_ids=[usual], min_tokens=3).choices[0]
    assert len(late.token_ids) >= 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"typical_p": 0.5}, "typical_p"),
        ({"min_tokens": 7}, "min_tokens"),
        ({"temperature": 9}, "temperature"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(client: OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        complete(client, **fields)
    assert caught.value.param == param


def test_a_model_that_writes_gives_no_embeddings(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="returns no embeddings"):
        client.embeddings.create(model="tiny", input="x")


async def opened(client: AsyncOpenAI, tokens: int, priority: int = 0) -> Any:
    """A stream whose first event is there: the engine has the job."""
    stream = await client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": f"Go {priority}"}],
        max_tokens=tokens,
        stream=True,
        extra_body={"ignore_eos": True, "priority": priority},
    )
    await anext(aiter(stream))
    return stream


async def end_of(stream: Any) -> str | None:
    async with stream:
        ends: list[str | None] = [chunk.choices[0].finish_reason async for chunk in stream]
        return ends[-1]


def test_the_urgent_goes_first_when_a_place_is_free(tiny: RunningServer) -> None:
    async def order() -> list[str]:
        ended: list[str] = []

        async def follow(name: str, stream: Any) -> None:
            await end_of(stream)
            ended.append(name)

        async with AsyncOpenAI(base_url=tiny.url + "/v1", api_key="none", max_retries=0) as client:
            first, second = [await opened(client, LONG, priority=-1) for _ in range(2)]
            waiting = [("patient", await opened(client, 3, 5)), ("urgent", await opened(client, 3, 1))]
            follows = [asyncio.create_task(follow(*each)) for each in waiting]
            await first.close()
            await asyncio.gather(*follows)
            await second.close()
        return ended

    assert asyncio.run(order()) == ["urgent", "patient"]


def test_a_client_that_leaves_makes_room(tiny: RunningServer) -> None:
    """Two long answers take both places; only because their clients left does the third one get its own."""

    async def leave() -> str | None:
        async with AsyncOpenAI(base_url=tiny.url + "/v1", api_key="none", max_retries=0) as client:
            for stream in [await opened(client, LONG) for _ in range(2)]:
                await stream.close()
            return await end_of(await opened(client, 5))

    before = said(tiny)
    assert asyncio.run(leave()) == "length"
    assert said(tiny) - before < LONG


def said(server: RunningServer) -> float:
    lines = httpx.get(server.url + "/metrics").text.splitlines()
    return next(
        float(line.split()[1]) for line in lines if line.startswith("dragoman_generation_tokens_total{")
    )
