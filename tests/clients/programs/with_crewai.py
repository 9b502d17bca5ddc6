"""CrewAI: its model class, and a crew of one that calls a tool."""

import os

os.environ |= {
    "CREWAI_DISABLE_TELEMETRY": "true",
    "OTEL_SDK_DISABLED": "true",
    "CREWAI_TRACING_ENABLED": "false",
}

from crewai import LLM, Agent
from crewai.tools import tool

from tests.clients import cases
from tests.clients.cases import MODEL, case

weather = tool("weather")(cases.weather)


def llm(url, **more):
    return LLM(model=f"openai/{MODEL}", base_url=url, api_key="none", **more)


@case("chat", "plain")
def plain(url):
    assert llm(url).call(cases.NAME_A_COLOUR) == cases.COLOUR


@case("chat", "stream")
def stream(url):
    assert llm(url, stream=True).call(cases.NAME_A_COLOUR) == cases.COLOUR


@case("chat", "tools")
def tools(url):
    agent = Agent(role="guide", goal="to answer", backstory="none", llm=llm(url), tools=[weather])
    assert cases.WARM in agent.kickoff(cases.HOW_WARM).raw


if __name__ == "__main__":
    cases.main(globals())
