"""The test suite of JSON Schema, draft 2020-12: every schema of it is refused, or enforced in full.

`python -m tools.schema_suite` fetches it. No value that it calls invalid may be accepted, whatever happens.
What it calls valid is accepted, but for ways of writing that are left out on purpose; see `left_out`.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tools.schema_suite import SUITE

from dragoman.constrain.constraint import Constraint
from dragoman.constrain.schema.json_schema import with_type
from dragoman.constrain.schema.validator import find_fault
from dragoman.errors import BadRequest

pytestmark = pytest.mark.thorough

FILES = sorted(SUITE.rglob("*.json"))
SPELLINGS: tuple[tuple[str, str] | None, ...] = (None, (",", ":"))
FORMAT_FILES = ("format.json", "format-annotation.json")

needs_suite = pytest.mark.skipif(not FILES, reason="python -m tools.schema_suite was not run")


def groups(file: Path) -> Iterator[tuple[Constraint | None, dict[str, Any]]]:
    for group in json.loads(file.read_text()):
        try:
            yield Constraint.from_json_schema(group["schema"]), group
        except BadRequest:
            yield None, group


def left_out(group: dict[str, Any], data: Any) -> bool:
    """Valid values that an answer is never given, by design; docs/constraints.md names them all."""
    words, text = json.dumps(group["schema"]), json.dumps(data)
    meant = with_type(group["schema"])
    if isinstance(meant, dict) and meant != group["schema"]:
        kinds: dict[str, Any] = {"number": (int, float), "string": str, "object": dict, "array": list}
        other_type = '"$ref": "#"' in words or not isinstance(data, kinds[meant["type"]])
        return other_type or left_out({"schema": meant}, data)
    number_spelling = isinstance(data, float) or ".0" in text or "e+" in text
    order = "allOf" in words or '"const": {' in words or "dependen" in words
    return (
        number_spelling
        or (isinstance(data, dict) and order)
        or '"format"' in words
        or "\\u00" in text
        or "metaschema-no-validation" in words
    )


@needs_suite
@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SUITE)))
def test_nothing_fails_open(file: Path) -> None:
    wrong = []
    for constraint, group in groups(file):
        for test in group["tests"] if constraint else ():
            for spelling in SPELLINGS:
                text = json.dumps(test["data"], ensure_ascii=False, separators=spelling)
                accepted = constraint is not None and constraint.accepts(text)
                if accepted and not test["valid"]:
                    wrong.append(("accepted", group["schema"], text))
                if not accepted and test["valid"] and not left_out(group, test["data"]):
                    wrong.append(("rejected", group["schema"], text))
    assert wrong == []


@needs_suite
def test_most_of_it_is_enforced() -> None:
    """So that nothing is made green by being refused."""
    items = [constraint is not None for file in FILES for constraint, _ in groups(file)]
    assert sum(items) >= 260


@needs_suite
@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SUITE)))
def test_what_could_be_enforced_can_be_checked(file: Path) -> None:
    """Of schemas that are taken, where the engine cannot be held to them."""
    wrong = [
        (group["schema"], test["data"])
        for constraint, group in groups(file)
        for test in (group["tests"] if constraint else ())
        if (find_fault(test["data"], group["schema"]) is None) != test["valid"]
        and not any(word in json.dumps(group["schema"]) for word in ('"format"', "metaschema-no-validation"))
    ]
    assert wrong == []
