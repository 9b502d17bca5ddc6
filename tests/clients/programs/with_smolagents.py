"""Smolagents: an agent that calls tools, and the model behind it."""

from smolagents import OpenAIServerModel, ToolCallingAgent, tool

from tests.clients import cases
from tests.clients.cases import MODEL, case

weather = tool(cases.weather)


def model(url):
    return OpenAIServerModel(model_id=MODEL, api_base=url, api_key="none")


def ask(text):
    return [{"role": "user", "content": [{"type": "text", "text": text}]}]


@case("chat", "plain")
def plain(url):
    assert model(url)(ask(cases.NAME_A_COLOUR)).content == cases.COLOUR


@case("chat", "stream")
def stream(url):
    pieces = model(url).generate_stream(ask(cases.NAME_A_COLOUR))
    assert "".join(piece.content or "" for piece in pieces) == cases.COLOUR


@case("chat", "tools")
def tools(url):
    for streamed in (False, True):
        agent = ToolCallingAgent(
            tools=[weather], model=model(url), max_steps=3, verbosity_level=0, stream_outputs=streamed
        )
        assert agent.run(cases.HOW_WARM) == cases.WARM


if __name__ == "__main__":
    cases.main(globals())
