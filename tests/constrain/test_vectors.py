"""The shared vectors: schemas and grammars with texts that are in them, and texts that are not."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from dragoman.constrain.constraint import Constraint

ROOT = Path(__file__).parents[2]
VECTORS = ROOT.parent / "shared" / "vectors" / "constraints.jsonl"
Row = dict[str, Any]
ROWS: list[Row] = [json.loads(line) for line in VECTORS.read_text().splitlines()] if VECTORS.exists() else []
GROUPS = tomllib.loads((ROOT / "tests" / "corpus" / "disputed_constraints.toml").read_text())["disputed"]
EXCEPTED = {(group["row"], text) for group in GROUPS for text in group["texts"]}

needs_vectors = pytest.mark.skipif(not ROWS, reason="../shared/vectors is not here")


def constraint(row: Row) -> Constraint:
    if row["kind"] == "schema":
        return Constraint.from_json_schema(row["schema"])
    return Constraint.from_gbnf(row["grammar"])


def wrong(row: Row) -> set[str]:
    result = constraint(row)
    missed = {text for text in row["accept"] if not result.accepts(text)}
    return missed | {text for text in row["reject"] if result.accepts(text)}


@needs_vectors
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["desc"])
def test_row(row: Row) -> None:
    assert {(row["desc"], text) for text in wrong(row)} <= EXCEPTED


@needs_vectors
def test_exceptions_are_still_needed() -> None:
    assert {(row["desc"], text) for row in ROWS for text in wrong(row)} == EXCEPTED
