"""The table of words holds: what is called enforced is, and everything else is refused by its place."""

import json
from typing import Any

import pytest

from dragoman.constrain.constraint import Constraint
from dragoman.constrain.schema.keywords import KEYWORDS
from dragoman.errors import BadRequest
from tests.constrain.schema.keyword_samples import ENFORCED, PARTLY, REFUSED, Sample

SAMPLES = [(word, sample) for word, samples in ENFORCED.items() for sample in samples]


def shown(value: Any) -> str | None:
    return json.dumps(value)[:60] if not isinstance(value, str) else None


def test_every_word_has_samples() -> None:
    fates = {
        fate: {row.name for row in KEYWORDS.values() if row.handling == fate}
        for fate in ("enforced", "refused")
    }
    assert fates == {"enforced": set(ENFORCED), "refused": set(REFUSED)}


@pytest.mark.parametrize(
    ("word", "sample"), SAMPLES, ids=[f"{word}-{n}" for n, (word, _) in enumerate(SAMPLES)]
)
def test_enforced(word: str, sample: Sample) -> None:
    constraint = Constraint.from_json_schema(sample.schema)
    assert [text for text in sample.accepted if not constraint.accepts(text)] == []
    assert [text for text in sample.rejected if constraint.accepts(text)] == []


@pytest.mark.parametrize("word", REFUSED)
def test_refused(word: str) -> None:
    schema, pointer = REFUSED[word]
    with pytest.raises(BadRequest) as error:
        Constraint.from_json_schema({"properties": {"p": schema}}, "response_format.json_schema.schema")
    assert error.value.param == f"response_format.json_schema.schema#/properties/p{pointer}"


@pytest.mark.parametrize(("schema", "place"), PARTLY, ids=shown)
def test_refused_where_it_cannot_be_enforced(schema: Any, place: str) -> None:
    with pytest.raises(BadRequest) as error:
        Constraint.from_json_schema(schema, "schema")
    assert error.value.param == (f"schema#{place}" if place else "schema")
    assert error.value.status == 400


@pytest.mark.parametrize("word", [row.name for row in KEYWORDS.values() if row.handling == "note"])
def test_a_note_changes_nothing(word: str) -> None:
    schema = {"type": "integer", "x-mine" if word == "..." else word: "anything"}
    constraint = Constraint.from_json_schema(schema)
    assert constraint.accepts("5") and not constraint.accepts('"5"')


@pytest.mark.parametrize(
    "words",
    [
        {"unit": "cm"},
        {"widget": {"kind": "text"}, "placeholder": "a"},
        {"strict": True},
        {"required": True},
        {"required": False},
        {"ui:order": ["a"], "errorMessage": "no"},
    ],
    ids=shown,
)
def test_what_no_draft_knows_is_a_note(words: dict[str, Any]) -> None:
    schema = {"properties": {"a": {"type": "integer", **words}}, "required": ["a"], "strict": True}
    constraint = Constraint.from_json_schema(schema)
    assert constraint.accepts('{"a": 5}') and not constraint.accepts('{"a": "5"}')


@pytest.mark.parametrize("slip", ["minlength", "max_items", "requierd", "additionalproperties", "propertys"])
def test_a_slip_is_refused_with_what_was_meant(slip: str) -> None:
    with pytest.raises(BadRequest, match="did you mean"):
        Constraint.from_json_schema({"type": "object", slip: 1})


def test_words_that_mean_nothing_alone_are_left_out() -> None:
    for schema in ({"then": False}, {"if": False}, {"maxContains": 0}):
        assert Constraint.from_json_schema(schema).accepts("[1]")


def test_a_property_may_have_the_name_of_a_word() -> None:
    constraint = Constraint.from_json_schema(
        {"properties": {"not": {"type": "null"}, "$ref": {"type": "null"}}}
    )
    assert constraint.accepts('{"not": null, "$ref": null}') and not constraint.accepts('{"not": 1}')


def test_all_problems_are_counted() -> None:
    with pytest.raises(BadRequest, match="1 more"):
        Constraint.from_json_schema({"not": {}, "contains": {}})


def test_a_large_union_is_told_apart_by_its_tags() -> None:
    kinds = {f"k{n}": {"type": "object", "properties": {"k": {"const": f"k{n}"}}} for n in range(150)}
    schema = {"oneOf": [{"$ref": f"#/$defs/{kind}"} for kind in kinds], "$defs": kinds}
    with pytest.raises(BadRequest, match="may match at the same time"):
        Constraint.from_json_schema(schema)
    for kind in kinds.values():
        kind["required"] = ["k"]
    assert Constraint.from_json_schema(schema).accepts('{"k": "k149"}')
