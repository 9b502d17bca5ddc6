"""Long conversations made short: asked for, triggered, or because of a threshold."""

from typing import Any

import httpx
import pytest

from tests.http.conftest import RunningServer, Serve
from tests.support.parrot import NAME, messages_of, parrot
from tests.support.responses import PATH, create, created, error_of, fold, get, kinds, streamed, texts, user

TALK = [user("one"), {"role": "assistant", "content": "two"}]
TRIGGER = {"type": "compaction_trigger"}
HEADING = "Summary of the conversation so far:\n"


def compact(url: str, input: Any, key: str | None = None, **fields: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    body = {"model": NAME, "input": input, **fields}
    return httpx.post(f"{url}{PATH}/compact", json=body, headers=headers, timeout=30)


def test_a_conversation_becomes_a_sealed_summary(parrot: RunningServer) -> None:
    reply = compact(parrot.url, TALK).json()
    [item] = reply["output"]
    assert (reply["object"], item["type"]) == ("response.compaction", "compaction")
    job = parrot.engine.jobs[-1]
    assert reply["usage"]["input_tokens"] == len(job.prompt)
    messages = messages_of(job)
    assert messages[:2] == [("user", "one"), ("assistant", "two")]
    assert "summary" in messages[-1][1]
    assert "summary" not in item["encrypted_content"]


@pytest.mark.parametrize(
    ("context", "said", "room"), [(65536, 1, 1024), (65536, 40_000, 10_000), (2048, 1, 512)]
)
def test_a_summary_is_not_much_longer_than_what_it_is_of(
    serve: Serve, context: int, said: int, room: int
) -> None:
    """It is never more than a quarter of what the model takes, either."""
    engine = parrot(context=context)
    compact(serve(engine, store="memory"), [user("x" * said)])
    assert room <= engine.jobs[-1].sampling.max_tokens <= room + 100


def test_what_still_waits_for_its_answer_is_kept(parrot: RunningServer) -> None:
    system = {"role": "developer", "content": "Be brief."}
    output = compact(parrot.url, [system, *TALK, user("three")]).json()["output"]
    assert [item["type"] for item in output] == ["compaction"]
    created(parrot.url, output)
    assert messages_of(parrot.engine.jobs[-1])[1:] == [("system", "Be brief."), ("user", "three")]


def test_what_is_kept_is_not_said_twice(parrot: RunningServer) -> None:
    system = {"role": "developer", "content": "Be brief."}
    output = compact(parrot.url, [system, *TALK, user("three")]).json()["output"]
    created(parrot.url, [system, *output])
    assert [text for _, text in messages_of(parrot.engine.jobs[-1])].count("Be brief.") == 1


def test_calls_that_are_kept_follow_the_summary(parrot: RunningServer) -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c1", "output": "4"}
    output = compact(parrot.url, [*TALK, user("three"), call, result]).json()["output"]
    assert [item["type"] for item in output] == ["compaction", "function_call", "function_call_output"]
    created(parrot.url, output)
    assert [role for role, _ in messages_of(parrot.engine.jobs[-1])][1:] == ["user", "assistant", "tool"]


def test_a_summary_stands_for_what_it_was_made_of(parrot: RunningServer) -> None:
    output = compact(parrot.url, TALK).json()["output"]
    summary = messages_of(parrot.engine.jobs[-1])[-1][1]
    created(parrot.url, [*TALK, *output, user("three")])
    assert messages_of(parrot.engine.jobs[-1]) == [("system", HEADING + summary), ("user", "three")]


def test_a_model_must_be_named(parrot: RunningServer) -> None:
    reply = httpx.post(f"{parrot.url}{PATH}/compact", json={"input": "hi"})
    assert (reply.status_code, error_of(reply)["param"]) == (400, "model")


def test_a_summary_for_another_key_is_refused(serve: Serve) -> None:
    url = serve(parrot(), store="memory", api_key=["ann", "bob"])
    output = compact(url, TALK, key="ann").json()["output"]
    reply = create(url, [*output, user("three")], key="bob")
    assert (reply.status_code, error_of(reply)["code"]) == (400, "invalid_encrypted_content")


def test_a_stored_response_can_be_compacted(parrot: RunningServer) -> None:
    before = created(parrot.url, "one")
    assert compact(parrot.url, None, previous_response_id=before["id"]).status_code == 200
    assert [text for _, text in messages_of(parrot.engine.jobs[-1])][:2] == ["one", "one"]


def test_a_trigger_makes_a_summary_and_nothing_else(parrot: RunningServer) -> None:
    before = len(parrot.engine.jobs)
    events = streamed(parrot.url, [*TALK, TRIGGER])
    response = events[-1]["response"]
    assert [item["type"] for item in fold(events)] == ["compaction"]
    assert kinds(events) == ["created", "in_progress", "output_item.added", "output_item.done", "completed"]
    assert len(parrot.engine.jobs) == before + 1
    assert response["usage"]["output_tokens"] > 0
    assert get(parrot.url, response["id"]).json() == response


def test_a_chain_goes_on_from_a_trigger(parrot: RunningServer) -> None:
    fields = created(parrot.url, [*TALK, TRIGGER])
    created(parrot.url, "three", previous_response_id=fields["id"])
    [(role, summary), last] = messages_of(parrot.engine.jobs[-1])
    assert (role, last) == ("system", ("user", "three"))
    assert summary.startswith(HEADING)


def managed(threshold: int) -> list[dict[str, Any]]:
    return [{"type": "compaction", "compact_threshold": threshold}]


@pytest.mark.parametrize("fields", [{}, {"stream": True}])
def test_below_the_threshold_nothing_changes(parrot: RunningServer, fields: dict[str, Any]) -> None:
    before = len(parrot.engine.jobs)
    reply = create(parrot.url, [*TALK, user("three")], context_management=managed(1000), **fields)
    assert reply.status_code == 200
    assert len(parrot.engine.jobs) == before + 1
    assert [text for _, text in messages_of(parrot.engine.jobs[-1])] == ["one", "two", "three"]


def test_above_the_threshold_the_answer_follows_a_summary(parrot: RunningServer) -> None:
    events = streamed(parrot.url, [*TALK, user("three")], context_management=managed(10))
    response = events[-1]["response"]
    assert [item["type"] for item in response["output"]] == ["compaction", "message"]
    assert fold(events) == response["output"]
    assert texts(response) == "three"
    asked, answered = parrot.engine.jobs[-2:]
    assert messages_of(answered)[1:] == [("user", "three")]
    assert response["usage"]["input_tokens"] == len(asked.prompt) + len(answered.prompt)


def test_a_summary_does_not_count_as_the_answer(parrot: RunningServer) -> None:
    asked = [*TALK, user("three")]
    response = created(parrot.url, asked, context_management=managed(10), max_output_tokens=4)
    assert (response["status"], texts(response)) == ("incomplete", "thre")
    assert response["usage"]["output_tokens"] > 4


def test_a_chain_goes_on_from_a_summary(parrot: RunningServer) -> None:
    fields = created(parrot.url, [*TALK, user("three")], context_management=managed(10))
    created(parrot.url, "four", previous_response_id=fields["id"])
    items = [text for _, text in messages_of(parrot.engine.jobs[-1])]
    assert items[0].startswith(HEADING)
    assert items[1:] == ["three", "three", "four"]


def test_a_conversation_that_does_not_fit_is_made_to_fit(serve: Serve) -> None:
    engine = parrot(context=1200)
    url = serve(engine, store="memory")
    long = [user("x" * 500), {"role": "assistant", "content": "y" * 500}, user("z" * 300)]
    response = created(url, long, context_management=managed(600))
    assert [item["type"] for item in response["output"]] == ["compaction", "message"]
