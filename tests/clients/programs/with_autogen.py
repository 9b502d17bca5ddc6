"""AutoGen: its client, and an assistant that calls a tool."""

import asyncio

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import UserMessage
from autogen_ext.models.openai import OpenAIChatCompletionClient

from tests.clients import cases
from tests.clients.cases import MODEL, case

INFO = {
    "vision": False,
    "function_calling": True,
    "json_output": True,
    "structured_output": True,
    "family": "unknown",
}


def client(url):
    return OpenAIChatCompletionClient(
        model=MODEL, base_url=url, api_key="none", model_info=INFO, max_retries=0
    )


def ask(text):
    return [UserMessage(content=text, source="user")]


@case("chat", "plain")
def plain(url):
    assert asyncio.run(client(url).create(ask(cases.NAME_A_COLOUR))).content == cases.COLOUR


@case("chat", "stream")
def stream(url):
    async def run():
        return [piece async for piece in client(url).create_stream(ask(cases.NAME_A_COLOUR))]

    *pieces, last = asyncio.run(run())
    assert "".join(pieces) == last.content == cases.COLOUR


@case("chat", "tools")
def tools(url):
    async def weather(city: str) -> str:
        return cases.weather(city)

    agent = AssistantAgent(
        "guide", model_client=client(url), tools=[weather], reflect_on_tool_use=True, max_tool_iterations=3
    )
    done = asyncio.run(agent.run(task=cases.HOW_WARM))
    assert done.messages[-1].content == cases.WARM


@case("chat", "reasoning")
def reasoning(url):
    done = asyncio.run(client(url).create(ask(cases.THINK_OF_A_COLOUR)))
    assert (done.thought, done.content) == (cases.THOUGHT, cases.COLOUR)


if __name__ == "__main__":
    cases.main(globals())
