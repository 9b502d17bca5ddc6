"""Every dialect by example: what a model wrote, and what it means. The examples are in tests/corpus/dialects.

A file of the corpus goes with a file of the catalog. A case says what it `shows`, the `text` of the model,
and what is expected: `says` is the text for the reader, `thinks` the reasoning, and `calls` a list of
[name, arguments] or [name, arguments, id], arguments to the byte. Besides, `tools` gives the properties of
tools by name, `schemas` their whole schemas, and `options` go to the parser as they are.
"""

import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dragoman.dialects import catalog
from dragoman.dialects.parser import Parser
from dragoman.dialects.registry import list_dialects
from dragoman.types import Answer, fold
from tests.support.dialects import tool

CORPUS = Path(__file__).parent.parent / "corpus" / "dialects"
FIELDS = {"shows", "text", "says", "thinks", "calls", "tools", "schemas", "options"}
CASES: list[tuple[str, dict[str, Any]]] = [
    (dialect, case)
    for file in sorted(CORPUS.glob("*.toml"))
    for dialect, cases in tomllib.loads(file.read_text(encoding="utf-8")).items()
    for case in cases
]


def tools_of(case: dict[str, Any]) -> list[dict[str, Any]]:
    tools = [tool(name, **properties) for name, properties in case.get("tools", {}).items()]
    schemas = case.get("schemas", {}).items()
    return tools + [{"function": {"name": name, "parameters": schema}} for name, schema in schemas]


def read(dialect: str, case: dict[str, Any], size: int) -> Answer:
    parser = Parser(dialect, tools_of(case), **case.get("options", {}))
    text = case["text"]
    events = [event for at in range(0, len(text), size) for event in parser.feed(text[at : at + size])]
    return fold(events + parser.finish())


def told(answer: Answer, expected: list[list[str]]) -> tuple[str, str, list[list[str | None]]]:
    """The answer as a case states it: with the ids that the case names, and not those that are made up."""
    calls = [[call.name, call.arguments, call.id] for call in answer.calls]
    sizes = [len(call) for call in expected] + [2] * len(calls)
    return answer.text, answer.reasoning, [call[:size] for call, size in zip(calls, sizes, strict=False)]


@pytest.mark.parametrize("size", [0, 1, 3], ids=["whole", "ones", "threes"])
@pytest.mark.parametrize(
    ("dialect", "case"), CASES, ids=[f"{dialect}: {case['shows']}" for dialect, case in CASES]
)
def test_example(dialect: str, case: dict[str, Any], size: int) -> None:
    expected = case.get("calls", [])
    parts = told(read(dialect, case, size or len(case["text"]) + 1), expected)
    assert parts == (case.get("says", ""), case.get("thinks", ""), expected)


@pytest.mark.parametrize("dialect", list_dialects())
def test_every_dialect_has_examples(dialect: str) -> None:
    assert Counter(name for name, _ in CASES)[dialect] >= 5


def test_every_file_of_the_catalog_has_a_file_of_examples() -> None:
    families = {Path(path).stem for folder in catalog.__path__ for path in Path(folder).glob("[a-z]*.py")}
    assert {file.stem for file in CORPUS.glob("*.toml")} == families


def test_cases_have_known_fields_and_different_names() -> None:
    assert {field for _, case in CASES for field in case} <= FIELDS
    assert not [name for name, count in Counter((d, c["shows"]) for d, c in CASES).items() if count > 1]
