"""Laws of what a response says: whatever the model does, the events fold to the items that are stored."""

import json
from collections.abc import Sequence
from itertools import count
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct, structs
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from dragoman.api.reply import LogprobSerializer, encode
from dragoman.api.responses.event_encoder import OutputBytes, ResponseEventEncoder
from dragoman.api.responses.tools import ToolRef
from dragoman.api.responses.writer import ItemOptions, ResponseWriter
from dragoman.engines.scripted import ByteTokenizer
from dragoman.errors import EngineFailed
from dragoman.mcp import CallResult
from dragoman.turns.choice_reader import TokenTable
from dragoman.types import Event, EventKind, FinishReason, TokenLogprob
from tests.support.responses import fold, numbers, payloads, texts

SDK: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
REFS = {
    "weather": ToolRef("function", "weather"),
    "files__read": ToolRef("function", "read", namespace="files"),
    "patch": ToolRef("custom", "patch"),
    "search": ToolRef("mcp", "search", server_label="web"),
    "web__delete": ToolRef("mcp", "delete", server_label="web"),
}
NEEDS_APPROVAL = frozenset({"web__delete"})


class Way(Struct, frozen=True):
    """How a response is asked for."""

    summary: bool
    seals: bool
    logprobs: bool
    obfuscates: bool
    token_ids: bool = False


class Round(Struct, frozen=True):
    """One turn of the model, and whether the calls that the server runs for it succeed."""

    events: list[Event]
    succeeds: bool

    @property
    def finish(self) -> FinishReason | None:
        return self.events[-1].finish


def logprobs(text: str) -> list[TokenLogprob]:
    return [TokenLogprob(byte, -0.5, ((byte, -0.5),)) for byte in text.encode()]


pieces = st.sampled_from(["a", " ", "\n", "wörld", '"', "{}", "\\"])
fragments = st.lists(pieces, min_size=1, max_size=4)
spoken: st.SearchStrategy[EventKind] = st.sampled_from(["text", "reasoning"])
says = st.tuples(spoken, fragments).map(
    lambda match: [Event(match[0], 0, text, logprobs=logprobs(text)) for text in match[1]]
)
calls = st.tuples(st.sampled_from([*REFS, "unknown"]), st.lists(pieces, max_size=3)).map(
    lambda call: [
        Event("call_open", 0, call[0], call_id=f"call_{call[0]}"),
        *(Event("call_arguments", 0, text) for text in call[1]),
        Event("call_close", 0),
    ]
)
said = st.lists(st.one_of(says, calls), max_size=6).map(lambda runs: [event for run in runs for event in run])
finishes: st.SearchStrategy[FinishReason] = st.sampled_from(["stop", "length", "abort", "error"])


def as_round(drawn: tuple[list[Event], FinishReason, bool, bool]) -> Round:
    events, finish, cut, succeeds = drawn
    # A model that is stopped may be in the middle of a call.
    kept = events[:-1] if cut and events else events
    error = EngineFailed("It broke.") if finish == "error" else None
    return Round([*kept, Event("finish", 0, finish=finish, error=error)], succeeds)


rounds = st.tuples(said, finishes, st.booleans(), st.booleans()).map(as_round)
ways = st.builds(Way, *[st.booleans()] * 4)


def writer_of(way: Way) -> ResponseWriter:
    ids = count()
    speller = LogprobSerializer(TokenTable(ByteTokenizer().pieces)) if way.logprobs else None
    seal = (lambda text: f"sealed {text}") if way.seals else None
    manner = ItemOptions(
        new_id=lambda start: f"{start}{next(ids)}",
        summary=way.summary,
        seal=seal,
        speller=speller,
        token_ids=way.token_ids,
    )
    writer = ResponseWriter(ResponseEventEncoder(obfuscates=way.obfuscates), manner)
    writer.refs, writer.needs_approval = REFS, NEEDS_APPROVAL.__contains__
    return writer


def written(writer: ResponseWriter, run: Sequence[Round], group: int = 1) -> bytes:
    """All bytes of a response of these rounds, whose events come in groups of a size."""
    data = b""
    for each in run:
        writer.begin_turn()
        for start in range(0, len(each.events), group):
            data += joined(writer.write(each.events[start : start + group]))
        if each.finish != "stop":
            break
        for call in writer.server_calls:
            done, item = call.complete(CallResult("42" if each.succeeds else "no", not each.succeeds))
            writer.add_item(call.item.item_encoder, item)
            data += done
    return data + joined(writer.abandon())


def joined(written: OutputBytes) -> bytes:
    return written if isinstance(written, bytes) else b"".join(written)


@given(ways, st.lists(rounds, max_size=3))
def test_the_events_fold_to_the_items(way: Way, run: list[Round]) -> None:
    writer = writer_of(way)
    events = payloads(written(writer, run))
    assert fold(events) == json.loads(encode(writer.items))


@given(ways, st.lists(rounds, max_size=3))
def test_events_are_numbered_without_a_gap(way: Way, run: list[Round]) -> None:
    events = payloads(written(writer_of(way), run))
    assert numbers(events) == list(range(len(events)))


@given(ways, st.lists(rounds, max_size=3), st.integers(2, 20))
def test_how_events_arrive_together_changes_nothing(way: Way, run: list[Round], group: int) -> None:
    one, other = writer_of(way), writer_of(way)
    alone, together = payloads(written(one, run)), payloads(written(other, run, group))
    assert one.items == other.items
    assert [without_padding(event) for event in alone] == [without_padding(event) for event in together]


def without_padding(event: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in event.items() if name != "obfuscation"}


@given(ways, st.lists(rounds, max_size=3))
def test_every_event_is_one_of_the_sdk(way: Way, run: list[Round]) -> None:
    for event in payloads(written(writer_of(way), run)):
        item = event.get("item", {})
        if item.get("type") == "mcp_call":
            # Newer SDKs have an object here, older ones a text.
            item["error"] = None
        SDK.validate_python(event)


@given(ways, rounds)
def test_everything_that_is_said_is_in_the_items(way: Way, run: Round) -> None:
    writer = writer_of(way)
    written(writer, [run])
    reasoning = [item for item in writer.items if item["type"] == "reasoning"]
    parts = [part["text"] for item in reasoning for part in item["summary" if way.summary else "content"]]
    assert "".join(parts) == "".join(event.text for event in run.events if event.kind == "reasoning")
    text = "".join(event.text for event in run.events if event.kind == "text")
    assert "".join(texts({"output": writer.items}).split()) == "".join(text.split())


@given(ways, st.lists(st.tuples(said, finishes), min_size=1, max_size=3), st.data())
def test_each_id_is_told_once_in_order(
    way: Way, drawn: list[tuple[list[Event], FinishReason]], data: st.DataObject
) -> None:
    """Also those of layout that is no message, and of markers."""
    sampled, run = count(), []
    for events, finish in drawn:
        for position in data.draw(st.lists(st.integers(0, len(events)), max_size=3)):
            events.insert(position, Event("unseen", 0))
        events.append(Event("finish", 0, finish=finish))
        for event in events:
            event.ids = [next(sampled) for _ in range(data.draw(st.integers(0, 2)))]
        run.append(Round(events, True))
    writer = writer_of(structs.replace(way, token_ids=True))
    items = [id_ for event in payloads(written(writer, run)) for id_ in event.get("token_ids", ())]
    heard = next((index for index, each in enumerate(run) if each.finish != "stop"), len(run) - 1)
    ids = [id_ for each in run[: heard + 1] for event in each.events for id_ in event.ids]
    # What is left is in the event that ends the response.
    assert items + writer.wire.ids == ids


@given(ways, rounds)
def test_a_turn_without_an_error_has_an_item(way: Way, run: Round) -> None:
    writer = writer_of(way)
    written(writer, [run])
    assert writer.items or run.finish == "error"


def turn(*events: Event, finish: FinishReason = "stop") -> list[Event]:
    return [*events, Event("finish", 0, finish=finish)]


PLAIN = Way(summary=False, seals=False, logprobs=False, obfuscates=False)
DELETE = (Event("call_open", 0, "web__delete", call_id="c"), Event("call_arguments", 0, "{}"))


def test_layout_between_items_is_no_message() -> None:
    writer = writer_of(PLAIN)
    thought, call = Event("reasoning", 0, "Hm."), Event("call_open", 0, "weather", call_id="c")
    events = turn(thought, Event("text", 0, "\n\n"), call, Event("call_close", 0), Event("text", 0, "\n"))
    written(writer, [Round(events, True)])
    assert [item["type"] for item in writer.items] == ["reasoning", "function_call"]


def test_layout_before_a_call_is_no_part_of_a_later_message() -> None:
    writer = writer_of(PLAIN)
    call = Event("call_open", 0, "weather", call_id="c")
    events = turn(Event("text", 0, "\n\n"), call, Event("call_close", 0), Event("text", 0, "Hi"))
    written(writer, [Round(events, True)])
    assert writer.items[1]["content"][0]["text"] == "Hi"


def test_layout_before_a_message_is_a_part_of_it() -> None:
    writer = writer_of(PLAIN)
    written(writer, [Round(turn(Event("text", 0, "\n"), Event("text", 0, "Hi")), True)])
    assert writer.items[0]["content"][0]["text"] == "\nHi"


def test_a_question_comes_only_when_it_is_whole() -> None:
    writer = writer_of(PLAIN)
    assert writer.write(list(DELETE)) == b""
    [added, done] = payloads(joined(writer.write([Event("call_close", 0)])))
    assert added["item"] == done["item"]
    assert (done["item"]["type"], done["item"]["arguments"]) == ("mcp_approval_request", "{}")
    assert writer.for_client


def test_a_question_that_was_cut_short_is_not_asked() -> None:
    writer = writer_of(PLAIN)
    written(writer, [Round(turn(*DELETE, finish="length"), True)])
    assert [item["type"] for item in writer.items] == ["message"]
    assert not writer.for_client


def test_a_call_of_the_server_that_was_cut_short_is_left_incomplete() -> None:
    writer = writer_of(PLAIN)
    open_call = Event("call_open", 0, "search", call_id="c")
    written(writer, [Round(turn(open_call, Event("call_arguments", 0, '{"q'), finish="length"), True)])
    [item] = writer.items
    assert (item["type"], item["status"], item["arguments"]) == ("mcp_call", "incomplete", '{"q')


def test_what_a_length_cuts_is_incomplete() -> None:
    writer = writer_of(PLAIN)
    written(writer, [Round(turn(Event("text", 0, "He"), finish="length"), True)])
    assert [item["status"] for item in writer.items] == ["incomplete"]


def test_a_later_turn_of_nothing_has_a_message_too() -> None:
    writer = writer_of(PLAIN)
    search = (Event("call_open", 0, "search", call_id="c"), Event("call_close", 0))
    written(writer, [Round(turn(*search), True), Round(turn(), True)])
    assert [item["type"] for item in writer.items] == ["mcp_call", "message"]


def test_padding_makes_fragments_of_one_size() -> None:
    way = Way(summary=False, seals=False, logprobs=False, obfuscates=True)
    events = turn(Event("text", 0, "a"), Event("text", 0, "longer"))
    deltas = [event for event in payloads(written(writer_of(way), [Round(events, True)])) if "delta" in event]
    assert len({len(event["delta"] + event["obfuscation"]) for event in deltas}) == 1
