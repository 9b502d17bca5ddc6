import asyncio
import time
from collections.abc import Callable


def becomes(condition: Callable[[], bool]) -> bool:
    """Whether the condition comes true within a generous time."""
    deadline = time.monotonic() + 120
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


async def becomes_async(condition: Callable[[], bool]) -> None:
    """The same on an event loop; fails where it does not."""
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.002)
