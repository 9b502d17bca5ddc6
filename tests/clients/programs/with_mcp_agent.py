"""mcp-agent: an agent whose tools are those of an MCP server beside it."""

import asyncio
import sys

from mcp_agent.agents.agent import Agent
from mcp_agent.app import MCPApp
from mcp_agent.config import LoggerSettings, MCPServerSettings, MCPSettings, OpenAISettings, Settings
from mcp_agent.workflows.llm.augmented_llm import RequestParams
from mcp_agent.workflows.llm.augmented_llm_openai import OpenAIAugmentedLLM
from pydantic import BaseModel

from tests.clients import cases
from tests.clients.cases import MODEL, case

SERVER = f"""
from mcp.server.fastmcp import FastMCP

server = FastMCP("weather")


@server.tool()
def weather(city: str) -> str:
    "How warm it is in a city."
    return {cases.RESULT!r}


server.run()
"""


class City(BaseModel):
    city: str


async def ask(url, text, answer):
    here = MCPServerSettings(command=sys.executable, args=["-c", SERVER])
    settings = Settings(
        execution_engine="asyncio",
        logger=LoggerSettings(type="none"),
        mcp=MCPSettings(servers={"here": here}),
        openai=OpenAISettings(api_key="none", base_url=url, default_model=MODEL),
    )
    app = MCPApp(name="tried", settings=settings)
    async with app.run():
        agent = Agent(name="guide", instruction="Be brief.", server_names=["here"])
        async with agent:
            return await answer(await agent.attach_llm(OpenAIAugmentedLLM), text)


def text_of(llm, text):
    return llm.generate_str(text, request_params=RequestParams(model=MODEL, use_history=False))


@case("chat", "plain")
def plain(url):
    assert asyncio.run(ask(url, cases.NAME_A_COLOUR, text_of)) == cases.COLOUR


@case("chat", "tools")
def tools(url):
    assert asyncio.run(ask(url, cases.HOW_WARM, text_of)).endswith(cases.WARM)


@case("chat", "a type")
def structured(url):
    def typed(llm, text):
        return llm.generate_structured(text, City, request_params=RequestParams(model=MODEL))

    assert asyncio.run(ask(url, cases.WHICH_CITY, typed)).model_dump() == cases.CITY


if __name__ == "__main__":
    cases.main(globals())
