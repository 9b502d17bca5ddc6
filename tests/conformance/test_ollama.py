"""Ollama's own client for Python, with a real model and with one that calls tools."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import ollama
import pytest
from ollama import Client, Options, ResponseError
from ollama._types import ChatRequest, EmbedRequest, GenerateRequest

from dragoman.api.ollama import read_chat, read_prompt, read_texts
from dragoman.api.request_decoder import IgnoredFields
from dragoman.http.server import background
from dragoman.limits import Limits
from dragoman.settings import Settings
from tests.conformance.conftest import MODEL, RunningServer
from tests.support.parrot import call, parrot

SHORT = {"num_predict": 12, "temperature": 0, "seed": 1}
ASK = [{"role": "user", "content": "Name three colours."}]


@pytest.fixture(scope="module")
def client(served: RunningServer) -> Client:
    return Client(host=served.url)


@pytest.fixture
def caller() -> Iterator[Client]:
    with background(parrot(), Settings(port=0, dialect="hermes")) as url:
        yield Client(host=url)


def test_the_models(client: Client) -> None:
    [model, *_] = client.list().models
    assert model.model == f"{MODEL}:latest"
    assert "completion" in (client.show(model.model).capabilities or [])
    assert client.ps().models[0].model == model.model


def test_a_chat_whole_and_streamed(client: Client) -> None:
    whole = client.chat(MODEL, ASK, options=SHORT)
    parts = list(client.chat(MODEL, ASK, options=SHORT, stream=True))
    assert whole.message.content == "".join(part.message.content or "" for part in parts)
    assert (whole.done_reason, whole.eval_count) == (parts[-1].done_reason, parts[-1].eval_count)


def test_a_prompt_goes_on_from_its_context(client: Client) -> None:
    first = client.generate(MODEL, "Hello.", options=SHORT)
    second = client.generate(MODEL, "And now?", context=first.context, options=SHORT)
    assert second.response
    assert second.context is not None and first.context is not None
    assert list(second.context[: len(first.context)]) == list(first.context)


def test_vectors(client: Client) -> None:
    one, other = client.embed(MODEL, ["red", "blue"]).embeddings
    assert len(one) == len(other) == len(client.embeddings(MODEL, "red").embedding)


def test_a_text_that_is_too_long_for_a_vector_is_cut(openvino: RunningServer) -> None:
    assert len(Client(host=openvino.url).embed(MODEL, "word " * 5000).embeddings) == 1


def test_a_schema(client: Client) -> None:
    fields = {"properties": {"age": {"type": "integer", "enum": [7]}}, "additionalProperties": False}
    schema = {"type": "object", **fields, "required": ["age"]}
    text = client.chat(MODEL, ASK, format=schema, options={"temperature": 0}).message.content
    assert json.loads(text or "") == {"age": 7}


def test_a_function_is_called_and_its_result_is_heard(caller: Client) -> None:
    def add(one: int, other: int) -> int:
        """The sum.

        Args:
            one: a number
            other: a number
        """
        return one + other

    items: list[ollama.Message] = [ollama.Message(role="user", content=call("add", one=3, other=4))]
    answer = caller.chat("parrot", items, tools=[add])
    [wanted] = answer.message.tool_calls or []
    result = str(add(**wanted.function.arguments))
    items += [answer.message, ollama.Message(role="tool", tool_name="add", content=result)]
    assert caller.chat("parrot", items, tools=[add]).message.content == "The tool says: 7"


def test_a_model_that_is_not_there(client: Client) -> None:
    with pytest.raises(ResponseError) as raised:
        client.chat("other", ASK)
    assert raised.value.status_code == 404


def test_what_is_here_is_pulled(client: Client) -> None:
    assert client.pull(MODEL).status == "success"


BODIES: dict[type[Any], tuple[Callable[..., Any], dict[str, Any]]] = {
    ChatRequest: (read_chat, {"messages": ASK, "logprobs": True}),
    GenerateRequest: (read_prompt, {"prompt": "hi", "logprobs": True}),
    EmbedRequest: (read_texts, {"input": "hi"}),
}
VALUES = {
    **dict.fromkeys(("stream", "logprobs", "raw", "truncate", "think"), True),
    **dict.fromkeys(("model", "system", "suffix", "prompt", "input", "keep_alive"), "a"),
    "format": "json",
    "template": "",
    "options": {},
    "tools": [],
    "images": [],
    "context": [1],
    "messages": ASK,
}
FLAGS = ("numa", "low_vram", "f16_kv", "logits_all", "vocab_only", "use_mmap", "use_mlock", "embedding_only",
         "penalize_newline")  # fmt: skip


@pytest.mark.parametrize("kind", BODIES, ids=lambda kind: kind.__name__)
def test_every_field_of_its_types_is_known(kind: type[Any]) -> None:
    """A field that nobody knows would raise, since nothing unknown may be ignored here."""
    read, base = BODIES[kind]
    for name in kind.model_fields:
        read(
            json.dumps({"model": "m", **base, name: VALUES.get(name, 1)}).encode(),
            Limits(),
            IgnoredFields("error"),
        )


@pytest.mark.parametrize("name", Options.model_fields)
def test_every_option_of_its_types_is_known(name: str) -> None:
    value = ["a"] if name == "stop" else name in FLAGS or int(name != "mirostat")
    for kind in (ChatRequest, GenerateRequest):
        read, base = BODIES[kind]
        body = {"model": "m", **base, "options": {name: value}}
        read(json.dumps(body).encode(), Limits(), IgnoredFields("error"))
