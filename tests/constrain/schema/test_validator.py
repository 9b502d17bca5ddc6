"""What is wrong with a value, said in words; and schemas that would take for ever to look at."""

import json
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.constrain.schema.validator import find_fault, find_json_fault
from dragoman.errors import ConstraintFailed
from tests.support.laws import examples, tried
from tests.support.random_schemas import schema, wrong_text

PLACE = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "pattern": "^[A-Z]"},
        "days": {"type": "integer", "maximum": 9},
    },
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('{"days": 3, "city": "Rome"}', None),
        ('{"days": 3}', "$.city is missing"),
        ('{"city": "rome"}', "$.city does not match the pattern ^[A-Z]"),
        ('{"city": "Rome", "days": 10}', "$.days is too large"),
        ('{"city": "Rome", "town": 1}', "$.town is not allowed"),
        ('{"city": 1}', "$.city is of type integer; it must be string"),
        ('```json\n{"city": "Rome"}\n```', "it is not JSON, or has other text beside the JSON"),
    ],
)
def test_the_first_fault_is_told(text: str, fault: str | None) -> None:
    assert find_json_fault(text, PLACE) == fault


def values(chance: Random, depth: int = 2) -> Any:
    """Some that fit what `random_schemas` makes, and more that do not."""
    if depth and chance.random() < 0.3:
        return [values(chance, depth - 1) for _ in range(chance.randint(0, 2))]
    return chance.choice(
        ["ab", "on", "ABC-1234", "red", "none", 7, -3, 1.0, 0.5, True, None, "2026-01-31", {}]
    )


@given(st.randoms(use_true_random=False))
@examples(200)
def test_it_says_what_another_validator_says(chance: Any) -> None:
    wanted = schema(chance)
    value = {name: values(chance) for name in wanted["properties"] if chance.random() < 0.9}
    text = json.dumps(value)
    tried(bool(value))
    fault = find_json_fault(text, wanted)
    # The other one knows only some of the formats.
    assert (fault is None) == (wrong_text(text, wanted) is None) or "format" in str(fault)


def test_ways_without_end_are_given_up() -> None:
    names = [f"d{number}" for number in range(40)]
    doubled = {name: {"allOf": [{"$ref": f"#/$defs/{next_}"}] * 2} for name, next_ in pairwise(names)}
    with pytest.raises(ConstraintFailed):
        find_fault(1, {"$ref": "#/$defs/d0", "$defs": {**doubled, names[-1]: {}}})


def test_an_expression_costs_no_more_than_it_may() -> None:
    assert find_fault("a" * 5000 + "b", {"pattern": "^(a+)+$"}) is not None
    many = {f"p{number}": {"pattern": f"^x{{{number},9999}}$"} for number in range(100)}
    with pytest.raises(ConstraintFailed):
        find_fault(dict.fromkeys(many, "x" * 100), {"properties": many})


def test_a_circle_is_given_up() -> None:
    with pytest.raises(ConstraintFailed):
        find_fault(1, {"$ref": "#"})


@pytest.mark.parametrize(
    "words", [{"required": [[]]}, {"type": [{}]}, {"enum": 1}, {"properties": []}, {"minItems": "x"}]
)
def test_words_that_make_no_sense_say_nothing(words: dict[str, Any]) -> None:
    assert find_fault({"a": []}, words) is None
