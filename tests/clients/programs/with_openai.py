"""The official SDK. What it gave goes back as it is, which is how its makers hold a conversation."""

import json
from typing import Any

from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel

from tests.clients import cases
from tests.clients.cases import MODEL, case


class weather(BaseModel):
    city: str


class Place(BaseModel):
    city: str


FLAT_TOOL = {"type": "function", **cases.TOOL["function"], "strict": None}


def client_of(url: str, *, strict: bool = True) -> OpenAI:
    """A strict one checks answers against the SDK's types."""
    return OpenAI(base_url=url, api_key="none", max_retries=0, _strict_response_validation=strict)


def ask(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def told(history: list[Any], message: Any) -> list[Any]:
    """The history with the message as it came, and what its calls gave."""
    results = [
        {
            "role": "tool",
            "tool_call_id": call.id,
            "content": cases.weather(**json.loads(call.function.arguments)),
        }
        for call in message.tool_calls
    ]
    return [*history, message, *results]


@case("chat", "plain")
def chat_plain(url: str) -> None:
    made = client_of(url).chat.completions.create(model=MODEL, messages=ask(cases.NAME_A_COLOUR))
    assert made.choices[0].message.content == cases.COLOUR


@case("chat", "stream")
def chat_stream(url: str) -> None:
    options = {"include_usage": True}
    chunks = client_of(url).chat.completions.create(
        model=MODEL, messages=ask(cases.NAME_A_COLOUR), stream=True, stream_options=options
    )
    *parts, last = chunks
    assert "".join(part.choices[0].delta.content or "" for part in parts) == cases.COLOUR
    assert last.usage.completion_tokens


@case("chat", "tools")
def chat_tools(url: str) -> None:
    client, history = client_of(url), ask(cases.HOW_WARM)
    first = client.chat.completions.create(model=MODEL, messages=history, tools=[cases.TOOL])
    history = told(history, first.choices[0].message)
    second = client.chat.completions.create(model=MODEL, messages=history, tools=[cases.TOOL])
    assert second.choices[0].message.content == cases.WARM
    history = [*history, second.choices[0].message, *ask(cases.NAME_A_COLOUR)]
    third = client.chat.completions.create(model=MODEL, messages=history, tools=[cases.TOOL])
    assert third.choices[0].message.content == cases.COLOUR


@case("chat", "reasoning")
def chat_reasoning(url: str) -> None:
    client, history = client_of(url), ask(cases.THINK_OF_A_COLOUR)
    message = client.chat.completions.create(model=MODEL, messages=history).choices[0].message
    assert message.reasoning_content == cases.THOUGHT
    chunks = client.chat.completions.create(model=MODEL, messages=history, stream=True)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == cases.THOUGHT
    again = client.chat.completions.create(
        model=MODEL, messages=[*history, message, *ask(cases.NAME_A_COLOUR)]
    )
    assert again.choices[0].message.content == cases.COLOUR


@case("chat", "parse() of calls, appended")
def chat_parse_calls(url: str) -> None:
    client, history = client_of(url), ask(cases.HOW_WARM)
    tools = [pydantic_function_tool(weather)]
    first = client.chat.completions.parse(model=MODEL, messages=history, tools=tools).choices[0].message
    assert first.tool_calls[0].function.parsed_arguments == weather(city="Paris")
    second = client.chat.completions.parse(model=MODEL, messages=told(history, first), tools=tools)
    assert second.choices[0].message.content == cases.WARM


@case("chat", "parse() of an object, appended")
def chat_parse_object(url: str) -> None:
    client, history = client_of(url), ask(cases.WHICH_CITY)
    first = client.chat.completions.parse(model=MODEL, messages=history, response_format=Place)
    message = first.choices[0].message
    assert message.parsed == Place(city="Paris")
    history = [*history, message, *ask(cases.NAME_A_COLOUR)]
    second = client.chat.completions.create(model=MODEL, messages=history)
    assert second.choices[0].message.content == cases.COLOUR


@case("chat", "stream() helper, appended")
def chat_stream_helper(url: str) -> None:
    client, history = client_of(url), ask(cases.HOW_WARM)
    tools = [pydantic_function_tool(weather)]
    for wanted in (None, cases.WARM):
        with client.chat.completions.stream(model=MODEL, messages=history, tools=tools) as stream:
            for _ in stream:
                pass
            message = stream.get_final_completion().choices[0].message
        assert wanted in (None, message.content)
        if wanted is None:
            history = told(history, message)


@case("chat", "forced calls")
def chat_forced(url: str) -> None:
    client, history = client_of(url), ask(cases.HOW_WARM)
    model = client.models.list().data[0].id
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        asked = {"model": model, "messages": history, "tools": [cases.TOOL], "tool_choice": choice}
        [call] = client.chat.completions.create(**asked).choices[0].message.tool_calls
        deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**asked, stream=True)]
        pieces = [piece for delta in deltas for piece in delta.tool_calls or []]
        assert [piece.function.name for piece in pieces if piece.function.name] == ["weather"]
        assert "".join(piece.function.arguments or "" for piece in pieces) == call.function.arguments


@case("chat", "a stream added up by the names it has")
def chat_names(url: str) -> None:
    """Programs for vLLM and SGLang add up what `hasattr` finds first, and look no further."""
    chunks = client_of(url).chat.completions.create(
        model=MODEL, messages=ask(cases.THINK_OF_A_COLOUR), stream=True
    )
    thought = said = ""
    for chunk in chunks:
        delta = chunk.choices[0].delta
        if hasattr(delta, "reasoning_content"):
            thought += delta.reasoning_content
        elif hasattr(delta, "content"):
            said += delta.content or ""
    assert (thought, said) == (cases.THOUGHT, cases.COLOUR)


@case("chat", "history of reasoning and calls, written by hand")
def chat_by_hand(url: str) -> None:
    client, history = client_of(url), ask(cases.HOW_WARM)
    message = (
        client.chat.completions.create(model=MODEL, messages=history, tools=[cases.TOOL]).choices[0].message
    )
    [call] = message.tool_calls
    history += [
        {"role": "assistant", "tool_calls": message.tool_calls, "reasoning": message.reasoning},
        {"role": "tool", "tool_call_id": call.id, "name": "weather", "content": cases.weather("Paris")},
    ]
    done = client.chat.completions.create(model=MODEL, messages=history, tools=[cases.TOOL])
    assert done.choices[0].message.content == cases.WARM


@case("completions", "plain")
def text_plain(url: str) -> None:
    made = client_of(url).completions.create(model=MODEL, prompt=cases.NAME_A_COLOUR)
    assert made.choices[0].text == cases.COLOUR


@case("completions", "stream")
def text_stream(url: str) -> None:
    # Its types say that each chunk has a finish reason, which OpenAI's own have not.
    client = client_of(url, strict=False)
    chunks = client.completions.create(model=MODEL, prompt=cases.NAME_A_COLOUR, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == cases.COLOUR


@case("responses", "plain")
def responses_plain(url: str) -> None:
    made = client_of(url).responses.create(model=MODEL, input=cases.NAME_A_COLOUR)
    assert made.output_text == cases.COLOUR


@case("responses", "stream")
def responses_stream(url: str) -> None:
    with client_of(url).responses.stream(model=MODEL, input=cases.NAME_A_COLOUR) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert text == stream.get_final_response().output_text == cases.COLOUR


@case("responses", "tools")
def responses_tools(url: str) -> None:
    client, history = client_of(url), ask(cases.HOW_WARM)
    first = client.responses.create(model=MODEL, input=history, tools=[FLAT_TOOL])
    results = [
        {
            "type": "function_call_output",
            "call_id": item.call_id,
            "output": cases.weather(**json.loads(item.arguments)),
        }
        for item in first.output
        if item.type == "function_call"
    ]
    second = client.responses.create(
        model=MODEL, input=[*history, *first.output, *results], tools=[FLAT_TOOL]
    )
    assert second.output_text == cases.WARM


@case("responses", "reasoning")
def responses_reasoning(url: str) -> None:
    client, history = client_of(url), ask(cases.THINK_OF_A_COLOUR)
    first = client.responses.create(
        model=MODEL, input=history, store=False, include=["reasoning.encrypted_content"]
    )
    [thought] = [item for item in first.output if item.type == "reasoning"]
    assert thought.content[0].text == cases.THOUGHT
    again = client.responses.create(
        model=MODEL, input=[*history, *first.output, *ask(cases.NAME_A_COLOUR)], store=False
    )
    assert again.output_text == cases.COLOUR


@case("responses", "parse() of an object, appended")
def responses_parse(url: str) -> None:
    client, history = client_of(url), ask(cases.WHICH_CITY)
    first = client.responses.parse(model=MODEL, input=history, text_format=Place)
    assert first.output_parsed == Place(city="Paris")
    again = client.responses.create(model=MODEL, input=[*history, *first.output, *ask(cases.NAME_A_COLOUR)])
    assert again.output_text == cases.COLOUR


@case("responses", "parse() of calls, appended")
def responses_parse_calls(url: str) -> None:
    client, history = client_of(url), ask(cases.HOW_WARM)
    tools = [{"type": "function", **pydantic_function_tool(weather)["function"]}]
    first = client.responses.parse(model=MODEL, input=history, tools=tools)
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": cases.weather("Paris")}
        for item in first.output
        if item.type == "function_call"
    ]
    again = client.responses.parse(model=MODEL, input=[*history, *first.output, *results], tools=tools)
    assert again.output_text == cases.WARM


if __name__ == "__main__":
    cases.main(globals())
