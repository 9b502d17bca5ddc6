"""Where a conversation may be cut."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dragoman.api.responses.history import beginnings, messages
from dragoman.api.responses.items import normalise

USER = {"role": "user", "content": "hi"}
ids = st.sampled_from("abc")
calls = st.builds(lambda id_: {"type": "function_call", "call_id": id_, "name": "f", "arguments": "{}"}, ids)
outputs = st.builds(lambda id_: {"type": "function_call_output", "call_id": id_, "output": "x"}, ids)
contexts = st.lists(st.one_of(st.just(USER), calls, outputs), max_size=12)


def told(items: list[dict[str, Any]]) -> object:
    """Raises if an output has no call before it."""
    return messages(items, None, lambda sealed: sealed, lambda space, name: name)


def valid(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items without outputs that nothing before them asks for."""
    known: set[str] = set()
    kept = []
    for item in normalise(given, lambda start: f"{start}1"):
        if item["type"] == "function_call":
            known.add(item["call_id"])
        if item["type"] != "function_call_output" or item["call_id"] in known:
            kept.append(item)
    return kept


@given(contexts.map(valid))
def test_what_follows_a_beginning_can_stand_alone(items: list[dict[str, Any]]) -> None:
    for number in beginnings(items):
        assert items[number]["role"] == "user"
        told(items[number:])


@given(contexts.map(valid))
def test_without_answers_every_message_of_a_user_is_a_beginning(items: list[dict[str, Any]]) -> None:
    kept = [item for item in items if item["type"] != "function_call_output"]
    assert beginnings(kept) == [number for number, item in enumerate(kept) if item.get("role") == "user"]
