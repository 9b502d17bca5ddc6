import json
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from dragoman.turns.choice_reader import CustomCallReader, InputUnwrapper
from dragoman.types import Event
from tests.support.dialects import cut


@given(st.text(), st.booleans(), st.randoms())
def test_however_it_is_cut_the_text_comes_out(text: str, ascii_only: bool, chance: Random) -> None:
    written = json.dumps({"input": text}, ensure_ascii=ascii_only)
    reader = InputUnwrapper()
    assert "".join(reader.feed(piece) for piece in cut(written, chance)) == text


def test_half_a_pair_is_no_character() -> None:
    assert InputUnwrapper().feed('{"input": "a\\ud83d b"}') == "a\ufffd b"
    reader = InputUnwrapper()
    assert [reader.feed(part) for part in ('{"input":"\\ud83d', "\\ude", '00!"}')] == ["", "", "😀!"]


class ScriptedReader:
    """A reader that says what it is told to."""

    waiting = 0

    def feed(self, text: str) -> list[Event]:
        return [
            Event("call_open", 0, "sql", call=0),
            Event("call_arguments", 0, '{"input": ', call=0),
            Event("call_arguments", 0, '"SELECT 1"}', call=0),
            Event("call_open", 0, "f", call=1),
            Event("call_arguments", 0, '{"input": "x"}', call=1),
        ]

    def finish(self) -> list[Event]:
        return []


def test_only_the_calls_of_custom_tools_are_unquoted() -> None:
    events = CustomCallReader(ScriptedReader(), {"sql"}).feed("")
    assert [event.text for event in events] == ["sql", "SELECT 1", "f", '{"input": "x"}']
