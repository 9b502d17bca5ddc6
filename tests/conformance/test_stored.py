"""What is kept, through the `openai` client, which checks every reply against its own types."""

from collections.abc import Iterator

import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam
from openai.types.conversations import Message
from openai.types.responses import ResponseInputItemParam

from tests.conformance.conftest import MODEL, RunningServer

ASK: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Name three colours."}]
ITEMS: list[ResponseInputItemParam] = [
    {"role": "user", "content": "What is the weather in Oslo?"},
    {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Oslo"}'},
    {"type": "function_call_output", "call_id": "call_1", "output": "Rain."},
    {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "It rains."}]},
    {"role": "assistant", "content": "It rains."},
    {"type": "custom_tool_call", "call_id": "call_2", "name": "note", "input": "rain"},
    {"type": "custom_tool_call_output", "call_id": "call_2", "output": "noted"},
]


@pytest.fixture(scope="module")
def served(llamacpp: RunningServer) -> RunningServer:
    """What is kept does not depend on who computes."""
    return llamacpp


@pytest.fixture(scope="module")
def client(base_url: str) -> Iterator[OpenAI]:
    with OpenAI(
        base_url=base_url, api_key="none", max_retries=0, _strict_response_validation=True
    ) as open_ai:
        yield open_ai


def ask(client: OpenAI, **metadata: str) -> ChatCompletion:
    return client.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=6, temperature=0, store=True, metadata=metadata
    )


def test_a_conversation_from_its_beginning_to_its_end(client: OpenAI) -> None:
    conversation = client.conversations.create(metadata={"topic": "weather"})
    assert client.conversations.retrieve(conversation.id) == conversation
    changed = client.conversations.update(conversation.id, metadata={"topic": "rain"})
    assert changed.metadata == {"topic": "rain"}
    gone = client.conversations.delete(conversation.id)
    assert (gone.id, gone.deleted) == (conversation.id, True)
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(conversation.id)


def test_items_of_every_common_kind(client: OpenAI) -> None:
    conversation = client.conversations.create().id
    added = client.conversations.items.create(conversation, items=ITEMS)
    assert [item.type for item in added.data] == [item.get("type", "message") for item in ITEMS]
    listed = list(client.conversations.items.list(conversation, order="asc", limit=3))
    assert listed == added.data, "the client follows the pages by itself"
    for item in added.data:
        assert item.id is not None
        assert client.conversations.items.retrieve(item.id, conversation_id=conversation) == item


def test_a_deleted_item_is_gone(client: OpenAI) -> None:
    conversation = client.conversations.create(items=ITEMS)
    [last, *others] = client.conversations.items.list(conversation.id)
    assert last.id is not None
    assert client.conversations.items.delete(last.id, conversation_id=conversation.id) == conversation
    assert list(client.conversations.items.list(conversation.id)) == others


def test_a_response_continues_a_conversation(client: OpenAI) -> None:
    conversation = client.conversations.create(items=[{"role": "user", "content": "My name is Ada."}])
    reply = client.responses.create(
        model=MODEL, input="Who am I?", conversation=conversation.id, max_output_tokens=6, temperature=0
    )
    asked, answered = list(client.conversations.items.list(conversation.id, order="asc"))[1:]
    assert isinstance(asked, Message)
    assert (asked.role, answered.id) == ("user", reply.output[0].id)


def test_a_stored_completion_is_the_reply(client: OpenAI) -> None:
    reply = ask(client, topic="colours")
    kept = client.chat.completions.retrieve(reply.id)
    assert (kept.choices, kept.usage, kept.created) == (reply.choices, reply.usage, reply.created)
    assert (kept.model_extra or {})["metadata"] == {"topic": "colours"}


def test_a_stored_stream_is_the_whole_answer(client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=6, temperature=0, store=True, stream=True
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert client.chat.completions.retrieve(chunks[0].id).choices[0].message.content == text


def test_completions_are_listed_changed_and_deleted(client: OpenAI) -> None:
    texts = [ask(client, batch="listed", number=str(number)).id for number in range(3)]

    def listed(**metadata: str) -> list[str]:
        result = client.chat.completions.list(metadata=metadata, model=MODEL, limit=2)
        return [one.id for one in result]

    assert listed(batch="listed") == texts
    client.chat.completions.update(texts[0], metadata={"batch": "changed"})
    assert (listed(batch="listed"), listed(batch="changed")) == (texts[1:], texts[:1])
    assert client.chat.completions.delete(texts[1]).deleted
    assert listed(batch="listed") == texts[2:]
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.delete(texts[1])


def test_the_messages_of_a_stored_completion(client: OpenAI) -> None:
    # The client's type knows messages of the assistant only, so this one reply is not checked against it.
    lenient = client.with_options(_extra_kwargs={"_strict_response_validation": False})
    kept = list(lenient.chat.completions.messages.list(ask(client).id))
    assert [(str(one.role), one.content) for one in kept] == [("user", "Name three colours.")]
