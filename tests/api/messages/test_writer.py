"""Laws of what a message says: whatever the model does, the events fold to the whole, however cut."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dragoman.api.messages.blocks import ThinkingBlock, recall_thinking
from dragoman.api.messages.reply import MessageOptions, MessageWriter
from dragoman.api.reply import ReplyEnvelope
from dragoman.types import Event, Usage
from tests.api.messages.asking import seal, unseal

HEAD = ReplyEnvelope("msg_1", 0, "m", "f")
TEXTS = st.text(st.characters(codec="utf-8"), max_size=12)
INPUT = '{"city": "Paris", "n": [1, 2]}'
Part = tuple[str, str]


@st.composite
def parts(draw: st.DrawFn) -> list[Part]:
    """What a model does, one after another: no two texts, and no two thoughts, follow each other."""
    kinds = draw(st.lists(st.sampled_from(["text", "reasoning", "call"]), max_size=6))
    items: list[Part] = []
    for kind in kinds:
        if kind == "call" or not items or items[-1][0] != kind:
            items.append((kind, INPUT if kind == "call" else draw(TEXTS.filter(bool))))
    return items


def events_of(said: list[Part], sizes: list[int]) -> list[Event]:
    """The events of it, in pieces of these sizes."""
    events, calls = [], 0
    for kind, text in said:
        name = "call_arguments" if kind == "call" else kind
        if kind == "call":
            events.append(Event("call_open", 0, "look", call=calls, call_id=f"c{calls}"))
        at = 0
        for number in range(len(text)):
            if at >= len(text):
                break
            size = sizes[number % len(sizes)]
            events.append(Event(name, 0, text[at : at + size], call=calls))  # type: ignore[arg-type]
            at += size
        if kind == "call":
            events.append(Event("call_close", 0, call=calls))
            calls += 1
    return [*events, Event("finish", 0, finish="stop")]


def written(events: list[Event], *, keeps: bool, shown: bool = True) -> tuple[list[dict[str, Any]], Any]:
    """The payloads of a stream, and the whole message."""
    terms = MessageOptions(seal=seal, shows_thinking=shown)
    writer = MessageWriter(HEAD, terms, lambda: Usage(3, 4), keeps=keeps)
    raw = writer.opening() + b"".join(writer.write([event]) for event in events) + writer.end()
    payloads = [json.loads(each.partition(b"data: ")[2]) for each in raw.split(b"\n\n")[:-1]]
    return payloads, writer.whole()


def fold(payloads: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = payloads[0]["message"]
    open_at: int | None = None
    for event in payloads[1:]:
        match event["type"]:
            case "content_block_start":
                assert open_at is None and event["index"] == len(message["content"])
                open_at = event["index"]
                message["content"].append({**event["content_block"], "pieces": []})
            case "content_block_delta":
                assert event["index"] == open_at
                delta = {**event["delta"]}
                block = message["content"][-1]
                if delta.pop("type") == "input_json_delta":
                    block["pieces"].append(delta["partial_json"])
                else:
                    [(name, text)] = delta.items()
                    block[name] += text
            case "content_block_stop":
                assert event["index"] == open_at
                open_at = None
                pieces = message["content"][-1].pop("pieces")
                if message["content"][-1]["type"] == "tool_use":
                    message["content"][-1]["input"] = json.loads("".join(pieces) or "{}")
            case "message_delta":
                message |= {**event["delta"], "usage": event["usage"]}
    assert payloads[-1] == {"type": "message_stop"}
    return message


SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@given(parts(), SIZES, SIZES, st.booleans())
def test_events_fold_to_the_whole_however_they_are_cut(
    said: list[Part], sizes: list[int], others: list[int], shown: bool
) -> None:
    payloads, _ = written(events_of(said, sizes), keeps=False, shown=shown)
    _, whole = written(events_of(said, others), keeps=True, shown=shown)
    assert fold(payloads) == whole
    assert whole["content"]


@given(parts(), SIZES)
def test_nothing_that_was_said_is_lost(said: list[Part], sizes: list[int]) -> None:
    _, whole = written(events_of(said, sizes), keeps=True)
    value = "".join(block["text"] for block in whole["content"] if block["type"] == "text")
    texts = "".join(text for kind, text in said if kind == "text")
    assert value.split() == texts.split(), "but for layout between blocks"
    assert whole["stop_reason"] == ("tool_use" if any(kind == "call" for kind, _ in said) else "end_turn")


@given(parts(), SIZES, st.booleans())
def test_thinking_comes_back_as_it_was(said: list[Part], sizes: list[int], shown: bool) -> None:
    _, whole = written(events_of(said, sizes), keeps=True, shown=shown)
    blocks = [block for block in whole["content"] if block["type"] == "thinking"]
    thought = [
        recall_thinking(ThinkingBlock(block["thinking"], "thinking", block["signature"]), "", unseal)
        for block in blocks
    ]
    assert thought == [text for kind, text in said if kind == "reasoning"]
