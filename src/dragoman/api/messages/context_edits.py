"""Messages: context editing, which shortens a conversation before it is answered, and its report.

Old thinking and old tool results are removed from the messages. If the request asks for compaction, the whole
conversation becomes a summary: a block of the answer that later requests send back in place of the messages.
"""

from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from dragoman.api.messages.blocks import SUMMARY
from dragoman.api.messages.request import ContextEdit, EditAmount, ParsedMessagesRequest, spec
from dragoman.api.responses.history import ASK
from dragoman.turns.spec import TurnSpec
from dragoman.types import Message

CLEARED = "The result was left out to make room."
USUAL_TRIGGER, USUAL_KEPT = 100_000, 3
"""Defaults of clearing tool results: prompt tokens from which it starts, and how many recent results stay."""
COMPACT_TRIGGER = 150_000
Count = Callable[[ParsedMessagesRequest], int]
"""Returns the number of prompt tokens."""


class ContextEditResult(Struct, frozen=True):
    asked: ParsedMessagesRequest
    applied: list[dict[str, Any]] | None = None
    """The edits applied; None if the request asked for none."""
    compacts: ContextEdit | None = None
    """Set if the conversation is still too long: a summary is needed first."""


def apply_edits(asked: ParsedMessagesRequest, count: Count, context: int) -> ContextEditResult:
    """Apply the edits of a request in order; tokens are counted only if an edit depends on them.

    `context` is the context length of the model: triggers above three quarters of it apply there.
    """
    if not asked.request.edits:
        return ContextEditResult(asked)
    count = _count_once(count)
    applied: list[dict[str, Any]] = []
    compacts = None
    for each in asked.request.edits:
        if each.type == "compact_20260112":
            most = each.trigger.value if each.trigger else COMPACT_TRIGGER
            compacts = each if compacts or count(asked) > min(most, _nearly(context)) else None
            continue
        clear = _clear_thinking if each.type == "clear_thinking_20251015" else _clear_results
        shorter, number = clear(each, asked, count, context)
        if not number:
            continue
        tokens = max(count(asked) - count(shorter), 0)
        if each.clear_at_least is not None and tokens < each.clear_at_least.value:
            continue
        what = "cleared_thinking_turns" if clear is _clear_thinking else "cleared_tool_uses"
        applied.append({"type": each.type, what: number, "cleared_input_tokens": tokens})
        asked = shorter
    return ContextEditResult(asked, applied, compacts)


def _count_once(count: Count) -> Count:
    """Return `count` with a cache, so that no conversation is counted twice."""
    known: list[tuple[tuple[Message, ...], int]] = []

    def counted(asked: ParsedMessagesRequest) -> int:
        tokens_now = next((tokens for messages, tokens in known if messages is asked.messages), None)
        if tokens_now is None:
            tokens_now = count(asked)
            known.append((asked.messages, tokens_now))
        return tokens_now

    return counted


def _nearly(context: int) -> int:
    return context * 3 // 4


def _clear_thinking(
    wish: ContextEdit, asked: ParsedMessagesRequest, count: Count, context: int
) -> tuple[ParsedMessagesRequest, int]:
    if wish.keep == "all" or (isinstance(wish.keep, EditAmount) and wish.keep.type == "all"):
        return asked, 0
    kept = 1 if wish.keep is None else wish.keep.value
    turns = [number for number, each in enumerate(asked.messages) if each.reasoning]
    old = set(turns[: len(turns) - kept] if kept < len(turns) else ())
    shorter = tuple(
        replace(each, reasoning=None) if number in old else each for number, each in enumerate(asked.messages)
    )
    # Removed reasoning must not be restored from the server's cache.
    request = replace(asked.request, restore_reasoning="off") if old else asked.request
    return replace(asked, messages=shorter, request=request), len(old)


def _clear_results(
    wish: ContextEdit, asked: ParsedMessagesRequest, count: Count, context: int
) -> tuple[ParsedMessagesRequest, int]:
    calls = {call.id: call.name for each in asked.messages for call in each.tool_calls}
    excluded = set(wish.exclude_tools or ())
    uses = [each for each in asked.messages if each.role == "tool"]
    kept = wish.keep.value if isinstance(wish.keep, EditAmount) else USUAL_KEPT
    old = {
        each.tool_call_id
        for each in (uses[: len(uses) - kept] if kept < len(uses) else ())
        if calls.get(each.tool_call_id) not in excluded and each.content != CLEARED
    }
    trigger = wish.trigger or EditAmount("input_tokens", min(USUAL_TRIGGER, _nearly(context)))
    amount = len(uses) if trigger.type == "tool_uses" else (count(asked) if old else 0)
    if not old or amount <= trigger.value:
        return asked, 0
    inputs = wish.clear_tool_inputs
    emptied = {
        id_ for id_ in old if inputs is True or (isinstance(inputs, list) and calls.get(id_) in inputs)
    }
    return replace(asked, messages=tuple(_cleared(each, old, emptied) for each in asked.messages)), len(old)


def _cleared(message: Message, old: set[str | None], emptied: set[str | None]) -> Message:
    if message.role == "tool" and message.tool_call_id in old:
        return replace(message, content=CLEARED)
    if not any(call.id in emptied for call in message.tool_calls):
        return message
    calls = (replace(call, arguments="{}") if call.id in emptied else call for call in message.tool_calls)
    return replace(message, tool_calls=tuple(calls))


# Summaries.


def ask_summary(asked: ParsedMessagesRequest, instructions: str | None, most: int) -> TurnSpec:
    """Build the turn in which the model summarizes the conversation in at most `most` tokens."""
    question = Message(role="user", content=(instructions or "").strip() or ASK)
    request = replace(
        asked.request, tool_choice=None, output_config=None, output_format=None, stop_sequences=None
    )
    plain = replace(asked, request=request, messages=(*asked.messages, question))
    summary_spec = spec(plain)
    sampling = replace(summary_spec.sampling, max_tokens=most)
    return replace(
        summary_spec,
        sampling=sampling,
        parsing=summary_spec.parsing and replace(summary_spec.parsing, calls=False),
    )


def last_words(messages: Sequence[Message]) -> str:
    """Return the last user message, which the summary may omit but the answer needs."""
    value = next((each.content for each in reversed(messages) if each.role == "user"), None) or ""
    return value if isinstance(value, str) else "\n".join(part["text"] for part in value if "text" in part)


def write_summary(asked: ParsedMessagesRequest, summary: str) -> str:
    """Return the text that replaces the conversation."""
    last = last_words(asked.messages)
    return f"{summary}\n\nThe user said last:\n{last}" if last else summary


def with_summary(asked: ParsedMessagesRequest, summary: str) -> ParsedMessagesRequest:
    """Return the conversation as later requests will also send it."""
    kept = tuple(each for each in asked.messages if each.role == "system")
    return replace(asked, messages=(*kept, Message(role="user", content=SUMMARY + summary)))
