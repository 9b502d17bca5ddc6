"""LangChain, told to use the Responses API."""

from functools import reduce
from operator import add
from typing import Any

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field, SecretStr

from dragoman.engines.scripted import Script, say
from dragoman.http.server import background
from dragoman.settings import Settings
from dragoman.types import Job
from tests.conformance.conftest import FROM_SCRATCH, MODEL
from tests.support.tool_model import NAME, call, prompt_of, tool_model


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)


def weather(city: str) -> str:
    """How warm it is."""
    return f"21 degrees in {city}"


def chat(url: str, model: str, **fields: Any) -> Any:
    return ChatOpenAI(
        model=model, base_url=url, api_key=SecretStr("none"), use_responses_api=True, max_retries=0, **fields
    )


def said(job: Job) -> Script:
    outcome = "21 degrees in Paris" in prompt_of(job)
    return say("It has 21 degrees." if outcome else call("weather", city="Paris"))


def test_a_stream_is_the_whole_answer(base_url: str) -> None:
    asked = chat(base_url, MODEL, temperature=0, max_tokens=8, extra_body=FROM_SCRATCH)
    whole = asked.invoke("Name three colours.")
    streamed = reduce(add, asked.stream("Name three colours."))
    assert streamed.text == whole.text
    assert streamed.usage_metadata["total_tokens"] == whole.usage_metadata["total_tokens"]


def test_structured_output(base_url: str) -> None:
    asked = chat(base_url, MODEL, max_tokens=300).with_structured_output(Person, method="json_schema")
    assert isinstance(asked.invoke("Think of a person."), Person)


def test_a_tool_loop() -> None:
    with background(tool_model(said), Settings(port=0, store="memory")) as url:
        bound = chat(f"{url}/v1", NAME).bind_tools([weather])
        asked = HumanMessage("How warm is it?")
        for first in (bound.invoke([asked]), reduce(add, bound.stream([asked]))):
            [outcome] = first.tool_calls
            assert (outcome["name"], outcome["args"]) == ("weather", {"city": "Paris"})
            result = ToolMessage(weather(**outcome["args"]), tool_call_id=outcome["id"])
            assert bound.invoke([asked, first, result]).text == "It has 21 degrees."


def test_the_server_remembers() -> None:
    engine = tool_model(said)
    with background(engine, Settings(port=0, store="memory")) as url:
        remembering = chat(f"{url}/v1", NAME, use_previous_response_id=True).bind_tools([weather])
        asked = HumanMessage("How warm is it?")
        first = remembering.invoke([asked])
        result = ToolMessage(weather("Paris"), tool_call_id=first.tool_calls[0]["id"])
        assert remembering.invoke([asked, first, result]).text == "It has 21 degrees."
    assert "How warm is it?" in prompt_of(engine.jobs[-1])
