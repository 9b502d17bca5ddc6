"""Pydantic AI, by both APIs."""

from pydantic import BaseModel
from pydantic_ai import Agent, ThinkingPart
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients import cases
from tests.clients.cases import MODEL, case

KINDS = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}


class Place(BaseModel):
    city: str


def agent(url, api, **more):
    return Agent(KINDS[api](MODEL, provider=OpenAIProvider(base_url=url, api_key="none")), **more)


def plain(url, api):
    assert agent(url, api).run_sync(cases.NAME_A_COLOUR).output == cases.COLOUR


def stream(url, api):
    import asyncio

    async def run():
        async with agent(url, api).run_stream(cases.NAME_A_COLOUR) as running:
            return "".join([piece async for piece in running.stream_text(delta=True)])

    assert asyncio.run(run()) == cases.COLOUR


def tools(url, api):
    asked = agent(url, api, tools=[cases.weather])
    done = asked.run_sync(cases.HOW_WARM)
    assert done.output == cases.WARM
    again = asked.run_sync(cases.NAME_A_COLOUR, message_history=done.all_messages())
    assert again.output == cases.COLOUR


def reasoning(url, api):
    # By the Responses API it shows summaries only.
    asked = agent(url, api, model_settings={"openai_reasoning_summary": "auto"})
    done = asked.run_sync(cases.THINK_OF_A_COLOUR)
    parts = [part for message in done.all_messages() for part in message.parts]
    assert cases.THOUGHT in "".join(part.content for part in parts if isinstance(part, ThinkingPart)), parts
    again = asked.run_sync(cases.NAME_A_COLOUR, message_history=done.all_messages())
    assert again.output == cases.COLOUR


def an_object(url, api):
    from pydantic_ai import NativeOutput

    done = agent(url, api, output_type=NativeOutput(Place)).run_sync(cases.WHICH_CITY)
    assert done.output == Place(**cases.CITY)


TRIED = {"plain": plain, "stream": stream, "tools": tools, "reasoning": reasoning, "an object": an_object}


def of(api, what):
    return case(api, what)(lambda url: TRIED[what](url, api))


globals().update({f"{api}_{what}": of(api, what) for api in KINDS for what in TRIED})

if __name__ == "__main__":
    cases.main(globals())
