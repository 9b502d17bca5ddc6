"""Anthropic's own client."""

from anthropic import Anthropic

from tests.clients import cases
from tests.clients.cases import MODEL, case

TOOL = {
    "name": "weather",
    "description": "How warm it is in a city.",
    "input_schema": cases.TOOL["function"]["parameters"],
}
THINKING = {"type": "enabled", "budget_tokens": 1024}


def messages(url):
    return Anthropic(base_url=url.removesuffix("/v1"), api_key="none", max_retries=0).messages


def asked(text, **more):
    return {"model": MODEL, "max_tokens": 2000, "messages": [{"role": "user", "content": text}], **more}


def text_of(message):
    return "".join(block.text for block in message.content if block.type == "text")


@case("messages", "plain")
def plain(url):
    said = messages(url).create(**asked(cases.NAME_A_COLOUR))
    assert (text_of(said), said.stop_reason) == (cases.COLOUR, "end_turn")


@case("messages", "stream")
def stream(url):
    with messages(url).stream(**asked(cases.NAME_A_COLOUR)) as events:
        assert "".join(events.text_stream) == cases.COLOUR
        assert events.get_final_message().usage.output_tokens > 0


@case("messages", "tools")
def tools(url):
    body = asked(cases.HOW_WARM, tools=[TOOL], thinking=THINKING)
    with messages(url).stream(**body) as events:
        called = events.get_final_message()
    [call] = [block for block in called.content if block.type == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": cases.weather(**call.input)}
    body["messages"] += [
        {"role": "assistant", "content": called.content},
        {"role": "user", "content": [result]},
    ]
    assert text_of(messages(url).create(**body)) == cases.WARM


@case("messages", "reasoning")
def reasoning(url):
    said = messages(url).create(**asked(cases.THINK_OF_A_COLOUR, thinking=THINKING))
    assert [block.thinking for block in said.content if block.type == "thinking"] == [cases.THOUGHT]
    assert text_of(said) == cases.COLOUR


@case("messages", "tokens are counted")
def counted(url):
    body = asked(cases.NAME_A_COLOUR)
    del body["max_tokens"]
    assert messages(url).count_tokens(**body).input_tokens > 0


if __name__ == "__main__":
    cases.main(globals())
