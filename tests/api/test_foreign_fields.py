"""What other servers' clients send is read as they mean it, named as ignored, or refused by its name."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from dragoman.api import completions as completion_bodies
from dragoman.api import vectors
from dragoman.api.chat import request as chat_request
from dragoman.api.read import MOST_IGNORED, Ignored
from dragoman.api.responses import request as response_request
from dragoman.errors import BadRequest, UnknownField, is_near
from dragoman.limits import Limits
from dragoman.turns.spec import TurnSpec

CORPUS: dict[str, Any] = json.loads((Path(__file__).parent.parent / "corpus" / "requests.json").read_text())
BASES: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "hi"}]},
    "completions": {"prompt": "hi"},
}
MEANT: list[tuple[str, dict[str, Any]]] = [
    (route, row) for row in CORPUS["means"] for route in ([row["route"]] if "route" in row else BASES)
]


def read(route: str, ignored: Ignored | None = None, /, **fields: Any) -> Any:
    module: Any = {"chat": chat_request, "completions": completion_bodies}[route]
    return module.read(json.dumps({**BASES[route], **fields}).encode(), Limits(), ignored or Ignored())


def spec(route: str, /, **fields: Any) -> TurnSpec:
    module: Any = {"chat": chat_request, "completions": completion_bodies}[route]
    made: TurnSpec = module.spec(read(route, **fields))
    return made


def refused(route: str, ignored: Ignored | None = None, /, **fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        read(route, ignored, **fields)
    return caught.value


@pytest.mark.parametrize(("route", "row"), MEANT)
def test_a_field_means_what_others_mean(route: str, row: dict[str, Any]) -> None:
    asked, meant = row["fields"], row["as"]
    assert _without_places(spec(route, **asked)) == _without_places(spec(route, **meant))


def _without_places(made: TurnSpec) -> str:
    """But for the names of fields: which was set, and which a constraint came in."""
    text = repr(replace(made, chosen=frozenset()))
    for name in ("structured_outputs.json_object", "guided_json"):
        text = text.replace(name, "wanted")
    return text


@pytest.mark.parametrize(("route", "row"), [(route, row) for route, row in MEANT if "ignored" in row])
def test_what_has_no_effect_is_told(route: str, row: dict[str, Any]) -> None:
    ignored = Ignored()
    read(route, ignored, **row["fields"])
    assert ignored.told == row["ignored"]


@pytest.mark.parametrize("route", sorted(BASES))
@pytest.mark.parametrize("name", sorted(CORPUS["off"]))
def test_an_off_value_is_off(route: str, name: str) -> None:
    value = CORPUS["off"][name]
    plain = spec(route, max_tokens=150)
    made = spec(route, **{"max_tokens": 150, name: value})
    assert made.sampling == plain.sampling
    assert made.wanted is None


@pytest.mark.parametrize("route", sorted(BASES))
def test_all_off_values_together_are_nothing(route: str) -> None:
    made = spec(route, **CORPUS["off"])
    assert made.sampling == spec(route, max_tokens=150).sampling


@pytest.mark.parametrize("route", sorted(BASES))
@pytest.mark.parametrize("row", CORPUS["refused"], ids=lambda row: row["param"])
def test_what_would_change_the_answer_is_refused(route: str, row: dict[str, Any]) -> None:
    error = refused(route, **row["fields"])
    assert error.param == row["param"]
    if "hint" in row:
        assert f"Did you mean '{row['hint']}'?" in error.message


@pytest.mark.parametrize(("name", "other"), CORPUS["not_near"].items())
def test_a_hint_is_given_only_for_a_slip(name: str, other: str) -> None:
    assert not is_near(name, other)


@pytest.mark.parametrize("row", CORPUS["messages"], ids=lambda row: row["from"])
def test_a_message_of_theirs_can_be_sent_back(row: dict[str, Any]) -> None:
    ignored = Ignored("error")
    made = read("chat", ignored, messages=[row["message"]])
    meant = read("chat", messages=[row["as"]])
    assert chat_request.conversation(made) == chat_request.conversation(meant)
    assert ignored.told == ""


@pytest.mark.parametrize("name", ["prefix", "partial"])
def test_a_last_message_may_say_that_it_goes_on(name: str) -> None:
    begun = {"role": "assistant", "content": "One,"}
    made = read("chat", messages=[{**begun, name: True}])
    assert chat_request.conversation(made).continue_final_message
    asked = {"role": "user", "content": "Go on."}
    later = read("chat", messages=[{**begun, name: True}, asked])
    assert not chat_request.conversation(later).continue_final_message


def test_unknown_fields_are_errors_where_the_operator_says_so() -> None:
    error = refused("chat", Ignored("error"), colour="red")
    assert (error.param, error.code) == ("colour", "unknown_field")
    error = refused("chat", Ignored("error"), messages=[{"role": "user", "content": "a", "colour": 1}])
    assert error.param == "messages[0].colour"


def test_a_field_of_many_messages_is_told_once() -> None:
    ignored = Ignored()
    read("chat", ignored, messages=[{"role": "user", "content": "a", "colour": 1}] * 3)
    assert ignored.told == "messages[].colour"


def test_too_many_unknown_fields_are_no_request() -> None:
    with pytest.raises(UnknownField):
        read("chat", **{f"field of mine {number}": 1 for number in range(MOST_IGNORED + 1)})


def test_a_header_has_no_letters_that_it_must_not_have() -> None:
    ignored = Ignored()
    read("chat", ignored, **{"a\r\nset-cookie: b": 1})
    assert ignored.told == "a??set-cookie??b"


def test_a_response_takes_the_same_names() -> None:
    ignored = Ignored()
    fields = {"input": "hi", "max_new_tokens": 5, "keep_alive": 1, "think": False, "colour": 1}
    made = response_request.read(json.dumps(fields).encode(), Limits(), ignored)
    assert (made.max_output_tokens, made.enable_thinking) == (5, False)
    assert ignored.told == "keep_alive, colour"


def test_a_response_without_a_bound() -> None:
    made = response_request.read(b'{"input": "hi", "max_output_tokens": -1}', Limits())
    assert made.max_output_tokens is None


def test_a_tool_of_a_response_may_have_more_than_we_know() -> None:
    tool = {"type": "function", "name": "f", "parameters": {}, "colour": 1, "cache_control": {}}
    ignored = Ignored()
    response_request.read(json.dumps({"input": "hi", "tools": [tool]}).encode(), Limits(), ignored)
    assert ignored.told == "tools[].colour"


def test_embeddings_too() -> None:
    ignored = Ignored()
    body = b'{"input": "a", "input_type": "query", "truncate": "NONE", "normalize": true, "colour": 1}'
    vectors.read_embedding(body, Limits(), ignored)
    assert ignored.told == "input_type, colour"
    with pytest.raises(BadRequest) as caught:
        vectors.read_embedding(b'{"input": "a", "truncate": "END"}', Limits(), ignored)
    assert caught.value.param == "truncate"
