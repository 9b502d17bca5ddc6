"""Inspect: a model by its name for servers of OpenAI's API, and a task whose solver calls a tool."""

import asyncio

from inspect_ai.model import get_model
from inspect_ai.tool import tool

from tests.clients import cases
from tests.clients.cases import MODEL, case


@tool
def weather():
    async def execute(city: str) -> str:
        """How warm it is in a city.

        Args:
            city: The name of the city.
        """
        return cases.weather(city)

    return execute


def model(url, **more):
    return get_model(f"openai-api/local/{MODEL}", base_url=url, api_key="none", memoize=False, **more)


@case("chat", "plain")
def plain(url):
    assert asyncio.run(model(url).generate(cases.NAME_A_COLOUR)).completion == cases.COLOUR


@case("chat", "tools")
def tools(url):
    async def run():
        _, output = await model(url).generate_loop(cases.HOW_WARM, tools=[weather()])
        return output.completion

    assert asyncio.run(run()) == cases.WARM


@case("chat", "reasoning")
def reasoning(url):
    done = asyncio.run(model(url).generate(cases.THINK_OF_A_COLOUR))
    [thought] = [part for part in done.message.content if part.type == "reasoning"]
    assert (thought.reasoning, done.completion) == (cases.THOUGHT, cases.COLOUR)


@case("responses", "plain")
def responses_plain(url):
    asked = model(url, responses_api=True)
    assert asyncio.run(asked.generate(cases.NAME_A_COLOUR)).completion == cases.COLOUR


if __name__ == "__main__":
    cases.main(globals())
