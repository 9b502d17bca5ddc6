import json
from typing import Any

import pytest

from dragoman.api.chat.reply import ChatSerializer
from dragoman.api.reply import ChunkOptions, LogprobSerializer, ReplyEnvelope, StreamWriter
from dragoman.turns.choice_reader import TokenTable
from dragoman.types import Event, TokenLogprob, Usage

HEAD = ReplyEnvelope("id", 0, "model", "print")
PIECES = TokenTable([bytes([byte]) for byte in range(256)])
QUOTES = 'say "\\" \n é \x00'


def writer(*, token_ids: bool = False, logprobs: bool = False, **wanted: Any) -> StreamWriter:
    spelling = ChatSerializer(LogprobSerializer(PIECES), logprobs=logprobs, **wanted)
    options = ChunkOptions(token_ids=token_ids)
    return StreamWriter(HEAD, spelling, options, Usage, plain=not logprobs)


def choices(data: bytes) -> list[dict[str, Any]]:
    events = [line.removeprefix("data: ") for line in data.decode().split("\n\n") if line]
    return [json.loads(event)["choices"][0] for event in events]


def deltas(writer: StreamWriter, *events: Event) -> list[dict[str, Any]]:
    return [choice["delta"] for choice in choices(writer.write(events))]


@pytest.mark.parametrize(
    ("event", "delta"),
    [
        (Event("text", 0, QUOTES), {"content": QUOTES}),
        (Event("reasoning", 0, QUOTES), {"reasoning_content": QUOTES, "reasoning": QUOTES}),
        (
            Event("call_open", 0, "f", call=1, call_id="c"),
            {
                "tool_calls": [
                    {"index": 1, "id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}
                ]
            },
        ),
        (
            Event("call_arguments", 0, QUOTES, call=1),
            {"tool_calls": [{"index": 1, "function": {"arguments": QUOTES}}]},
        ),
    ],
)
@pytest.mark.parametrize("logprobs", [False, True])
def test_an_event_as_a_delta(event: Event, delta: dict[str, Any], logprobs: bool) -> None:
    assert deltas(writer(logprobs=logprobs), event) == [delta]


def test_fragments_of_several_calls_and_choices_stay_apart() -> None:
    events = [Event("call_arguments", choice, "x", call=call) for choice in range(2) for call in range(2)]
    written = choices(writer().write(events))
    assert [(c["index"], c["delta"]["tool_calls"][0]["index"]) for c in written] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]


def test_the_end_of_a_call_is_no_chunk() -> None:
    assert writer().write([Event("call_close", 0)]) == b""
    assert writer(token_ids=True, logprobs=True).write([Event("call_close", 0)]) == b""


def test_the_end_of_a_call_brings_its_ids() -> None:
    [choice] = choices(writer(token_ids=True).write([Event("call_close", 0, ids=[7])]))
    assert (choice["delta"], choice["token_ids"]) == ({}, [7])


def test_the_end_of_a_call_brings_its_log_probabilities() -> None:
    event = Event("call_close", 0, ids=[65], logprobs=[TokenLogprob(65, -1.0)])
    [choice] = choices(writer(logprobs=True).write([event]))
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["A"]


def test_reasoning_that_is_not_wanted_is_not_sent() -> None:
    assert writer(reasoning=False).write([Event("reasoning", 0, "hm", ids=[7])]) == b""


def test_ids_of_reasoning_that_is_not_wanted_are_sent() -> None:
    [choice] = choices(writer(reasoning=False, token_ids=True).write([Event("reasoning", 0, "hm", ids=[7])]))
    assert (choice["delta"], choice["token_ids"]) == ({}, [7])


@pytest.mark.parametrize(
    ("finish", "called", "reason"),
    [("stop", 0, "tool_calls"), ("length", 0, "length"), ("stop", 1, "stop")],
)
def test_finish_reason(finish: Any, called: int, reason: str) -> None:
    end = Event("finish", 0, finish=finish)
    written = choices(writer().write([Event("call_open", called, "f", call_id="c"), end]))
    assert written[-1]["finish_reason"] == reason


def test_a_call_for_a_client_that_knows_functions() -> None:
    events = [Event("call_open", 0, "f", call_id="c"), Event("call_arguments", 0, "{}")]
    end = Event("finish", 0, finish="stop")
    written = choices(writer(legacy=True).write([*events, end]))
    assert [choice["delta"] for choice in written] == [
        {"function_call": {"name": "f", "arguments": ""}},
        {"function_call": {"arguments": "{}"}},
        {},
    ]
    assert written[-1]["finish_reason"] == "function_call"


def test_a_custom_call_has_a_text() -> None:
    opened = Event("call_open", 0, "sql", call=0, call_id="c")
    written = deltas(writer(custom={"sql"}), opened, Event("call_arguments", 0, QUOTES, call=0))
    assert [delta["tool_calls"][0] for delta in written] == [
        {"index": 0, "id": "c", "type": "custom", "custom": {"name": "sql", "input": ""}},
        {"index": 0, "custom": {"input": QUOTES}},
    ]


def test_a_call_that_the_client_has_named_is_no_reason() -> None:
    opened, end = Event("call_open", 0, "f", call_id="c"), Event("finish", 0, finish="stop")
    for named, reason in ((False, "tool_calls"), (True, "stop")):
        assert choices(writer(named=named).write([opened, end]))[-1]["finish_reason"] == reason
