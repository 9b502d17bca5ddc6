"""Coroutines that hardly ever wait, run without a task as long as they do not."""

import asyncio
import types
from collections.abc import Coroutine, Generator
from typing import Any


def begin(work: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
    """Run it until it waits for something; the rest is a task. None: it is over. What it raises is raised."""
    try:
        waits_for = work.send(None)
    except StopIteration:
        return None
    return asyncio.get_running_loop().create_task(_awaited(work, waits_for))


async def _awaited(begun: Coroutine[Any, Any, None], waits_for: Any) -> None:
    await _rest(begun, waits_for)


@types.coroutine
def _rest(begun: Coroutine[Any, Any, None], waits_for: Any) -> Generator[Any, Any, None]:
    """A coroutine that was begun by hand, and now waits for something, as one that a task can finish."""
    while True:
        answer = yield waits_for
        try:
            waits_for = begun.send(answer)
        except StopIteration:
            return
