"""Haystack's OpenAIChatGenerator and its agent."""

from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import Tool
from haystack.utils import Secret

from tests.clients import cases
from tests.clients.cases import MODEL, case

WEATHER = Tool(
    name="weather",
    description="How warm it is",
    parameters=cases.TOOL["function"]["parameters"],
    function=cases.weather,
)


def generator(url, **more):
    return OpenAIChatGenerator(
        model=MODEL, api_base_url=url, api_key=Secret.from_token("none"), max_retries=0, **more
    )


def ask(text):
    return [ChatMessage.from_user(text)]


@case("chat", "plain")
def plain(url):
    assert generator(url).run(messages=ask(cases.NAME_A_COLOUR))["replies"][0].text == cases.COLOUR


@case("chat", "stream")
def stream(url):
    pieces = []
    asked = generator(url, streaming_callback=lambda chunk: pieces.append(chunk.content))
    assert asked.run(messages=ask(cases.NAME_A_COLOUR))["replies"][0].text == cases.COLOUR
    assert "".join(pieces) == cases.COLOUR


@case("chat", "tools")
def tools(url):
    agent = Agent(chat_generator=generator(url), tools=[WEATHER])
    done = agent.run(messages=ask(cases.HOW_WARM))
    assert done["messages"][-1].text == cases.WARM
    again = agent.run(messages=[*done["messages"], *ask(cases.NAME_A_COLOUR)])
    assert again["messages"][-1].text == cases.COLOUR


@case("chat", "strict tools")
def strict_tools(url):
    agent = Agent(chat_generator=generator(url, tools_strict=True), tools=[WEATHER])
    assert agent.run(messages=ask(cases.HOW_WARM))["messages"][-1].text == cases.WARM


if __name__ == "__main__":
    cases.main(globals())
