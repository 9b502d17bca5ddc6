import time
from collections.abc import Callable


def becomes(condition: Callable[[], bool]) -> bool:
    """Whether the condition comes true within a generous time."""
    deadline = time.monotonic() + 120
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()
