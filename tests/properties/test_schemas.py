"""Schemas at random: what fits one is accepted, and whatever is accepted fits it."""

import json
from typing import Any

import jsonschema
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from dragoman.constrain.constraint import Constraint
from dragoman.errors import BadRequest
from tests.constrain.walks import vocabulary, walk

KNOWN = vocabulary()
NAMES = st.sampled_from(["a", "b", "é", 'q"', "long name"])
TEXTS = st.text('ab é"\\\n/0', max_size=6)
SLOW = [HealthCheck.too_slow, HealthCheck.filter_too_much]


@st.composite
def strings(draw: st.DrawFn) -> dict[str, Any]:
    least = draw(st.integers(0, 3))
    schema: dict[str, Any] = {"type": "string", "minLength": least}
    return schema | draw(
        st.sampled_from([{}, {"maxLength": least + 2}, {"pattern": "^[ab]*$"}, {"title": "x"}])
    )


@st.composite
def numbers(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(["integer", "number"]))
    least = draw(st.integers(-50, 50))
    words = {"minimum": least, "exclusiveMaximum": least + draw(st.integers(5, 60))}
    some = draw(st.sets(st.sampled_from(sorted(words))))
    return (
        {"type": kind} | {word: words[word] for word in some} | draw(st.sampled_from([{}, {"multipleOf": 2}]))
    )


def lists(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(
        lambda items, least, more: {
            "type": "array",
            "items": items,
            "minItems": least,
            "maxItems": least + more,
        },
        inner,
        st.integers(0, 2),
        st.integers(0, 2),
    )


@st.composite
def objects(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    properties = draw(st.dictionaries(NAMES, inner, max_size=3))
    required = [name for name in properties if draw(st.booleans())]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": draw(st.sampled_from([False, True, {"type": "null"}])),
    }


LEAVES = st.one_of(
    strings(),
    numbers(),
    st.sampled_from(
        [{"type": "null"}, {"type": "boolean"}, {"const": {"k": [1]}}, {"type": ["string", "null"]}]
    ),
    st.lists(st.one_of(TEXTS, st.integers(-9, 99), st.none()), min_size=1, max_size=3).map(
        lambda v: {"enum": v}
    ),
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        lists(inner),
        objects(inner),
        st.lists(inner, min_size=1, max_size=3).map(lambda some: {"anyOf": some}),
    ),
    max_leaves=6,
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-99, 120), TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(NAMES, inner, max_size=3)),
    max_leaves=8,
)


def compiled(schema: Any) -> Constraint:
    try:
        return Constraint.from_json_schema(schema)
    except BadRequest:
        assume(False)
        raise


def fits(schema: Any, value: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


def ordered(schema: Any, value: Any) -> Any:
    """The value with properties in the order of the schema, where there is only one."""
    if isinstance(value, list):
        return [ordered(schema.get("items", {}), one) for one in value]
    if not isinstance(value, dict):
        return value
    named = schema.get("properties", {})
    names = [*(name for name in named if name in value), *(name for name in value if name not in named)]
    return {name: ordered(named.get(name, {}), value[name]) for name in names}


def ambiguous(schema: Any) -> bool:
    """More than one order may be meant."""
    return "anyOf" in json.dumps(schema) or "const" in json.dumps(schema)


@settings(max_examples=150, deadline=None, suppress_health_check=SLOW)
@given(SCHEMAS, st.integers(0, 10**6))
def test_whatever_the_masks_let_through_is_valid(schema: Any, seed: int) -> None:
    text = walk(compiled(schema), KNOWN, seed)
    if text is not None:
        assert fits(schema, json.loads(text)), text


@settings(max_examples=300, deadline=None, suppress_health_check=SLOW)
@given(SCHEMAS, VALUES)
def test_a_value_is_accepted_exactly_if_it_is_valid(schema: Any, value: Any) -> None:
    constraint, valid = compiled(schema), fits(schema, value)
    for separators in (None, (",", ":")):
        text = json.dumps(ordered(schema, value), ensure_ascii=False, separators=separators)
        if not valid:
            assert not constraint.accepts(text)
        elif not ambiguous(schema):
            assert constraint.accepts(text)


@settings(max_examples=150, deadline=None, suppress_health_check=SLOW)
@given(SCHEMAS, st.integers(0, 10**6), st.data())
def test_a_text_with_one_change_is_accepted_only_if_it_is_valid(
    schema: Any, seed: int, data: st.DataObject
) -> None:
    constraint = compiled(schema)
    text = walk(constraint, KNOWN, seed)
    assume(text)
    assert text is not None and constraint.accepts(text)
    at = data.draw(st.integers(0, len(text) - 1))
    changed = text[:at] + data.draw(st.sampled_from(["", "a", '"', "1", ",", "]", "null"])) + text[at + 1 :]
    if constraint.accepts(changed):
        assert fits(schema, json.loads(changed))
