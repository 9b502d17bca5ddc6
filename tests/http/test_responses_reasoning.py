"""Reasoning of responses: told, told as a summary, sealed, and sent back."""

from typing import Any

import pytest

from tests.http.conftest import RunningServer, Serve
from tests.support.parrot import messages_of, parrot
from tests.support.responses import create, created, error_of, kinds, streamed, user

THOUGHT = "<think>\nHm, hello.\n</think>\n\nHi."
SEALED = ["reasoning.encrypted_content"]


def reasoning_of(response: dict[str, Any]) -> dict[str, Any]:
    item: dict[str, Any] = response["output"][0]
    assert item["type"] == "reasoning"
    return item


def test_reasoning_is_an_item_before_the_message(parrot: RunningServer) -> None:
    response = created(parrot.url, THOUGHT)
    item = reasoning_of(response)
    assert item["content"] == [{"type": "reasoning_text", "text": "Hm, hello."}]
    assert item["summary"] == [{"type": "summary_text", "text": "Hm, hello."}]
    assert (item["encrypted_content"], item["status"]) == (None, "completed")
    assert response["output"][1]["content"][0]["text"] == "Hi."


@pytest.mark.parametrize("asked", [{}, {"reasoning": {"summary": "auto"}}])
def test_reasoning_is_told_once_in_events_that_all_clients_know(
    parrot: RunningServer, asked: dict[str, Any]
) -> None:
    assert kinds(streamed(parrot.url, THOUGHT, **asked))[2:8] == [
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
    ]


def test_who_asks_for_a_summary_gets_nothing_else(parrot: RunningServer) -> None:
    item = reasoning_of(created(parrot.url, THOUGHT, reasoning={"summary": "auto"}))
    assert item["summary"] == [{"type": "summary_text", "text": "Hm, hello."}]
    assert item["content"] == []


def test_sealed_reasoning_alone_brings_the_thought_back(parrot: RunningServer) -> None:
    first = created(parrot.url, THOUGHT, include=SEALED, store=False)
    item = reasoning_of(first)
    assert "Hm" not in item["encrypted_content"]
    back = {"type": "reasoning", "summary": [], "encrypted_content": item["encrypted_content"]}
    created(parrot.url, [user("hi"), back, first["output"][1], user("on")])
    assert ("assistant", "<think>\nHm, hello.\n</think>\nHi.") in messages_of(parrot.engine.jobs[-1])


def test_reasoning_in_plain_words_comes_back(parrot: RunningServer) -> None:
    first = created(parrot.url, THOUGHT, store=False)
    created(parrot.url, [user("hi"), *first["output"], user("on")])
    assert ("assistant", "<think>\nHm, hello.\n</think>\nHi.") in messages_of(parrot.engine.jobs[-1])


def test_a_seal_of_another_key_is_refused(serve: Serve) -> None:
    engine = parrot()
    url = serve(engine, store="memory", api_key=["ann", "bob"])
    item = reasoning_of(created(url, THOUGHT, include=SEALED, key="ann"))
    item.pop("content")
    reply = create(url, [user("hi"), item, user("on")], key="bob")
    assert (reply.status_code, error_of(reply)["code"]) == (400, "invalid_encrypted_content")
    assert len(engine.jobs) == 1


def test_a_seal_that_was_changed_is_refused(parrot: RunningServer) -> None:
    item = reasoning_of(created(parrot.url, THOUGHT, include=SEALED))
    sealed = item["encrypted_content"]
    other = sealed[:-6] + ("A" if sealed[-6] != "A" else "B") + sealed[-5:]
    reply = create(parrot.url, [{"type": "reasoning", "summary": [], "encrypted_content": other}, user("on")])
    assert (reply.status_code, error_of(reply)["code"]) == (400, "invalid_encrypted_content")


def test_a_seal_outlives_the_server_with_its_folder(serve: Serve, tmp_path: Any) -> None:
    first = serve(parrot(), data_dir=str(tmp_path))
    item = reasoning_of(created(first, THOUGHT, include=SEALED))
    item.pop("content")
    engine = parrot()
    created(serve(engine, data_dir=str(tmp_path)), [user("hi"), item, user("on")])
    assert any("Hm, hello." in text for _, text in messages_of(engine.jobs[-1]))
