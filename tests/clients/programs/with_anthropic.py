"""Anthropic's own SDK. What it gave goes back as it is, which is how its makers hold a conversation."""

import time

from anthropic import Anthropic, BadRequestError, NotFoundError, beta_tool
from pydantic import BaseModel

from tests.clients import cases
from tests.clients.cases import MODEL, case


class Place(BaseModel):
    city: str


@beta_tool
def weather(city: str) -> str:
    """How warm it is in a city.

    Args:
        city: The name of the city.
    """
    return cases.weather(city)


TOOL = {
    "name": "weather",
    "description": "How warm it is in a city.",
    "input_schema": cases.TOOL["function"]["parameters"],
}


def client_of(url):
    """A strict one checks answers against the SDK's types."""
    base = url.removesuffix("/v1")
    return Anthropic(base_url=base, api_key="none", max_retries=0, _strict_response_validation=True)


def ask(text, **more):
    return {"model": MODEL, "max_tokens": 2000, "messages": [{"role": "user", "content": text}], **more}


def told(history, message):
    """The history with the message as it came, and what its calls gave."""
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": cases.weather(**block.input)}
        for block in message.content
        if block.type == "tool_use"
    ]
    more = [{"role": "user", "content": results}] if results else []
    return [*history, {"role": "assistant", "content": message.content}, *more]


def text_of(message):
    return "".join(block.text for block in message.content if block.type == "text")


def thought_of(message):
    return "".join(block.thinking for block in message.content if block.type == "thinking")


@case("messages", "plain")
def plain(url):
    made = client_of(url).messages.create(**ask(cases.NAME_A_COLOUR))
    assert (text_of(made), made.stop_reason) == (cases.COLOUR, "end_turn")
    assert made._request_id


@case("messages", "stream")
def stream(url):
    client = client_of(url)
    with client.messages.stream(**ask(cases.NAME_A_COLOUR)) as events:
        assert "".join(events.text_stream) == cases.COLOUR
        assert events.get_final_message().usage.output_tokens
    raw = client.messages.create(**ask(cases.NAME_A_COLOUR), stream=True)
    deltas = [event.delta for event in raw if event.type == "content_block_delta"]
    assert "".join(delta.text for delta in deltas) == cases.COLOUR


@case("messages", "batch")
def batch(url):
    batches = client_of(url).messages.batches
    asking = [{"custom_id": "one", "params": ask(cases.NAME_A_COLOUR)}]
    made = batches.create(requests=asking)
    while batches.retrieve(made.id).processing_status != "ended":
        time.sleep(0.05)
    [one] = batches.results(made.id)
    assert (one.custom_id, one.result.message.content[-1].text) == ("one", cases.COLOUR)
    assert made.id in [each.id for each in batches.list()]
    assert batches.delete(made.id).type == "message_batch_deleted"


@case("messages", "tools")
def tools(url):
    client, asked = client_of(url), ask(cases.HOW_WARM, tools=[TOOL])
    first = client.messages.create(**asked)
    assert first.stop_reason == "tool_use"
    asked["messages"] = told(asked["messages"], first)
    second = client.messages.create(**asked)
    assert text_of(second) == cases.WARM
    more = [*told(asked["messages"], second), {"role": "user", "content": cases.NAME_A_COLOUR}]
    assert text_of(client.messages.create(**{**asked, "messages": more})) == cases.COLOUR


@case("messages", "stream(), with calls, appended")
def stream_tools(url):
    client, asked = client_of(url), ask(cases.HOW_WARM, tools=[TOOL])
    for wanted in ("", cases.WARM):
        with client.messages.stream(**asked) as events:
            for _ in events:
                pass
            message = events.get_final_message()
        assert text_of(message) == wanted
        asked["messages"] = told(asked["messages"], message)


@case("messages", "tool_runner()")
def runner(url):
    for stream in (False, True):
        made = client_of(url).beta.messages.tool_runner(**ask(cases.HOW_WARM, tools=[weather]), stream=stream)
        last = None
        for message in made:
            last = message.get_final_message() if stream else message
        assert text_of(last) == cases.WARM


@case("messages", "reasoning")
def reasoning(url):
    client = client_of(url)
    for display in ("summarized", "omitted"):
        thinking = {"type": "enabled", "budget_tokens": 1024, "display": display}
        asked = ask(cases.THINK_OF_A_COLOUR, thinking=thinking)
        first = client.messages.create(**asked)
        with client.messages.stream(**asked) as events:
            streamed = events.get_final_message()
        shown = cases.THOUGHT if display == "summarized" else ""
        assert (thought_of(first), thought_of(streamed)) == (shown, shown)
        for message in (first, streamed):
            more = [*told(asked["messages"], message), {"role": "user", "content": cases.NAME_A_COLOUR}]
            assert text_of(client.messages.create(**{**asked, "messages": more})) == cases.COLOUR


@case("messages", "parse() of an object, appended")
def parse(url):
    client, asked = client_of(url), ask(cases.WHICH_CITY)
    first = client.messages.parse(**asked, output_format=Place)
    assert first.parsed_output == Place(**cases.CITY)
    with client.messages.stream(**asked, output_format=Place) as events:
        assert events.get_final_message().parsed_output == Place(**cases.CITY)
    more = [*told(asked["messages"], first), {"role": "user", "content": cases.NAME_A_COLOUR}]
    assert text_of(client.messages.create(**{**asked, "messages": more})) == cases.COLOUR


@case("messages", "forced calls")
def forced(url):
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}):
        made = client_of(url).messages.create(**ask(cases.HOW_WARM, tools=[TOOL], tool_choice=choice))
        [use] = [block for block in made.content if block.type == "tool_use"]
        assert use.input == cases.CITY


@case("messages", "counts, models and errors")
def others(url):
    client = client_of(url)
    asked = ask(cases.NAME_A_COLOUR, system=[{"type": "text", "text": "Be brief."}], tools=[TOOL])
    asked.pop("max_tokens")
    counted = client.messages.count_tokens(**asked).input_tokens
    used = client.messages.create(**asked, max_tokens=100).usage
    assert counted == used.input_tokens + used.cache_read_input_tokens
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL
    for wrong, more in (
        (NotFoundError, {"model": "nobody"}),
        (BadRequestError, {"tool_choice": {"type": "any"}}),
    ):
        try:
            client.messages.create(**{**ask(cases.NAME_A_COLOUR), **more})
        except wrong as error:
            assert error.request_id
            assert error.type in ("not_found_error", "invalid_request_error")
        else:
            raise AssertionError(f"{more} was answered")


if __name__ == "__main__":
    cases.main(globals())
