"""Ollama's own client."""

from ollama import Client

from tests.clients import cases
from tests.clients.cases import MODEL, case


def client(url):
    return Client(host=url.removesuffix("/v1"))


def chat(url, text, **more):
    return client(url).chat(MODEL, [{"role": "user", "content": text}], **more)


@case("ollama", "plain")
def plain(url):
    assert chat(url, cases.NAME_A_COLOUR).message.content == cases.COLOUR


@case("ollama", "stream")
def stream(url):
    parts = list(chat(url, cases.NAME_A_COLOUR, stream=True))
    assert "".join(part.message.content or "" for part in parts) == cases.COLOUR
    assert (parts[-1].done, parts[-1].done_reason) == (True, "stop")


@case("ollama", "tools")
def tools(url):
    messages = [{"role": "user", "content": cases.HOW_WARM}]
    called = client(url).chat(MODEL, messages, tools=[cases.weather]).message
    [call] = called.tool_calls
    result = cases.weather(**call.function.arguments)
    messages += [called, {"role": "tool", "tool_name": call.function.name, "content": result}]
    assert client(url).chat(MODEL, messages, tools=[cases.weather]).message.content == cases.WARM


@case("ollama", "reasoning")
def reasoning(url):
    said = chat(url, cases.THINK_OF_A_COLOUR, think=True).message
    assert (said.thinking, said.content) == (cases.THOUGHT, cases.COLOUR)


@case("ollama", "a prompt")
def prompt(url):
    assert client(url).generate(MODEL, cases.NAME_A_COLOUR).response == cases.COLOUR
    parts = client(url).generate(MODEL, cases.NAME_A_COLOUR, stream=True)
    assert "".join(part.response for part in parts) == cases.COLOUR


@case("ollama", "models")
def models(url):
    assert [model.model for model in client(url).list().models] == [f"{MODEL}:latest"]
    assert "tools" in client(url).show(MODEL).capabilities


@case("ollama", "a schema")
def schema(url):
    asked = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    assert chat(url, cases.WHICH_CITY, format=asked).message.content == '{"city": "Paris"}'


if __name__ == "__main__":
    cases.main(globals())
