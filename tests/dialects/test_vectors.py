"""The shared vectors: outputs of models with the answer that is in them."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from dragoman.dialects.declarations import starts_in_reasoning
from dragoman.dialects.parser import Parser
from dragoman.dialects.registry import get_dialect
from dragoman.types import Answer, Event, fold

ROOT = Path(__file__).parents[2]
VECTORS = ROOT.parent / "shared" / "vectors" / "formats.jsonl"
Row = dict[str, Any]
ROWS: list[Row] = [json.loads(line) for line in VECTORS.read_text().splitlines()] if VECTORS.exists() else []
GROUPS = tomllib.loads((ROOT / "tests" / "corpus" / "disputed.toml").read_text())["disputed"]
DISPUTED = {row for group in GROUPS for row in group["rows"]}

needs_vectors = pytest.mark.skipif(not ROWS, reason="../shared/vectors is not here")


def prefill(row: Row) -> str:
    """What the request had already written of the answer, as the model would have written it."""
    dialect, options, expected = get_dialect(row["format"]), row["options"], row["expect"]["reasoning"]
    begun, part = options["messages"][-1], options["continue_final_message"]
    if dialect.channels is not None:
        reasoning, text, _ = dialect.channels.written
        if part == "reasoning":
            return reasoning.partition("{body}")[0] + str(begun["reasoning"])
        before = reasoning.format(body=begun["reasoning"]) + dialect.channels.start[0] if reasoning else ""
        return before + text.partition("{body}")[0] + str(begun["content"])
    if dialect.reasoning is None or not expected:
        return str(begun["content"])
    opened = dialect.reasoning.open[0] + begun["reasoning"]
    return str(opened if part == "reasoning" else opened + dialect.reasoning.close[0] + begun["content"])


def events(row: Row, *, calls: bool) -> list[Event]:
    needs, dialect, text = row["needs"], get_dialect(row["format"]), row["text"]
    reasoning = "reasoning_off" not in needs and row["options"].get("reasoning_format") != "none"
    prompt = row["generation_prompt"] or ""
    opened = starts_in_reasoning(dialect, prompt)
    starts = "starts_in_reasoning" in needs or (opened and "generation_prompt_opens_reasoning" in needs)
    if "prefill" in needs:
        starts, text = False, prefill(row) + text
    elif not reasoning and dialect.reasoning and opened and dialect.reasoning.close[0].strip() in text:
        # Where markers stay in the text, the one that the prompt wrote is put back before it.
        text = dialect.reasoning.open[0] + text
    parser = Parser(
        dialect, row["tools"], starts, calls=calls, reasoning=reasoning, json_answer="json_schema" in needs
    )
    return parser.feed(text) + parser.finish()


def same_text(one: str | None, other: str | None) -> bool:
    """References differ in what whitespace they keep at the ends, within one format even."""
    return (one or "").strip() == (other or "").strip()


def differs(field: str, row: Row, said: list[Event]) -> bool:
    answer, expected = fold(said), row["expect"]
    if field == "reasoning":
        return not same_text(answer.reasoning, expected["reasoning"])
    if field != "content":
        return not same_calls(field, row, answer)
    # A reference that parses calls alone has reasoning in its content.
    shown = "".join(event.text for event in said if event.kind in ("text", "reasoning"))
    others = [shown] if row["kind"] == "tool" else []
    return not any(same_text(text, expected["content"]) for text in [answer.text, *others])


def same_calls(field: str, row: Row, answer: Answer) -> bool:
    expected = row["expect"]["tool_calls"] or []
    if [call.name for call in answer.calls] != [call["name"] for call in expected]:
        return False
    if field == "tool_names":
        return True
    arguments = [json.loads(call.arguments) for call in answer.calls]
    if field == "tool_calls":
        return arguments == [call["arguments"] for call in expected]
    return all(
        at(arguments[int(number)], path) == wanted
        for number, paths in row["argument_paths"].items()
        for path, wanted in paths
    )


def at(value: Any, path: list[str]) -> Any:
    for step in path:
        value = value[step]
    return value


def passes(row: Row) -> bool:
    calls = row["kind"] != "reasoning" and "tool_choice_none" not in row["needs"]
    # References that parse reasoning alone either leave calls as text or stop at them.
    modes = [False, True] if row["kind"] == "reasoning" else [calls]
    return any(
        not any(differs(field, row, result) for field in row["asserted"])
        for result in (events(row, calls=mode) for mode in modes)
    )


@needs_vectors
@pytest.mark.parametrize("row", [row for row in ROWS if row["id"] not in DISPUTED], ids=lambda row: row["id"])
def test_the_answer_is_the_expected_one(row: Row) -> None:
    assert passes(row)


@needs_vectors
@pytest.mark.parametrize("row", [row for row in ROWS if row["id"] in DISPUTED], ids=lambda row: row["id"])
def test_what_is_disputed_is_still_different(row: Row) -> None:
    assert not passes(row)


@needs_vectors
def test_every_disputed_row_exists() -> None:
    assert {row["id"] for row in ROWS} >= DISPUTED
