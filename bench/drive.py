"""Jobs for an engine in this process, with nothing before it."""

import asyncio
from collections.abc import Sequence
from typing import Any

from dragoman.engines.protocol import CallbackEngine
from dragoman.types import Job, Step

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 0.8, top-p 0.95": {"temperature": 0.8, "top_p": 0.95},
}
"""How tokens are chosen."""


async def drive(engine: CallbackEngine, jobs: Sequence[Job]) -> None:
    """All at once, with nobody but a counter to hear what comes of them."""
    left = len(jobs)
    over = asyncio.Event()

    def sink(step: Step) -> None:
        nonlocal left
        left -= step.finish is not None
        if not left:
            over.set()

    for job in jobs:
        engine.submit(job, sink)
    await over.wait()
