"""What the access log and the metrics say of turns."""

import asyncio
from typing import Any

from dragoman.errors import DragomanError
from dragoman.turns.turn import Turn
from dragoman.types import Usage


def note_usage(facts: dict[str, Any], usage: Usage) -> None:
    facts.update(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )


def note_turn(facts: dict[str, Any], turn: Turn) -> None:
    """Of several turns, how the last one ended."""
    usage = turn.usage
    now = asyncio.get_running_loop().time()
    note_usage(facts, usage)
    if turn.finishes and facts.get("finish") != "disconnect":
        reasons = {event.finish or "" for event in turn.finishes.values()}
        facts["finish"] = ",".join(sorted(reasons))
    for event in turn.finishes.values():
        if event.error is not None:
            # The text of a foreign exception may hold anything, so only our own words are logged.
            known = isinstance(event.error, DragomanError)
            facts["error"] = str(event.error) if known else "the engine failed"
    if turn.first_token_at is not None:
        facts.setdefault("ttft_ms", round((turn.first_token_at - turn.started_at) * 1000, 1))
        writing = now - turn.first_token_at
        if usage.completion_tokens > 1 and writing > 0:
            facts["tokens_per_s"] = round((usage.completion_tokens - 1) / writing, 1)
