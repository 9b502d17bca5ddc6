"""What other servers' clients send is read as they mean it, named as ignored, or refused by its name."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from dragoman.api import completions as completion_bodies
from dragoman.api import embeddings
from dragoman.api.chat import request as chat_request
from dragoman.api.request_decoder import MOST_IGNORED, IgnoredFields
from dragoman.api.responses import request as response_request
from dragoman.errors import BadRequest, UnknownField, is_typo_of
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


def read(route: str, ignored: IgnoredFields | None = None, /, **fields: Any) -> Any:
    module: Any = {"chat": chat_request, "completions": completion_bodies}[route]
    return module.read(json.dumps({**BASES[route], **fields}).encode(), Limits(), ignored or IgnoredFields())


def spec(route: str, /, **fields: Any) -> TurnSpec:
    module: Any = {"chat": chat_request, "completions": completion_bodies}[route]
    turn_spec: TurnSpec = module.spec(read(route, **fields))
    return turn_spec


def refused(route: str, ignored: IgnoredFields | None = None, /, **fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        read(route, ignored, **fields)
    return caught.value


@pytest.mark.parametrize(("route", "row"), MEANT)
def test_a_field_means_what_others_mean(route: str, row: dict[str, Any]) -> None:
    asked, meant = row["fields"], row["as"]
    assert _without_places(spec(route, **asked)) == _without_places(spec(route, **meant))


def _without_places(turn_spec: TurnSpec) -> str:
    """But for the names of fields: which was set, and which a constraint came in."""
    text = repr(replace(turn_spec, chosen=frozenset()))
    for name in ("structured_outputs.json_object", "guided_json"):
        text = text.replace(name, "wanted")
    return text


@pytest.mark.parametrize(("route", "row"), [(route, row) for route, row in MEANT if "ignored" in row])
def test_what_has_no_effect_is_told(route: str, row: dict[str, Any]) -> None:
    ignored = IgnoredFields()
    read(route, ignored, **row["fields"])
    assert ignored.summary == row["ignored"]


@pytest.mark.parametrize("route", sorted(BASES))
@pytest.mark.parametrize("name", sorted(CORPUS["off"]))
def test_an_off_value_is_off(route: str, name: str) -> None:
    value = CORPUS["off"][name]
    plain = spec(route, max_tokens=150)
    turn_spec = spec(route, **{"max_tokens": 150, name: value})
    assert turn_spec.sampling == plain.sampling
    assert turn_spec.output_constraint is None


@pytest.mark.parametrize("route", sorted(BASES))
def test_all_off_values_together_are_nothing(route: str) -> None:
    turn_spec = spec(route, **CORPUS["off"])
    assert turn_spec.sampling == spec(route, max_tokens=150).sampling


@pytest.mark.parametrize("route", sorted(BASES))
@pytest.mark.parametrize("row", CORPUS["refused"], ids=lambda row: row["param"])
def test_what_would_change_the_answer_is_refused(route: str, row: dict[str, Any]) -> None:
    error = refused(route, **row["fields"])
    assert error.param == row["param"]
    if "hint" in row:
        assert f"Did you mean '{row['hint']}'?" in error.message


@pytest.mark.parametrize(("name", "other"), CORPUS["not_near"].items())
def test_a_hint_is_given_only_for_a_slip(name: str, other: str) -> None:
    assert not is_typo_of(name, other)


@pytest.mark.parametrize("row", CORPUS["messages"], ids=lambda row: row["from"])
def test_a_message_of_theirs_can_be_sent_back(row: dict[str, Any]) -> None:
    ignored = IgnoredFields("error")
    result = read("chat", ignored, messages=[row["message"]])
    meant = read("chat", messages=[row["as"]])
    assert chat_request.conversation(result) == chat_request.conversation(meant)
    assert ignored.summary == ""


@pytest.mark.parametrize("name", ["prefix", "partial"])
def test_a_last_message_may_say_that_it_goes_on(name: str) -> None:
    begun = {"role": "assistant", "content": "One,"}
    result = read("chat", messages=[{**begun, name: True}])
    assert chat_request.conversation(result).continue_final_message
    asked = {"role": "user", "content": "Go on."}
    later = read("chat", messages=[{**begun, name: True}, asked])
    assert not chat_request.conversation(later).continue_final_message


def test_unknown_fields_are_errors_where_the_operator_says_so() -> None:
    error = refused("chat", IgnoredFields("error"), colour="red")
    assert (error.param, error.code) == ("colour", "unknown_field")
    error = refused("chat", IgnoredFields("error"), messages=[{"role": "user", "content": "a", "colour": 1}])
    assert error.param == "messages[0].colour"


def test_a_field_of_many_messages_is_told_once() -> None:
    ignored = IgnoredFields()
    read("chat", ignored, messages=[{"role": "user", "content": "a", "colour": 1}] * 3)
    assert ignored.summary == "messages[].colour"


def test_too_many_unknown_fields_are_no_request() -> None:
    with pytest.raises(UnknownField):
        read("chat", **{f"field of mine {number}": 1 for number in range(MOST_IGNORED + 1)})


def test_a_header_has_no_letters_that_it_must_not_have() -> None:
    ignored = IgnoredFields()
    read("chat", ignored, **{"a\r\nset-cookie: b": 1})
    assert ignored.summary == "a??set-cookie??b"


def test_a_response_takes_the_same_names() -> None:
    ignored = IgnoredFields()
    fields = {"input": "hi", "max_new_tokens": 5, "keep_alive": 1, "think": False, "colour": 1}
    request = response_request.read(json.dumps(fields).encode(), Limits(), ignored)
    assert (request.max_output_tokens, request.enable_thinking) == (5, False)
    assert ignored.summary == "keep_alive, colour"


def test_a_response_without_a_bound() -> None:
    request = response_request.read(b'{"input": "hi", "max_output_tokens": -1}', Limits())
    assert request.max_output_tokens is None


def test_a_tool_of_a_response_may_have_more_than_we_know() -> None:
    tool = {"type": "function", "name": "f", "parameters": {}, "colour": 1, "cache_control": {}}
    ignored = IgnoredFields()
    response_request.read(json.dumps({"input": "hi", "tools": [tool]}).encode(), Limits(), ignored)
    assert ignored.summary == "tools[].colour"


def test_embeddings_too() -> None:
    ignored = IgnoredFields()
    body = b'{"input": "a", "input_type": "query", "truncate": "NONE", "normalize": true, "colour": 1}'
    embeddings.read_embedding(body, Limits(), ignored)
    assert ignored.summary == "input_type, colour"
    with pytest.raises(BadRequest) as caught:
        embeddings.read_embedding(b'{"input": "a", "truncate": "END"}', Limits(), ignored)
    assert caught.value.param == "truncate"
