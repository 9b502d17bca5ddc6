"""LlamaIndex's OpenAILike, which is how it speaks to servers that are not OpenAI's."""

import asyncio

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

from tests.clients import cases
from tests.clients.cases import MODEL, case


def llm(url, **more):
    return OpenAILike(
        model=MODEL,
        api_base=url,
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=200_000,
        max_retries=0,
        **more,
    )


def ask(text):
    return [ChatMessage(role="user", content=text)]


@case("chat", "plain")
def plain(url):
    assert llm(url).chat(ask(cases.NAME_A_COLOUR)).message.content == cases.COLOUR


@case("chat", "stream")
def stream(url):
    assert "".join(part.delta for part in llm(url).stream_chat(ask(cases.NAME_A_COLOUR))) == cases.COLOUR


@case("chat", "tools")
def tools(url):
    async def run():
        agent = FunctionAgent(tools=[cases.weather], llm=llm(url), system_prompt="Be brief.")
        return str(await agent.run(cases.HOW_WARM))

    assert asyncio.run(run()) == cases.WARM


@case("completions", "plain")
def text(url):
    asked = OpenAILike(model=MODEL, api_base=url, api_key="none", is_chat_model=False, max_retries=0)
    assert asked.complete(cases.NAME_A_COLOUR).text == cases.COLOUR


if __name__ == "__main__":
    cases.main(globals())
