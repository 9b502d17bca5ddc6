"""AG2: an agent, by both APIs."""

import asyncio

from ag2 import Agent
from ag2.config import OpenAIConfig, OpenAIResponsesConfig

from tests.clients import cases
from tests.clients.cases import MODEL, case

KINDS = {"chat": OpenAIConfig, "responses": OpenAIResponsesConfig}


def agent(url, api, **more):
    config = KINDS[api](model=MODEL, base_url=url, api_key="none", max_retries=0, **more)
    return Agent("guide", prompt="Be brief.", config=config)


def plain(url, api):
    assert asyncio.run(agent(url, api).ask(cases.NAME_A_COLOUR)).body == cases.COLOUR


def stream(url, api):
    assert asyncio.run(agent(url, api, streaming=True).ask(cases.NAME_A_COLOUR)).body == cases.COLOUR


def tools(url, api):
    async def run():
        asked = agent(url, api)
        asked.tool(cases.weather)
        first = await asked.ask(cases.HOW_WARM)
        assert first.body == cases.WARM
        return await first.ask(cases.NAME_A_COLOUR)

    assert asyncio.run(run()).body == cases.COLOUR


TRIED = {"plain": plain, "stream": stream, "tools": tools}


def of(api, what):
    return case(api, what)(lambda url: TRIED[what](url, api))


globals().update({f"{api}_{what}": of(api, what) for api in KINDS for what in TRIED})

if __name__ == "__main__":
    cases.main(globals())
