"""The engine's own ids in a response: each once, in order, whatever the model writes."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.http.conftest import RunningServer
from tests.support.parrot import call
from tests.support.responses import created, streamed

TOOLS = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
pieces = st.lists(
    st.sampled_from(["Hello. ", "<think>\nhm\n</think>\n", "\n\n", call("f", a=1), "ö", call("g")]),
    max_size=5,
)


WANTED: dict[str, Any] = {"tools": TOOLS, "return_token_ids": True, "store": False}


@given(said=pieces)
def test_the_ids_of_all_events_are_those_of_the_engine(parrot: RunningServer, said: list[str]) -> None:
    events = streamed(parrot.url, "".join(said) or "-", **WANTED)
    items = [id_ for event in events for id_ in event.get("token_ids", [])]
    (turn,) = events[-1]["response"]["turns"]
    assert items == turn["token_ids"]
    assert turn["prompt_token_ids"] == list(parrot.engine.jobs[-1].prompt)


def test_ids_are_told_only_to_those_who_ask(parrot: RunningServer) -> None:
    assert "token_ids" not in json.dumps(streamed(parrot.url, "Hello."))


def test_log_probabilities_are_aligned(parrot: RunningServer) -> None:
    response = created(parrot.url, "Hello.", include=["message.output_text.logprobs"], **WANTED)
    (turn,) = response["turns"]
    assert len(turn["logprobs"]) == len(turn["token_ids"])
