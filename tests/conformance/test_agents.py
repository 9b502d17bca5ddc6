"""The OpenAI Agents SDK, with a model that calls a tool, hands over, or remembers."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator

import pytest
from agents import (
    Agent,
    OpenAIConversationsSession,
    OpenAIResponsesModel,
    OpenAIResponsesWSModel,
    Runner,
    function_tool,
    handoff,
)
from agents.run import RunConfig
from openai import AsyncOpenAI

from dragoman.engines.scripted import Script, ScriptedEngine, say
from dragoman.http.server import background
from dragoman.settings import Settings
from dragoman.types import Job
from tests.docs.support import blocks
from tests.support.tool_model import NAME, call, prompt_of, tool_model

QUIET = RunConfig(tracing_disabled=True)


@function_tool
def weather(city: str) -> str:
    """How warm it is."""
    return f"21 degrees in {city}"


def said(job: Job) -> Script:
    prompt = prompt_of(job)
    if "Name a colour." in prompt:
        return say("Blue.")
    if "You are the expert." in prompt:
        return say("The expert says: warm.")
    if "Ask the expert." in prompt:
        return say(call("transfer_to_expert"))
    return say("It has 21 degrees." if "21 degrees in Paris" in prompt else call("weather", city="Paris"))


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return tool_model(said, context=8192)


@pytest.fixture(scope="module")
def url(engine: ScriptedEngine) -> Iterator[str]:
    with background(engine, Settings(port=0, store="memory")) as text:
        yield text + "/v1"


def client_of(url: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=url, api_key="none", max_retries=0, _strict_response_validation=True)


def agent(url: str, model_type: type[OpenAIResponsesModel] = OpenAIResponsesModel) -> Agent[None]:
    model = model_type(model=NAME, openai_client=client_of(url))
    expert = Agent[None](name="expert", instructions="You are the expert.", model=model)
    return Agent[None](
        name="host", instructions="Be brief.", model=model, tools=[weather], handoffs=[handoff(expert)]
    )


@pytest.mark.parametrize("model_type", [OpenAIResponsesModel, OpenAIResponsesWSModel])
def test_a_tool_loop(url: str, model_type: type[OpenAIResponsesModel]) -> None:
    done = asyncio.run(Runner.run(agent(url, model_type), "How warm is it?", run_config=QUIET))
    assert done.final_output == "It has 21 degrees."


def test_a_streamed_tool_loop(url: str) -> None:
    async def run() -> object:
        running = Runner.run_streamed(agent(url), "How warm is it?", run_config=QUIET)
        async for _ in running.stream_events():
            pass
        return running.final_output

    assert asyncio.run(run()) == "It has 21 degrees."


def test_another_agent_takes_over(url: str) -> None:
    done = asyncio.run(Runner.run(agent(url), "Ask the expert.", run_config=QUIET))
    assert done.final_output == "The expert says: warm."
    assert done.last_agent.name == "expert"


def test_the_server_remembers_a_chain(url: str, engine: ScriptedEngine) -> None:
    async def run() -> None:
        first = await Runner.run(agent(url), "How warm is it?", run_config=QUIET)
        await Runner.run(agent(url), "Sure?", previous_response_id=first.last_response_id, run_config=QUIET)

    asyncio.run(run())
    assert "How warm is it?" in prompt_of(engine.jobs[-1])


def test_a_session_is_a_conversation(url: str, engine: ScriptedEngine) -> None:
    async def run() -> None:
        session = OpenAIConversationsSession(openai_client=client_of(url))
        await Runner.run(agent(url), "How warm is it?", session=session, run_config=QUIET)
        await Runner.run(agent(url), "Sure?", session=session, run_config=QUIET)

    asyncio.run(run())
    assert "How warm is it?" in prompt_of(engine.jobs[-1])


def test_the_documented_example(url: str) -> None:
    [example] = blocks("docs/agents.md", "python")
    program = example.replace("MODEL", NAME).replace("http://127.0.0.1:8000/v1", url)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "Blue.\n", done.stderr
