"""What the server keeps for the `openai` client: responses, conversations and chat completions."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response

from tests.conformance.conftest import MODEL, RunningServer
from tests.support.wait import becomes

ASK = "Name three colours."
LONG: Any = {"max_output_tokens": 900, "extra_body": {"ignore_eos": True}}


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


@pytest.fixture(scope="module")
def stored(client: OpenAI) -> Response:
    return client.responses.create(model=MODEL, input=ASK, instructions="Be brief.", max_output_tokens=8)


def test_retrieve_gives_what_create_gave(client: OpenAI, stored: Response) -> None:
    assert client.responses.retrieve(stored.id).to_dict() == stored.to_dict()


def test_input_items(client: OpenAI, stored: Response) -> None:
    [item] = client.responses.input_items.list(stored.id)
    assert item.type == "message"
    assert item.content[0].type == "input_text"
    assert item.content[0].text == ASK


def test_a_chain_holds_every_turn(client: OpenAI, stored: Response) -> None:
    second = client.responses.create(
        model=MODEL, input="And two more.", previous_response_id=stored.id, max_output_tokens=2
    )
    assert second.usage is not None
    assert stored.usage is not None
    assert second.usage.input_tokens > stored.usage.input_tokens


def test_deleted_is_gone(client: OpenAI) -> None:
    response = client.responses.create(model=MODEL, input=ASK, max_output_tokens=1)
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_not_stored_cannot_be_continued(client: OpenAI) -> None:
    response = client.responses.create(model=MODEL, input=ASK, max_output_tokens=1, store=False)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input=ASK, previous_response_id=response.id)
    assert caught.value.code == "previous_response_not_found"


def test_a_stored_stream_is_replayed_from_any_event(client: OpenAI) -> None:
    events = list(client.responses.create(model=MODEL, input=ASK, max_output_tokens=8, stream=True))
    id_ = events[-1].response.id  # type: ignore[union-attr]
    again = list(client.responses.retrieve(id_, stream=True, starting_after=3))
    assert [event.to_dict() for event in again] == [event.to_dict() for event in events[4:]]


def test_background_is_polled(client: OpenAI) -> None:
    response = client.responses.create(model=MODEL, input=ASK, max_output_tokens=8, background=True)
    assert response.status in ("queued", "in_progress")
    assert becomes(lambda: client.responses.retrieve(response.id).status in ("completed", "incomplete"))


def test_background_stream_is_resumed_by_another_connection(client: OpenAI) -> None:
    stream = client.responses.create(
        model=MODEL, input=ASK, max_output_tokens=48, background=True, stream=True
    )
    seen = [next(stream) for _ in range(4)]
    stream.close()
    id_ = seen[0].response.id  # type: ignore[union-attr]
    rest = list(client.responses.retrieve(id_, stream=True, starting_after=seen[-1].sequence_number))
    numbers = [event.sequence_number for event in [*seen, *rest]]
    assert numbers == list(range(len(numbers)))
    assert rest[-1].type in ("response.completed", "response.incomplete")


def test_background_is_cancelled(client: OpenAI) -> None:
    result = client.responses.create(model=MODEL, input=ASK, background=True, **LONG)
    assert client.responses.cancel(result.id).status == "cancelled"
    assert client.responses.retrieve(result.id).status == "cancelled"


def test_conversation_takes_up_both_sides(client: OpenAI) -> None:
    talk = client.conversations.create(metadata={"topic": "colours"})
    reply = client.responses.create(model=MODEL, input=ASK, conversation=talk.id, max_output_tokens=4)
    assert reply.conversation is not None
    assert reply.conversation.id == talk.id
    items = list(client.conversations.items.list(talk.id, order="asc"))
    assert [item.role for item in items if item.type == "message"] == ["user", "assistant"]


def test_conversation_items_are_added_and_removed(client: OpenAI) -> None:
    talk = client.conversations.create(items=[{"type": "message", "role": "user", "content": "One."}])
    added = client.conversations.items.create(
        talk.id, items=[{"type": "message", "role": "user", "content": "Two."}]
    )
    [item] = added.data
    assert item.id is not None
    assert client.conversations.items.retrieve(item.id, conversation_id=talk.id).type == "message"
    client.conversations.items.delete(item.id, conversation_id=talk.id)
    assert len(list(client.conversations.items.list(talk.id))) == 1


def test_conversation_is_changed_and_deleted(client: OpenAI) -> None:
    talk = client.conversations.create()
    assert client.conversations.update(talk.id, metadata={"a": "b"}).metadata == {"a": "b"}
    assert client.conversations.retrieve(talk.id).metadata == {"a": "b"}
    assert client.conversations.delete(talk.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(talk.id)


def test_chat_completions_are_stored(base_url: str) -> None:
    """Without the check of types: in the SDK's, every stored message is the assistant's."""
    client = OpenAI(base_url=base_url, api_key="none", max_retries=0)
    chat_completion = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": ASK}],
        max_tokens=4,
        store=True,
        metadata={"run": "stored"},
    )
    kept = client.chat.completions
    assert [one.id for one in kept.list(metadata={"run": "stored"})] == [chat_completion.id]
    assert (
        kept.retrieve(chat_completion.id).choices[0].message.content
        == chat_completion.choices[0].message.content
    )
    assert [message.content for message in kept.messages.list(chat_completion.id)] == [ASK]
    assert kept.update(chat_completion.id, metadata={"run": "seen"}).id == chat_completion.id
    assert not list(kept.list(metadata={"run": "stored"}))
    assert kept.delete(chat_completion.id).deleted
    with pytest.raises(openai.NotFoundError):
        kept.retrieve(chat_completion.id)
