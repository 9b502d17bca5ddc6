"""Semantic Kernel: its connector, and a kernel that calls a function."""

import asyncio
from typing import Annotated

from openai import AsyncOpenAI
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function

from tests.clients import cases
from tests.clients.cases import MODEL, case


class Weather:
    @kernel_function(name="weather", description="How warm it is")
    def weather(self, city: Annotated[str, "the city"]) -> str:
        return cases.weather(city)


def service(url):
    return OpenAIChatCompletion(
        ai_model_id=MODEL, async_client=AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
    )


def history(text):
    made = ChatHistory()
    made.add_user_message(text)
    return made


@case("chat", "plain")
def plain(url):
    asked = service(url).get_chat_message_content(
        history(cases.NAME_A_COLOUR), OpenAIChatPromptExecutionSettings()
    )
    assert str(asyncio.run(asked)) == cases.COLOUR


@case("chat", "stream")
def stream(url):
    async def run():
        pieces = service(url).get_streaming_chat_message_content(
            history(cases.NAME_A_COLOUR), OpenAIChatPromptExecutionSettings()
        )
        return "".join([str(piece) async for piece in pieces])

    assert asyncio.run(run()) == cases.COLOUR


@case("chat", "tools")
def tools(url):
    kernel = Kernel()
    kernel.add_plugin(Weather(), plugin_name="place")
    settings = OpenAIChatPromptExecutionSettings(function_choice_behavior=FunctionChoiceBehavior.Auto())
    asked = service(url).get_chat_message_content(history(cases.HOW_WARM), settings, kernel=kernel)
    assert str(asyncio.run(asked)) == cases.WARM


if __name__ == "__main__":
    cases.main(globals())
