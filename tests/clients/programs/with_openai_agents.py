"""The OpenAI Agents SDK, by both APIs. Its tools are strict, whatever the engine can."""

import asyncio

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

from tests.clients import cases
from tests.clients.cases import MODEL, case

set_tracing_disabled(True)
weather = function_tool(cases.weather)


class Place(BaseModel):
    city: str


def agent(url, kind, **more):
    client = AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
    return Agent(
        name="guide", instructions="Be brief.", model=kind(model=MODEL, openai_client=client), **more
    )


async def run(asked, text):
    return (await Runner.run(asked, text)).final_output


async def streamed(asked, text):
    running = Runner.run_streamed(asked, text)
    kinds = [event.type async for event in running.stream_events()]
    assert "raw_response_event" in kinds
    return running.final_output


def then_a_colour(done):
    """The history as the SDK writes it, and a question more."""
    return [*done.to_input_list(), {"role": "user", "content": cases.NAME_A_COLOUR}]


async def plain(url, kind):
    assert await run(agent(url, kind), cases.NAME_A_COLOUR) == cases.COLOUR


async def stream(url, kind):
    assert await streamed(agent(url, kind), cases.NAME_A_COLOUR) == cases.COLOUR


async def tools(url, kind):
    asked = agent(url, kind, tools=[weather])
    done = await Runner.run(asked, cases.HOW_WARM)
    assert done.final_output == cases.WARM
    assert await run(asked, then_a_colour(done)) == cases.COLOUR
    assert await streamed(asked, cases.HOW_WARM) == cases.WARM


async def reasoning(url, kind):
    asked = agent(url, kind)
    done = await Runner.run(asked, cases.THINK_OF_A_COLOUR)
    assert done.final_output == cases.COLOUR
    [thought] = [item for item in done.new_items if item.type == "reasoning_item"]
    said = [*(thought.raw_item.content or []), *thought.raw_item.summary]
    assert cases.THOUGHT in [part.text for part in said]
    assert await run(asked, then_a_colour(done)) == cases.COLOUR


async def an_object(url, kind):
    assert await run(agent(url, kind, output_type=Place), cases.WHICH_CITY) == Place(**cases.CITY)


KINDS = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}
TRIED = {"plain": plain, "stream": stream, "tools": tools, "reasoning": reasoning, "an object": an_object}


def of(api, what):
    return case(api, what)(lambda url: asyncio.run(TRIED[what](url, KINDS[api])))


globals().update({f"{api}_{what}": of(api, what) for api in KINDS for what in TRIED})

if __name__ == "__main__":
    cases.main(globals())
