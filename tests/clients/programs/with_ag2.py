"""AG2: an assistant that calls a tool, and a proxy of the user that runs it."""

from autogen import ConversableAgent, LLMConfig

from tests.clients import cases
from tests.clients.cases import MODEL, case


def agent(url, **more):
    config = LLMConfig({"model": MODEL, "base_url": url, "api_key": "none", "api_type": "openai", **more})
    return ConversableAgent("guide", llm_config=config, human_input_mode="NEVER")


@case("chat", "plain")
def plain(url):
    reply = agent(url).generate_reply([{"role": "user", "content": cases.NAME_A_COLOUR}])
    assert (reply["content"] if isinstance(reply, dict) else reply) == cases.COLOUR


@case("chat", "tools")
def tools(url):
    done = agent(url).run(cases.HOW_WARM, tools=[tool_of()], max_turns=3, user_input=False)
    done.process()
    assert cases.WARM in [message.get("content") for message in done.messages]


def tool_of():
    from autogen.tools import tool

    return tool(name="weather", description="How warm it is")(cases.weather)


if __name__ == "__main__":
    cases.main(globals())
