"""The WebSocket of the Responses API, as the `openai` client opens it."""

from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI
from openai.resources.responses.responses import ResponsesConnection
from openai.types.responses import Response
from openai.types.responses.responses_server_event import ResponsesServerEvent
from pydantic import TypeAdapter

from tests.conformance.conftest import MODEL, RunningServer

EVENTS: TypeAdapter[ResponsesServerEvent] = TypeAdapter(ResponsesServerEvent)
ENDS = ("response.completed", "response.incomplete", "response.failed", "error")


@pytest.fixture(scope="module")
def served(llamacpp: RunningServer) -> RunningServer:
    """How messages travel does not depend on who computes."""
    return llamacpp


@pytest.fixture
def socket(base_url: str) -> Iterator[ResponsesConnection]:
    with OpenAI(base_url=base_url, api_key="none") as client, client.responses.connect() as result:
        yield result


def turn(socket: ResponsesConnection, **fields: Any) -> list[Any]:
    """The events of one turn, each of which is of the SDK's types."""
    asked: Any = {"type": "response.create", "model": MODEL, "max_output_tokens": 4, **fields}
    socket.send(asked)
    events: list[Any] = []
    while not events or events[-1].type not in ENDS:
        events.append(EVENTS.validate_json(socket.recv_bytes()))
    return events


def answer(socket: ResponsesConnection, **fields: Any) -> Response:
    last = turn(socket, **fields)[-1]
    assert last.type in ("response.completed", "response.incomplete"), last
    return last.response  # type: ignore[no-any-return]


def test_events_of_a_turn(socket: ResponsesConnection) -> None:
    events = turn(socket, input="Count to three.")
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert events[-1].response.output_text == text


def test_what_has_no_effect_is_told_with_the_first_event(socket: ResponsesConnection) -> None:
    created = turn(socket, input="One.", colour="red")[0]
    assert created.headers == {"x-dragoman-ignored": "colour"}


def test_turns_follow_each_other(socket: ResponsesConnection) -> None:
    assert answer(socket, input="One.").id != answer(socket, input="Two.").id


def test_a_chain_that_is_not_stored(socket: ResponsesConnection) -> None:
    first = answer(socket, input="The word is cobalt.", store=False)
    second = answer(socket, input="Which word?", store=False, previous_response_id=first.id)
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens


def test_warming_up_generates_nothing(socket: ResponsesConnection) -> None:
    first = answer(socket, input="The word is cobalt.", store=False, generate=False)
    assert first.status == "completed"
    assert first.output == []
    asked: Any = {"input": "Which word?", "store": False, "previous_response_id": first.id, "temperature": 0}
    assert answer(socket, **asked).output_text


def test_an_error_leaves_the_socket_open(socket: ResponsesConnection) -> None:
    [error] = turn(socket, input="Hi.", temperature=3)
    assert error.type == "error"
    raw = error.to_dict()
    assert (raw["status"], raw["error"]["param"]) == (400, "temperature")
    assert answer(socket, input="Hi.", temperature=0).output_text


def test_what_is_unknown_cannot_be_continued(socket: ResponsesConnection) -> None:
    [error] = turn(socket, input="Hi.", store=False, previous_response_id="resp_nowhere")
    assert error.to_dict()["error"]["code"] == "previous_response_not_found"
