"""LiteLLM, by each of its names for servers that speak OpenAI's API."""

import gc
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # its price list would be fetched from elsewhere

import litellm

from tests.clients import cases
from tests.clients.cases import MODEL, case

PROVIDERS = (
    "openai",
    "hosted_vllm",
    "openrouter",
    "custom_openai",
    "lm_studio",
    "litellm_proxy",
    "deepseek",
    "llamafile",
    "together_ai",
)
COMMON = {"api_key": "none", "max_retries": 0, "num_retries": 0}


def ask(url, text, provider="openai", **more):
    return litellm.completion(
        model=f"{provider}/{MODEL}",
        api_base=url,
        messages=[{"role": "user", "content": text}],
        **COMMON,
        **more,
    )


@case("chat", "plain")
def plain(url):
    assert ask(url, cases.NAME_A_COLOUR).choices[0].message.content == cases.COLOUR


@case("chat", "stream")
def stream(url):
    chunks = ask(url, cases.NAME_A_COLOUR, stream=True, stream_options={"include_usage": True})
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == cases.COLOUR


def loop(url, provider, **more):
    messages = [{"role": "user", "content": cases.HOW_WARM}]
    asked = {"model": f"{provider}/{MODEL}", "api_base": url, "tools": [cases.TOOL], **COMMON, **more}
    first = litellm.completion(messages=messages, **asked).choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": cases.weather("Paris")}
    second = litellm.completion(messages=[*messages, first, result], **asked).choices[0].message
    assert second.content == cases.WARM
    messages += [first, result, second, {"role": "user", "content": cases.NAME_A_COLOUR}]
    assert litellm.completion(messages=messages, **asked).choices[0].message.content == cases.COLOUR


@case("chat", "tools")
def tools(url):
    loop(url, "openai")


@case("chat", "reasoning")
def reasoning(url):
    assert ask(url, cases.THINK_OF_A_COLOUR).choices[0].message.reasoning_content == cases.THOUGHT
    deltas = [chunk.choices[0].delta for chunk in ask(url, cases.THINK_OF_A_COLOUR, stream=True)]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == cases.THOUGHT


def by_name(provider):
    @case("chat", f"{provider}/")
    def run(url):
        assert ask(url, cases.NAME_A_COLOUR, provider).choices[0].message.content == cases.COLOUR
        chunks = ask(url, cases.NAME_A_COLOUR, provider, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == cases.COLOUR
        loop(url, provider)

    return run


globals().update({f"by_{provider}": by_name(provider) for provider in PROVIDERS})


@case("ollama", "plain")
def ollama_plain(url):
    base = url.removesuffix("/v1")
    assert ask(base, cases.NAME_A_COLOUR, "ollama_chat").choices[0].message.content == cases.COLOUR
    assert ask(base, cases.NAME_A_COLOUR, "ollama").choices[0].message.content == cases.COLOUR


@case("ollama", "stream")
def ollama_stream(url):
    for provider in ("ollama_chat", "ollama"):
        chunks = ask(url.removesuffix("/v1"), cases.NAME_A_COLOUR, provider, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == cases.COLOUR


@case("ollama", "tools")
def ollama_tools(url):
    loop(url.removesuffix("/v1"), "ollama_chat")


@case("ollama", "reasoning")
def ollama_reasoning(url):
    said = ask(url.removesuffix("/v1"), cases.THINK_OF_A_COLOUR, "ollama_chat").choices[0].message
    assert (said.reasoning_content, said.content) == (cases.THOUGHT, cases.COLOUR)


@case("messages", "plain")
def messages_plain(url):
    base = url.removesuffix("/v1")
    assert ask(base, cases.NAME_A_COLOUR, "anthropic").choices[0].message.content == cases.COLOUR


@case("messages", "stream")
def messages_stream(url):
    chunks = ask(url.removesuffix("/v1"), cases.NAME_A_COLOUR, "anthropic", stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == cases.COLOUR


@case("messages", "tools")
def messages_tools(url):
    loop(url.removesuffix("/v1"), "anthropic")


@case("messages", "reasoning")
def messages_reasoning(url):
    said = ask(url.removesuffix("/v1"), cases.THINK_OF_A_COLOUR, "anthropic").choices[0].message
    assert (said.reasoning_content, said.content) == (cases.THOUGHT, cases.COLOUR)


@case("chat", "a prompt too long is a ContextWindowExceededError")
def overflow(url):
    try:
        ask(url, "word " * 45_000)
    except litellm.ContextWindowExceededError:
        return
    raise AssertionError("the prompt was answered")


@case("completions", "plain")
def text(url):
    made = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", prompt=cases.NAME_A_COLOUR, api_base=url, **COMMON
    )
    assert made.choices[0].text == cases.COLOUR


@case("responses", "plain")
def responses_plain(url):
    made = litellm.responses(model=f"openai/{MODEL}", input=cases.NAME_A_COLOUR, api_base=url, **COMMON)
    assert made.output_text == cases.COLOUR


@case("responses", "stream")
def responses_stream(url):
    events = litellm.responses(
        model=f"openai/{MODEL}", input=cases.NAME_A_COLOUR, api_base=url, stream=True, **COMMON
    )
    deltas = (event.delta for event in events if event.type == "response.output_text.delta")
    assert "".join(deltas) == cases.COLOUR


if __name__ == "__main__":
    # It leaves streams to the collector. One that is closed in the middle of a request of the same thread
    # waits for itself: httpcore's pool of connections is locked then.
    gc.disable()
    cases.main(globals())
