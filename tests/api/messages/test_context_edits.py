"""Edits that make a conversation shorter before it is answered."""

from typing import Any

import pytest

from dragoman.api.messages.context_edits import CLEARED, ContextEditResult, apply_edits
from dragoman.api.messages.request import ParsedMessagesRequest
from tests.api.messages.asking import TOOL, USER, asked

CONTEXT = 1_000_000


def talk(turns: int) -> list[dict[str, Any]]:
    """So many turns of thinking, a call and its result."""
    messages: list[dict[str, Any]] = [USER]
    for turn in range(turns):
        thought = {"type": "thinking", "thinking": f"Thought {turn}.", "signature": ""}
        call = {"type": "tool_use", "id": f"t{turn}", "name": "look", "input": {"city": "Rome"}}
        result = {"type": "tool_result", "tool_use_id": f"t{turn}", "content": f"Result {turn}."}
        messages += [{"role": "assistant", "content": [thought, call]}, {"role": "user", "content": [result]}]
    return messages


def edited(turns: int, *edits: dict[str, Any], context: int = CONTEXT) -> ContextEditResult:
    request = asked(*talk(turns), tools=[TOOL], context_management={"edits": edits})
    return apply_edits(request, letters, context)


def letters(request: ParsedMessagesRequest) -> int:
    texts = [f"{each.content}{each.reasoning or ''}" for each in request.messages]
    return sum(map(len, texts)) + sum(
        len(call.arguments) for each in request.messages for call in each.tool_calls
    )


def thoughts(result: ContextEditResult) -> list[str]:
    return [each.reasoning for each in result.asked.messages if each.reasoning]


def results(result: ContextEditResult) -> list[Any]:
    return [each.content for each in result.asked.messages if each.role == "tool"]


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        (None, 1),
        ({"type": "thinking_turns", "value": 2}, 2),
        ({"type": "thinking_turns", "value": 9}, 3),
        ("all", 3),
        ({"type": "all"}, 3),
    ],
)
def test_old_thinking_is_left_out(keep: Any, kept: int) -> None:
    result = edited(3, {"type": "clear_thinking_20251015", **({"keep": keep} if keep else {})})
    assert thoughts(result) == [f"Thought {turn}." for turn in range(3)][3 - kept :]
    assert result.applied is not None
    assert sum(each["cleared_thinking_turns"] for each in result.applied) == 3 - kept
    assert sum(each["cleared_input_tokens"] for each in result.applied) == (3 - kept) * len("Thought 0.")


USES: dict[str, Any] = {"type": "clear_tool_uses_20250919", "trigger": {"type": "tool_uses", "value": 2}}
KEEP = {"keep": {"type": "tool_uses", "value": 1}}


def test_old_results_are_left_out() -> None:
    result = edited(5, {**USES, **KEEP})
    assert results(result) == [CLEARED] * 4 + ["Result 4."]
    assert result.applied is not None
    assert [each["cleared_tool_uses"] for each in result.applied] == [4]


@pytest.mark.parametrize(
    "wish",
    [
        {**USES, "trigger": {"type": "tool_uses", "value": 5}},
        {**USES, "trigger": {"type": "input_tokens", "value": 10_000}},
        {**USES, "keep": {"type": "tool_uses", "value": 5}},
        {**USES, "exclude_tools": ["look"]},
        {**USES, "clear_at_least": {"type": "input_tokens", "value": 10_000}},
    ],
)
def test_results_stay_where_the_edit_says_so(wish: dict[str, Any]) -> None:
    result = edited(5, wish)
    assert results(result) == [f"Result {turn}." for turn in range(5)]
    assert result.applied == []


def test_what_was_asked_of_tools_is_left_out_too() -> None:
    result = edited(3, {**USES, **KEEP, "clear_tool_inputs": True})
    calls = [call.arguments for each in result.asked.messages for call in each.tool_calls]
    assert calls == ["{}", "{}", '{"city":"Rome"}']


def test_a_summary_is_made_of_what_is_too_long() -> None:
    wish = {"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 50}}
    assert edited(1, wish).compacts is None
    assert edited(9, wish).compacts is not None
    assert edited(9, {"type": "compact_20260112"}).compacts is None
    assert edited(9, {"type": "compact_20260112"}, context=100).compacts is not None


def test_without_edits_nothing_is_counted() -> None:
    def count(request: ParsedMessagesRequest) -> int:
        raise AssertionError("Nobody asked.")

    assert apply_edits(asked(), count, CONTEXT) == ContextEditResult(asked())
