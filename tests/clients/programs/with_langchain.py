"""LangChain's ChatOpenAI, by both APIs."""

from functools import reduce
from operator import add

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, SecretStr

from tests.clients import cases
from tests.clients.cases import MODEL, case


class Place(BaseModel):
    """A place."""

    city: str


def chat(url, responses=False, **more):
    return ChatOpenAI(
        model=MODEL,
        base_url=url,
        api_key=SecretStr("none"),
        max_retries=0,
        use_responses_api=responses,
        **more,
    )


def loop(bound):
    """Whole and streamed; each message goes back as it came."""
    asked = HumanMessage(cases.HOW_WARM)
    for first in (bound.invoke([asked]), reduce(add, bound.stream([asked]))):
        [made] = first.tool_calls
        result = ToolMessage(cases.weather(**made["args"]), tool_call_id=made["id"])
        second = bound.invoke([asked, first, result])
        assert second.text == cases.WARM
        more = [asked, first, result, second, HumanMessage(cases.NAME_A_COLOUR)]
        assert bound.invoke(more).text == cases.COLOUR


@case("chat", "plain")
def chat_plain(url):
    assert chat(url).invoke(cases.NAME_A_COLOUR).text == cases.COLOUR


@case("chat", "stream")
def chat_stream(url):
    whole = reduce(add, chat(url, stream_usage=True).stream(cases.NAME_A_COLOUR))
    assert whole.text == cases.COLOUR
    assert whole.usage_metadata["output_tokens"]


@case("chat", "tools")
def chat_tools(url):
    loop(chat(url).bind_tools([cases.weather]))


@case("chat", "strict tools")
def chat_strict_tools(url):
    loop(chat(url).bind_tools([cases.weather], strict=True))


@case("chat", "an object, three ways")
def chat_objects(url):
    for method in ("json_schema", "json_mode"):
        asked = chat(url).with_structured_output(Place, method=method)
        assert asked.invoke(cases.WHICH_CITY) == Place(**cases.CITY)


@case("completions", "plain")
def text_plain(url):
    asked = OpenAI(model=MODEL, base_url=url, api_key=SecretStr("none"), max_retries=0)
    assert asked.invoke(cases.NAME_A_COLOUR) == cases.COLOUR


@case("completions", "stream")
def text_stream(url):
    asked = OpenAI(model=MODEL, base_url=url, api_key=SecretStr("none"), max_retries=0)
    assert "".join(asked.stream(cases.NAME_A_COLOUR)) == cases.COLOUR


@case("responses", "plain")
def responses_plain(url):
    assert chat(url, responses=True).invoke(cases.NAME_A_COLOUR).text == cases.COLOUR


@case("responses", "stream")
def responses_stream(url):
    whole = reduce(add, chat(url, responses=True).stream(cases.NAME_A_COLOUR))
    assert whole.text == cases.COLOUR


@case("responses", "tools")
def responses_tools(url):
    loop(chat(url, responses=True).bind_tools([cases.weather]))


@case("responses", "reasoning")
def responses_reasoning(url):
    asked = chat(url, responses=True, reasoning={"summary": "auto"})
    first = asked.invoke(cases.THINK_OF_A_COLOUR)
    blocks = [block for block in first.content_blocks if block["type"] == "reasoning"]
    assert "".join(block.get("reasoning", "") for block in blocks) == cases.THOUGHT, first.content_blocks
    history = [HumanMessage(cases.THINK_OF_A_COLOUR), first, HumanMessage(cases.NAME_A_COLOUR)]
    assert asked.invoke(history).text == cases.COLOUR


@case("responses", "an object")
def responses_object(url):
    asked = chat(url, responses=True).with_structured_output(Place, method="json_schema")
    assert asked.invoke(cases.WHICH_CITY) == Place(**cases.CITY)


if __name__ == "__main__":
    cases.main(globals())
