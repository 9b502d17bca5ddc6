"""Streams of several kinds of servers, to events and trees."""

from typing import Any

import pytest

from dragoman.client.errors import BrokenStreamError, StreamError
from dragoman.client.events import (
    AnswerTree,
    CallEnd,
    CallPart,
    CallStart,
    FinishEvent,
    MarkerTokens,
    OtherEvent,
    StreamEvent,
    TextDelta,
    TextPart,
    Token,
    UsageEvent,
)
from dragoman.client.request import CHAT, RESPONSES
from dragoman.types import ToolCall, Usage
from tests.client.recorded import LLAMA_SERVER, STREAMS, chat, responses, sse
from tests.client.support import KEY, read, reading_of


def tree(name: str) -> AnswerTree:
    path, data = STREAMS[name]
    reading = reading_of(path)
    read(reading, [data])
    [answer] = reading.fold.answers
    return answer


def events(*choices: dict[str, object]) -> list[StreamEvent]:
    return read(reading_of(CHAT), [sse(*chat(*choices))])


def test_openai_calls() -> None:
    assert tree("openai-calls").calls == [
        ToolCall(id="call_a", name="look", arguments='{"place": "}\\"Ö"}'),
        ToolCall(id="call_b", name="now", arguments="{}"),
    ]


def test_a_call_is_handed_over_before_the_next_begins() -> None:
    path, data = STREAMS["openai-calls"]
    items = [type(event) for event in read(reading_of(path), [data])]
    assert items.index(CallEnd) < len(items) - 1 - items[::-1].index(CallStart)


def test_vllm_ids_are_in_the_tree() -> None:
    answer = tree("vllm-chat")
    assert answer.parts == [
        TextPart("reasoning", "Hmm.", [Token(10), Token(11, "Hm"), Token(12, "m.")]),
        TextPart("text", "Hi", [Token(13), Token(14, "Hi"), Token(15)]),
    ]
    assert answer.ids == [10, 11, 12, 13, 14, 15]


def test_vllm_logprobs_by_id() -> None:
    answer = tree("vllm-completions")
    assert (answer.text, answer.finish, answer.stop) == (" the", "stop", 2)
    alternatives = [Token(20, "", -0.5), Token(21, "", -1.5)]
    assert answer.parts[0].tokens == [
        Token(20, " the", -0.5, alternatives),
        Token(2, "", -0.25, [Token(2, "", -0.25)]),
    ]


def test_llama_server_divides_the_text_between_tokens() -> None:
    answer = tree("llama-server")
    assert answer.reasoning == "So"
    assert [(token.id, token.text, token.logprob) for token in answer.tokens] == [
        (5, "Gr", -0.1),
        (6, "üß", -0.2),
    ]


def test_openai_responses() -> None:
    path, data = STREAMS["openai-responses"]
    reading = reading_of(path)
    items = read(reading, [data])
    [answer] = reading.fold.answers
    assert answer.parts == [
        TextPart("reasoning", "Hm."),
        TextPart("text", "Hi", [Token(None, "Hi", -0.5)]),
        CallPart("call_a", "look", '{"a":1}', True),
    ]
    assert reading.fold.usage == Usage(4, 6, 1, 2)
    assert isinstance(items[0], OtherEvent) and items[0].name == "response.created"
    assert items[-1] == FinishEvent(reason="tool_calls")


def test_usage_of_chat() -> None:
    path, data = STREAMS["vllm-chat"]
    assert read(reading_of(path), [data])[-1] == UsageEvent(Usage(7, 5, 3, 0))


def test_tokens_without_text_are_told() -> None:
    items = events({"delta": {}, "token_ids": [4]}, {"delta": {"content": "a"}, "token_ids": [5]})
    assert items == [MarkerTokens("", [Token(4)]), TextDelta("a", [Token(5, "a")])]


def test_logprobs_that_do_not_fit_the_ids_are_left_out() -> None:
    spelled = {"content": [{"token": "a", "logprob": -1.0}]}
    assert events({"delta": {"content": "ab"}, "token_ids": [4, 5], "logprobs": spelled}) == [
        TextDelta("ab", [Token(4), Token(5, "ab")])
    ]


def calls_of(*deltas: dict[str, object], finish: str = "tool_calls") -> list[StreamEvent]:
    choices: list[dict[str, object]] = [{"delta": {"tool_calls": [delta]}} for delta in deltas]
    return [e for e in events(*choices, {"delta": {}, "finish_reason": finish}) if isinstance(e, CallEnd)]


def done(number: int, id: str, name: str, arguments: str) -> CallEnd:
    return CallEnd(value=ToolCall(id=id, name=name, arguments=arguments), call=number)


def test_calls_that_share_an_index_are_told_apart_by_their_ids() -> None:
    calls = calls_of(
        {"index": 0, "id": "a", "function": {"name": "f", "arguments": "{}"}},
        {"index": 0, "id": "b", "function": {"name": "g", "arguments": "{}"}},
    )
    assert calls == [done(0, "a", "f", "{}"), done(1, "b", "g", "{}")]


def test_calls_without_an_index() -> None:
    calls = calls_of(
        {"id": "a", "function": {"name": "f", "arguments": '{"x":'}},
        {"function": {"arguments": "1}"}},
        {"id": "b", "function": {"name": "g", "arguments": {"y": 2}}},
    )
    assert calls == [done(0, "a", "f", '{"x":1}'), done(1, "b", "g", '{"y":2}')]


def test_a_custom_call_ends_with_the_next() -> None:
    items = events(
        {"delta": {"tool_calls": [{"index": 0, "id": "a", "custom": {"name": "f", "input": "{}"}}]}},
        {"delta": {"tool_calls": [{"index": 0, "custom": {"input": "more"}}]}},
        {"delta": {"tool_calls": [{"index": 1, "id": "b", "function": {"name": "g"}}]}},
    )
    assert items[-2:] == [done(0, "a", "f", "{}more"), CallStart(id="b", name="g", call=1)]


def test_a_call_that_is_cut_short_is_not_handed_over() -> None:
    cut = {"index": 0, "id": "a", "function": {"name": "f", "arguments": '{"x'}}
    assert calls_of(cut, finish="length") == []
    assert calls_of(cut, finish="stop") == [done(0, "a", "f", '{"x')]


def test_a_call_that_goes_on_behind_its_end_is_an_error() -> None:
    with pytest.raises(BrokenStreamError, match="continue after their end"):
        calls_of(
            {"index": 0, "id": "a", "function": {"name": "f", "arguments": "{}"}},
            {"index": 0, "function": {"arguments": '{"x":1}'}},
        )


def test_a_legacy_call() -> None:
    items = events({"delta": {"function_call": {"name": "f", "arguments": "{}"}}})
    assert CallEnd(value=ToolCall(id=None, name="f", arguments="{}"), call=0) in items


def test_a_server_that_does_not_stream() -> None:
    body = (
        b'{"choices": [{"index": 0, "message": {"role": "assistant", "content": "Hi", "tool_calls": '
        b'[{"id": "a", "function": {"name": "f", "arguments": "{}"}}, {"id": "b", "function": {"name": "g", '
        b'"arguments": "{}"}}]}, "finish_reason": "tool_calls"}], "usage": {"prompt_tokens": 1}}'
    )
    reading = reading_of(CHAT, "application/json")
    read(reading, [body[:30], body[30:]])
    [answer] = reading.fold.answers
    assert (answer.text, [call.name for call in answer.calls], answer.finish) == (
        "Hi",
        ["f", "g"],
        "tool_calls",
    )


def test_an_end_mark_is_not_needed_after_the_finish() -> None:
    read(reading_of(CHAT), [LLAMA_SERVER.removesuffix(b"data: [DONE]\n\n")])


def test_a_stream_that_ends_before_its_answer_is_an_error() -> None:
    with pytest.raises(BrokenStreamError, match="ended before the answer") as caught:
        read(reading_of(CHAT), [sse(*chat({"delta": {"content": "Hi"}}), done=False)])
    assert (caught.value.context.chunk, caught.value.context.request_id) == (1, "req_1")


def test_what_is_behind_the_end_mark_is_of_no_interest() -> None:
    assert read(reading_of(CHAT), [sse(*chat({"delta": {"content": "a"}})), b"data: rubbish\n\n"]) == [
        TextDelta("a")
    ]


@pytest.mark.parametrize(
    "data",
    [
        b'data: {"error": {"message": "It broke.", "type": "server_error", "code": 500}}\n\n',
        b'data: {"error": "It broke."}\n\n',
        b'event: error\ndata: {"message": "It broke."}\n\n',
        b'event: error\ndata: {"type": "error", "error": {"message": "It broke."}}\n\n',
    ],
)
def test_a_failure_inside_of_a_stream(data: bytes) -> None:
    with pytest.raises(StreamError, match="It broke"):
        read(reading_of(CHAT), [data])


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("error", {"message": "It broke.", "code": "server_error", "param": None}),
        ("response.failed", {"response": {"error": {"code": "server_error", "message": "It broke."}}}),
    ],
)
def test_a_failure_inside_of_a_response(name: str, fields: dict[str, object]) -> None:
    with pytest.raises(StreamError, match="It broke") as caught:
        read(reading_of(RESPONSES), [responses((name, fields))])
    assert caught.value.code == "server_error"


@pytest.mark.parametrize(
    "data", [b"data: <html>\n\n", b'data: {"choices": 3}\n\n', b"data: \xff\n\n", b"data: NaN\n\n"]
)
def test_what_cannot_be_read_is_shown(data: bytes) -> None:
    with pytest.raises(BrokenStreamError, match="cannot be read") as caught:
        read(reading_of(CHAT), [sse(*chat({"delta": {"content": "a"}}), done=False), data])
    assert caught.value.context.chunk == 2
    assert caught.value.context.beginning == data[6:-2].decode("utf-8", "replace")


def test_a_key_that_the_server_repeats_is_hidden() -> None:
    with pytest.raises(BrokenStreamError) as caught:
        read(reading_of(CHAT), [f"data: your key {KEY}\n\n".encode()])
    assert KEY not in str(caught.value)


def test_an_incomplete_response_says_why() -> None:
    end = {"response": {"incomplete_details": {"reason": "max_output_tokens"}}}
    assert read(reading_of(RESPONSES), [responses(("response.incomplete", end))]) == [
        FinishEvent(reason="length")
    ]


def test_ids_of_a_response_that_have_no_text_are_told() -> None:
    items = read(
        reading_of(RESPONSES),
        [
            responses(
                ("response.mcp_call_arguments.delta", {"output_index": 0, "delta": "{}", "token_ids": [3]}),
                ("response.output_text.delta", {"output_index": 1, "delta": "", "token_ids": [4]}),
                ("response.output_text.delta", {"output_index": 1, "delta": "a", "token_ids": [5]}),
                ("response.output_text.done", {"output_index": 1, "text": "a"}),
                ("response.completed", {"token_ids": [6]}),
            )
        ],
    )
    spoken = [one for one in items if isinstance(one, TextDelta | MarkerTokens)]
    assert spoken == [
        MarkerTokens("", [Token(3)]),
        MarkerTokens("", [Token(4)]),
        TextDelta("a", [Token(5, "a")]),
        MarkerTokens("", [Token(6)]),
    ]


def test_calls_of_a_response_without_places() -> None:
    """llama-server names them by their call ids alone."""
    items: list[tuple[str, dict[str, Any]]] = []
    for name in ("f", "g"):
        item = {"type": "function_call", "call_id": f"fc_{name}", "name": name, "status": "in_progress"}
        items += [
            ("response.output_item.added", {"item": item}),
            ("response.function_call_arguments.delta", {"item_id": f"fc_{name}", "delta": "{}"}),
            ("response.output_item.done", {"item": {**item, "status": "completed", "arguments": "{}"}}),
        ]
    done_ = [
        e
        for e in read(reading_of(RESPONSES), [responses(*items, ("response.completed", {}))])
        if isinstance(e, CallEnd)
    ]
    assert done_ == [done(0, "fc_f", "f", "{}"), done(1, "fc_g", "g", "{}")]


def test_texts_that_come_only_whole() -> None:
    items = read(
        reading_of(RESPONSES),
        [
            responses(
                ("response.output_text.done", {"output_index": 0, "text": "Hi"}),
                (
                    "response.output_item.done",
                    {
                        "output_index": 1,
                        "item": {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "x"},
                    },
                ),
                ("response.completed", {}),
            )
        ],
    )
    assert items[0] == TextDelta("Hi")
    assert items[-2] == CallEnd(value=ToolCall(id="c", name="f", arguments="x"), call=0)
