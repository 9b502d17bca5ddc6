"""The `openai` client asks the Responses API of a real model, and checks each reply against its own types."""

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel, Field

from dragoman.engines.scripted import say
from dragoman.http.server import background
from dragoman.settings import Settings
from tests.conformance.conftest import FROM_SCRATCH, MODEL
from tests.support.tool_model import NAME, prompt_of, tool_model

ASK = "Name three colours."
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "How warm it is",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
NOTE: Any = {
    "type": "custom",
    "name": "note",
    "format": {"type": "grammar", "syntax": "regex", "definition": "[a-z]{3,8}"},
}


class Person(BaseModel):
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)


@pytest.fixture(scope="module")
def client(base_url: str) -> Iterator[OpenAI]:
    with OpenAI(
        base_url=base_url, api_key="none", max_retries=0, _strict_response_validation=True
    ) as open_ai:
        yield open_ai


def test_create(client: OpenAI) -> None:
    reply = client.responses.create(model=MODEL, input=ASK, max_output_tokens=8, temperature=0)
    assert reply.output_text
    assert reply.status == "incomplete"
    assert reply.incomplete_details is not None
    assert reply.incomplete_details.reason == "max_output_tokens"
    assert reply.usage is not None
    assert reply.usage.output_tokens == 8


def test_stream_is_the_whole_answer(client: OpenAI) -> None:
    asked: Any = {"model": MODEL, "input": ASK, "max_output_tokens": 12, "temperature": 0}
    asked["extra_body"] = FROM_SCRATCH
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == text
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_a_pydantic_model_is_parsed(client: OpenAI) -> None:
    reply = client.responses.parse(
        model=MODEL,
        input="Think of a person.",
        text_format=Person,
        max_output_tokens=300,
        extra_body={"seed": 3},
    )
    assert reply.status == "completed"
    assert isinstance(reply.output_parsed, Person)


def test_a_stream_is_parsed_to_the_same_type(client: OpenAI) -> None:
    with client.responses.stream(
        model=MODEL,
        input="Think of a person.",
        text_format=Person,
        max_output_tokens=300,
        extra_body={"seed": 4},
    ) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert isinstance(final.output_parsed, Person)
    assert final.output_text == text


def calling(tool: Any) -> Any:
    """What is asked so that the answer is one call."""
    choice = {"type": tool["type"], "name": tool["name"]}
    return {"model": MODEL, "tools": [tool], "tool_choice": choice, "parallel_tool_calls": False}


def test_a_function_is_called_and_its_result_read(client: OpenAI) -> None:
    first = client.responses.create(input="How warm is it in Rome?", **calling(WEATHER))
    [call] = [item for item in first.output if item.type == "function_call"]
    assert json.loads(call.arguments)["city"] in ("Paris", "Rome")
    second = client.responses.create(
        model=MODEL,
        previous_response_id=first.id,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"}],
        max_output_tokens=8,
    )
    assert second.output[0].type == "message"
    assert second.previous_response_id == first.id


def test_a_custom_tool_keeps_to_its_grammar(client: OpenAI) -> None:
    reply = client.responses.create(input="Note something.", **calling(NOTE))
    [call] = [item for item in reply.output if item.type == "custom_tool_call"]
    assert re.fullmatch("[a-z]{3,8}", call.input)


def test_arguments_are_the_sum_of_their_deltas(client: OpenAI) -> None:
    events: list[Any] = list(client.responses.create(input=ASK, stream=True, **calling(WEATHER)))
    kind = "response.function_call_arguments"
    [done] = [event for event in events if event.type == f"{kind}.done"]
    assert "".join(event.delta for event in events if event.type == f"{kind}.delta") == done.arguments


def test_input_of_a_custom_tool_is_the_sum_of_its_deltas(client: OpenAI) -> None:
    events: list[Any] = list(client.responses.create(input=ASK, stream=True, **calling(NOTE)))
    kind = "response.custom_tool_call_input"
    [done] = [event for event in events if event.type == f"{kind}.done"]
    assert "".join(event.delta for event in events if event.type == f"{kind}.delta") == done.input


def test_logprobs_are_included_when_asked_for(client: OpenAI) -> None:
    reply = client.responses.create(
        model=MODEL,
        input=ASK,
        max_output_tokens=4,
        temperature=0,
        top_logprobs=2,
        include=["message.output_text.logprobs"],
    )
    [message] = [item for item in reply.output if item.type == "message"]
    [part] = [part for part in message.content if part.type == "output_text"]
    assert part.logprobs is not None
    assert [len(entry.top_logprobs) for entry in part.logprobs] == [2] * 4
    assert "".join(entry.token for entry in part.logprobs) == part.text


def test_input_tokens_are_what_usage_says(client: OpenAI) -> None:
    counted = client.responses.input_tokens.count(model=MODEL, input=ASK, instructions="Be brief.")
    reply = client.responses.create(model=MODEL, input=ASK, instructions="Be brief.", max_output_tokens=1)
    assert reply.usage is not None
    assert counted.input_tokens == reply.usage.input_tokens


def test_bad_request_is_the_sdks_exception(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input=ASK, temperature=3)
    assert caught.value.param == "temperature"


def test_unknown_model_is_the_sdks_exception(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(model="nobody", input=ASK)
    assert caught.value.code == "model_not_found"


def test_overflow_has_its_code(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input="word " * 5000)
    assert caught.value.code == "context_length_exceeded"


def test_compaction_stands_for_the_conversation() -> None:
    """With a script, because a real model takes its time over a summary."""
    engine = tool_model(lambda _: say("The launch is on Tuesday."))
    talk: Any = [
        {"role": "user", "content": "We launch on Tuesday."},
        {"role": "assistant", "content": "Understood."},
        {"role": "user", "content": "Remind me."},
    ]
    with background(engine, Settings(port=0, store="memory")) as url:
        client = OpenAI(base_url=url + "/v1", api_key="none", _strict_response_validation=True)
        compacted = client.responses.compact(model=NAME, input=talk)
        again: Any = [item.to_dict(mode="json") for item in compacted.output]
        client.responses.create(model=NAME, input=[*again, {"role": "user", "content": "When?"}])
    assert [item.type for item in compacted.output].count("compaction") == 1
    assert "The launch is on Tuesday." in prompt_of(engine.jobs[-1])
