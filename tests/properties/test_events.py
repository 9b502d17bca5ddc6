"""The events of an answer follow a grammar, whatever the model wrote: rule for those who write them out."""

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.dialects.parser import Parser
from dragoman.dialects.registry import get_dialect
from dragoman.types import Event
from tests.support.dialects import NAMES, TOOLS, cut, soup
from tests.support.laws import examples


def events_of(name: str, seed: int) -> list[Event]:
    chance = random.Random(seed)
    parser = Parser(name, TOOLS, starts_in_reasoning=chance.random() < 0.3)
    events = [event for piece in cut(soup(get_dialect(name), chance), chance) for event in parser.feed(piece)]
    return events + parser.finish()


@pytest.mark.parametrize("name", NAMES)
@examples(20)
@given(seed=st.integers(0, 2**32))
def test_events_are_well_formed(name: str, seed: int) -> None:
    events = events_of(name, seed)
    opened = [event for event in events if event.kind == "call_open"]
    assert [event.call for event in opened] == list(range(len(opened)))
    assert len({event.call_id for event in opened}) == len(opened)
    current = -1
    for event in events:
        current += event.kind == "call_open"
        assert event.text or event.kind in ("call_open", "call_close")
        assert event.call == current or event.kind not in ("call_open", "call_arguments", "call_close")
    msgspec.json.encode(events)
