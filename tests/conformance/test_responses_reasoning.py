"""Reasoning and namespaces, which the `openai` client carries from turn to turn."""

from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from dragoman.engines.scripted import Script, ScriptedEngine, say
from dragoman.http.server import background
from dragoman.settings import Settings
from dragoman.types import Job
from tests.support.tool_model import NAME, call, prompt_of, tool_model

ASK = "How warm is it in Paris?"
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}
TOOLS: Any = [{"type": "namespace", "name": "sky", "description": "Of the sky", "tools": [WEATHER]}]
SECRET: Any = {"model": NAME, "tools": TOOLS, "store": False, "include": ["reasoning.encrypted_content"]}


def said(job: Job) -> Script:
    outcome = "21 degrees" in prompt_of(job)
    return say(
        "It has 21 degrees."
        if outcome
        else f"<think>\nI ask.\n</think>\n\n{call('sky__weather', city='Paris')}"
    )


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return tool_model(said)


@pytest.fixture(scope="module")
def client(engine: ScriptedEngine) -> Iterator[OpenAI]:
    with (
        background(engine, Settings(port=0, store="memory")) as url,
        OpenAI(
            base_url=url + "/v1", api_key="none", max_retries=0, _strict_response_validation=True
        ) as open_ai,
    ):
        yield open_ai


def test_reasoning_streams_before_the_call(client: OpenAI) -> None:
    events: Any = list(client.responses.create(model=NAME, input=ASK, tools=TOOLS, stream=True))
    thought = "".join(
        event.delta for event in events if event.type == "response.reasoning_summary_text.delta"
    )
    reasoning, result = events[-1].response.output
    assert thought == reasoning.summary[0].text == reasoning.content[0].text == "I ask."
    assert result.type == "function_call"


def test_a_call_says_which_namespace_it_is_of(client: OpenAI) -> None:
    result: Any = client.responses.create(model=NAME, input=ASK, tools=TOOLS).output[-1]
    assert (result.namespace, result.name) == ("sky", "weather")


def test_sealed_reasoning_comes_back_with_the_result(client: OpenAI, engine: ScriptedEngine) -> None:
    """As a client works that keeps everything itself."""
    first: Any = client.responses.create(input=ASK, **SECRET)
    assert first.output[0].encrypted_content
    history: Any = [
        {"role": "user", "content": ASK},
        *(item.to_dict(mode="json") for item in first.output),
        {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "21 degrees"},
    ]
    del history[1]["content"]
    second = client.responses.create(input=history, **SECRET)
    assert second.output_text == "It has 21 degrees."
    assert "sky__weather" in prompt_of(engine.jobs[-1])


def test_a_stored_item_is_referred_to(client: OpenAI) -> None:
    first: Any = client.responses.create(model=NAME, input=ASK, tools=TOOLS)
    result = first.output[-1]
    history: Any = [
        {"role": "user", "content": ASK},
        {"type": "item_reference", "id": result.id},
        {"type": "function_call_output", "call_id": result.call_id, "output": "21 degrees"},
    ]
    assert client.responses.create(model=NAME, input=history, tools=TOOLS).output_text == "It has 21 degrees."
