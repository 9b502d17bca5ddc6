"""Turns in a dialect of their own: what is read, what is counted, and where an answer is cut."""

import pytest

from dragoman.dialects.declarations import Dialect, JsonCalls, ReasoningSyntax
from dragoman.engines.scripted import END_ID, ByteTokenizer, Script, ScriptedEngine, say
from dragoman.turns.spec import ParseOptions
from dragoman.types import Sampling
from tests.support.flat import flat
from tests.support.turns import answers_of, events_of, spec

HERMES = Dialect(
    name="test",
    models="",
    reasoning=ReasoningSyntax(),
    calls=(JsonCalls(open=("<tool_call>\n",), close=("\n</tool_call>",), between="\n"),),
)
MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
F = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
G = F.replace('"f"', '"g"')
READ = ParseOptions()


def special_tokenizer() -> ByteTokenizer:
    """One in which the dialect's markers are special tokens."""
    tokenizer = ByteTokenizer(MARKERS)
    first = len(tokenizer.pieces) - len(MARKERS)
    tokenizer.special_ids = {**tokenizer.special_ids, **{text: first + n for n, text in enumerate(MARKERS)}}
    return tokenizer


def ids_of(*parts: str) -> list[int]:
    """Text as bytes, markers as their ids."""
    special = special_tokenizer().special_ids
    return flat([special[part]] if part in special else part.encode() for part in parts)


@pytest.mark.parametrize("burst", [1, 3, 1000])
def test_a_call_between_texts(burst: int) -> None:
    engine = ScriptedEngine(say(f"Well: {F} Done.", burst=burst))
    [answer] = answers_of(engine, spec(parsing=READ), HERMES)
    assert [(call.name, call.arguments) for call in answer.calls] == [("f", '{"a": 1}')]
    assert answer.text.split() == ["Well:", "Done."]


def test_ids_and_log_probabilities_survive_whole() -> None:
    text = f"<think>\nhm\n</think>\n\nWell: {F}\n{G}"
    sampling = Sampling(max_tokens=1000, logprobs=0)
    events = events_of(ScriptedEngine(say(text)), spec(parsing=READ, sampling=sampling), HERMES)
    assert flat(event.ids for event in events) == [*text.encode(), END_ID]
    assert [e.id for event in events for e in event.logprobs or ()] == [*text.encode(), END_ID]


def test_without_a_reading_all_is_text() -> None:
    [answer] = answers_of(ScriptedEngine(say(F)), spec(), HERMES)
    assert (answer.text, answer.calls) == (F, [])


def test_calls_that_are_not_wanted_are_text() -> None:
    [answer] = answers_of(ScriptedEngine(say(F)), spec(parsing=ParseOptions(calls=False)), HERMES)
    assert (answer.text, answer.calls) == (F, [])


def test_reasoning_that_is_not_wanted_apart_is_text() -> None:
    engine = ScriptedEngine(say("<think>hm</think>yes"))
    [answer] = answers_of(engine, spec(parsing=ParseOptions(reasoning=False)), HERMES)
    assert (answer.text, answer.reasoning) == ("<think>hm</think>yes", "")


def test_markers_that_are_special_tokens_are_known_by_id() -> None:
    ids = ids_of("<think>", "hm", "</think>", "Well", "<tool_call>", '{"name": "f"}', "</tool_call>")
    engine = ScriptedEngine(Script([*ids, END_ID]), tokenizer=special_tokenizer())
    [answer] = answers_of(engine, spec(parsing=READ), HERMES)
    assert (answer.reasoning, answer.text) == ("hm", "Well")
    assert [call.name for call in answer.calls] == ["f"]
    assert answer.ids == [*ids, END_ID]


def test_text_cannot_forge_a_marker_that_is_a_special_token() -> None:
    engine = ScriptedEngine(say(F), tokenizer=special_tokenizer())
    [answer] = answers_of(engine, spec(parsing=READ), HERMES)
    assert (answer.text, answer.calls) == (F, [])


@pytest.mark.parametrize("reading", [READ, ParseOptions(calls=False), ParseOptions(reasoning=False), None])
@pytest.mark.parametrize("first", ["<think>", "</think>", "<tool_call>", "</tool_call>"])
def test_special_tokens_never_leak(reading: ParseOptions | None, first: str) -> None:
    ids = ids_of("a", first, "b", "<tool_call>", "c", "</tool_call>", "d", "</think>", "e", "<think>")
    engine = ScriptedEngine(Script([*ids, END_ID]), tokenizer=special_tokenizer())
    [answer] = answers_of(engine, spec(parsing=reading), HERMES)
    assert not any(marker in answer.text + answer.reasoning for marker in MARKERS)
    (answer.text + answer.reasoning).encode()


@pytest.mark.parametrize(("calls", "text"), [(False, "a<tool_call>b"), (True, "ab")])
def test_special_tokens_are_shown_on_demand_where_they_mark_nothing(calls: bool, text: str) -> None:
    ids = ids_of("a", "<tool_call>", "b")
    engine = ScriptedEngine(Script([*ids, END_ID]), tokenizer=special_tokenizer())
    asked = spec(parsing=ParseOptions(calls=calls), skip_special_tokens=False)
    [answer] = answers_of(engine, asked, HERMES)
    assert answer.text == text


def test_a_stop_string_is_met_in_the_text_around_calls() -> None:
    [answer] = answers_of(ScriptedEngine(say(f"{F} and STOP so")), spec(parsing=READ, stop=("STOP",)), HERMES)
    assert (answer.text.strip(), answer.stop, len(answer.calls)) == ("and", "STOP", 1)


def test_an_answer_of_at_most_one_call_ends_where_the_second_begins() -> None:
    engine = ScriptedEngine(say(f"{F}\n{G} and more"))
    [answer] = answers_of(engine, spec(parsing=ParseOptions(most_calls=1)), HERMES)
    assert [call.name for call in answer.calls] == ["f"]
    assert (answer.finish, answer.stop, answer.text) == ("stop", None, "")
    assert engine.live == 0


@pytest.mark.parametrize("burst", [1, 1000])
def test_the_cut_behind_one_call_loses_no_id(burst: int) -> None:
    engine = ScriptedEngine(say(f"{F}\n{G} and more", burst=burst))
    [answer] = answers_of(engine, spec(parsing=ParseOptions(most_calls=1)), HERMES)
    seen = f"{F}\n{G}".encode()[: len(answer.ids)]
    assert answer.ids == list(seen)


def test_text_behind_the_only_call_stays() -> None:
    [answer] = answers_of(ScriptedEngine(say(f"{F} Done.")), spec(parsing=ParseOptions(most_calls=1)), HERMES)
    assert answer.text.strip() == "Done."
