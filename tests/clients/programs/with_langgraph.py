"""LangChain's agents, which are graphs of LangGraph, by both APIs."""

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI

from tests.clients import cases
from tests.clients.cases import MODEL, case


def agent(url, responses):
    chat = ChatOpenAI(model=MODEL, base_url=url, api_key="none", max_retries=0, use_responses_api=responses)
    return create_agent(chat, tools=[cases.weather], system_prompt="Be brief.")


def ask(text):
    return {"role": "user", "content": text}


def loop(url, responses):
    asked = agent(url, responses)
    done = asked.invoke({"messages": [ask(cases.HOW_WARM)]})
    assert done["messages"][-1].text == cases.WARM
    again = asked.invoke({"messages": [*done["messages"], ask(cases.NAME_A_COLOUR)]})
    assert again["messages"][-1].text == cases.COLOUR


def stream(url, responses):
    pieces = agent(url, responses).stream({"messages": [ask(cases.NAME_A_COLOUR)]}, stream_mode="messages")
    assert "".join(piece.text for piece, _ in pieces) == cases.COLOUR


@case("chat", "stream")
def chat_stream(url):
    stream(url, False)


@case("chat", "tools")
def chat_tools(url):
    loop(url, False)


@case("responses", "stream")
def responses_stream(url):
    stream(url, True)


@case("responses", "tools")
def responses_tools(url):
    loop(url, True)


if __name__ == "__main__":
    cases.main(globals())
