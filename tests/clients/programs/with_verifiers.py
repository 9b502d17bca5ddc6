"""verifiers, for evaluation and reinforcement: it evaluates by each of our APIs; to train,
it writes the prompt itself, by prime-rl's renderers, and asks for ids."""

import asyncio
import tempfile

from renderers import DefaultRendererConfig
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from verifiers.v1.clients import EvalClientConfig, TrainClientConfig, resolve_client
from verifiers.v1.dialects import AnthropicDialect, ChatDialect, ResponsesDialect
from verifiers.v1.types import SamplingConfig

from tests.clients import cases
from tests.clients.cases import MODEL, case

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_tokenizer(folder):
    """The one of the model: an id for each byte, then the control tokens."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    vocabulary = {chr(byte): byte for byte in plain}
    vocabulary |= {chr(256 + place): byte for place, byte in enumerate(others)}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(
        [AddedToken(name, special=True) for name in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


async def ask(config, dialect, body):
    client = resolve_client(config)
    try:
        return await client.get_response(
            dialect, {"model": MODEL, **body}, SamplingConfig(max_tokens=100), "run-1"
        )
    finally:
        await client.close()


def evaluate(url, dialect, **body):
    return asyncio.run(ask(EvalClientConfig(base_url=url), dialect, body))


def chat(url, *messages, **more):
    return evaluate(url, ChatDialect(), messages=list(messages), **more)


def user(text):
    return {"role": "user", "content": text}


@case("chat", "plain")
def plain(url):
    assert chat(url, user(cases.NAME_A_COLOUR)).message.content == cases.COLOUR


@case("chat", "stream")
def stream(url):
    async def relayed():
        client = resolve_client(EvalClientConfig(base_url=url))
        dialect = ChatDialect()
        body = {"model": MODEL, "messages": [user(cases.NAME_A_COLOUR)], "stream": True}
        reply = await client.relay(dialect, body, "run-1")
        parser = dialect.stream_parser()
        async for event in reply.chunks:
            parser.feed(event)
        await reply.close()
        await client.close()
        return parser.finish()

    assert asyncio.run(relayed()).message.content == cases.COLOUR


@case("chat", "tools")
def tools(url):
    called = chat(url, user(cases.HOW_WARM), tools=[cases.TOOL])
    [call] = called.message.tool_calls
    assert (call.name, called.finish_reason) == ("weather", "tool_calls")
    said = called.raw["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": call.id, "content": cases.RESULT}
    answer = chat(url, user(cases.HOW_WARM), said, result, tools=[cases.TOOL])
    assert answer.message.content == cases.WARM


@case("chat", "reasoning")
def reasoning(url):
    answer = chat(url, user(cases.THINK_OF_A_COLOUR))
    assert (answer.message.reasoning_content, answer.message.content) == (cases.THOUGHT, cases.COLOUR)


@case("responses", "plain")
def responses_plain(url):
    answer = evaluate(url, ResponsesDialect(), input=cases.NAME_A_COLOUR)
    assert answer.message.content == cases.COLOUR


@case("responses", "reasoning")
def responses_reasoning(url):
    answer = evaluate(url, ResponsesDialect(), input=cases.THINK_OF_A_COLOUR, reasoning={"summary": "auto"})
    assert (answer.message.reasoning_content, answer.message.content) == (cases.THOUGHT, cases.COLOUR)


@case("messages", "plain")
def messages_plain(url):
    answer = evaluate(url, AnthropicDialect(), messages=[user(cases.NAME_A_COLOUR)], max_tokens=100)
    assert answer.message.content == cases.COLOUR


@case("messages", "reasoning")
def messages_reasoning(url):
    answer = evaluate(url, AnthropicDialect(), messages=[user(cases.THINK_OF_A_COLOUR)], max_tokens=100)
    assert (answer.message.reasoning_content, answer.message.content) == (cases.THOUGHT, cases.COLOUR)


def train(url, text):
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(folder)
        config = TrainClientConfig(
            base_url=url,
            renderer=DefaultRendererConfig(reasoning_parser="think"),
            renderer_model_name=folder,
        )
        return asyncio.run(ask(config, ChatDialect(), {"messages": [user(text)]}))


@case("generate", "plain")
def ids(url):
    answer = train(url, cases.NAME_A_COLOUR)
    assert (answer.message.content, answer.finish_reason) == (cases.COLOUR, "stop")
    assert bytes(id_ for id_ in answer.tokens.completion_ids if id_ < 256).decode() == cases.COLOUR
    assert len(answer.tokens.completion_logprobs) == len(answer.tokens.completion_ids)


@case("generate", "reasoning")
def ids_reasoning(url):
    said = train(url, cases.THINK_OF_A_COLOUR).message
    assert (said.reasoning_content.strip(), said.content.strip()) == (cases.THOUGHT, cases.COLOUR)


if __name__ == "__main__":
    cases.main(globals())
