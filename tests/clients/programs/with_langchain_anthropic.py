"""LangChain's ChatAnthropic."""

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage

from tests.clients import cases
from tests.clients.cases import MODEL, case


def model(url, **more):
    return ChatAnthropic(
        model=MODEL, base_url=url.removesuffix("/v1"), api_key="none", max_tokens=2000, max_retries=0, **more
    )


def weather(city: str) -> str:
    """How warm it is in a city."""
    return cases.weather(city)


@case("messages", "plain")
def plain(url):
    assert model(url).invoke(cases.NAME_A_COLOUR).text == cases.COLOUR


@case("messages", "stream")
def stream(url):
    assert "".join(chunk.text for chunk in model(url).stream(cases.NAME_A_COLOUR)) == cases.COLOUR


@case("messages", "tools")
def tools(url):
    asking = model(url).bind_tools([weather])
    messages = [HumanMessage(cases.HOW_WARM)]
    called = asking.invoke(messages)
    [call] = called.tool_calls
    messages += [called, ToolMessage(weather(**call["args"]), tool_call_id=call["id"])]
    assert asking.invoke(messages).text == cases.WARM


@case("messages", "reasoning")
def reasoning(url):
    thinking = {"type": "enabled", "budget_tokens": 1024}
    said = model(url, thinking=thinking).invoke(cases.THINK_OF_A_COLOUR)
    thoughts = [block["reasoning"] for block in said.content_blocks if block["type"] == "reasoning"]
    assert (thoughts, said.text) == ([cases.THOUGHT], cases.COLOUR)


@case("messages", "a type")
def structured(url):
    schema = {**cases.TOOL["function"]["parameters"], "title": "City", "description": "A city."}
    assert model(url).with_structured_output(schema).invoke(cases.WHICH_CITY) == cases.CITY


if __name__ == "__main__":
    cases.main(globals())
