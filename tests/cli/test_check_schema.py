import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from dragoman.cli import main

Capture = pytest.CaptureFixture[str]


def file_of(folder: Path, schema: Any) -> str:
    file = folder / "schema.json"
    file.write_text(schema if isinstance(schema, str) else json.dumps(schema))
    return str(file)


def test_an_enforceable_schema(tmp_path: Path, capsys: Capture) -> None:
    assert main(["check-schema", file_of(tmp_path, {"type": "object", "uniqueItems": False})]) == 0
    assert "enforceable" in capsys.readouterr().out


def test_every_word_that_is_not_enforced_is_named_with_its_place(tmp_path: Path, capsys: Capture) -> None:
    schema = {"properties": {"a/b": {"not": {}}, "c": {"type": "string", "pattern": "\\bx"}}}
    assert main(["check-schema", file_of(tmp_path, schema)]) == 1
    out = capsys.readouterr().out
    assert "#/properties/a~1b/not" in out and "#/properties/c/pattern" in out


def test_for_machines(tmp_path: Path, capsys: Capture) -> None:
    assert main(["check-schema", "--json", file_of(tmp_path, {"contains": {}})]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["enforceable"] is False and [one["place"] for one in result["problems"]] == ["#/contains"]


def test_a_text(tmp_path: Path, capsys: Capture) -> None:
    file = file_of(tmp_path, {"type": "integer"})
    assert main(["check-schema", "--text", "5", file]) == 0
    assert main(["check-schema", "--text", "x", file]) == 1
    assert "not accepted" in capsys.readouterr().out


def test_standard_input(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"true")))
    assert main(["check-schema", "-"]) == 0


@pytest.mark.parametrize(
    ("text", "code", "word"), [("{", 1, "JSON"), ("[" * 9999, 1, "deep"), (None, 2, "read")]
)
def test_what_cannot_be_read(tmp_path: Path, capsys: Capture, text: str | None, code: int, word: str) -> None:
    file = str(tmp_path / "none.json") if text is None else file_of(tmp_path, text)
    assert main(["check-schema", file]) == code
    assert word in capsys.readouterr().err
