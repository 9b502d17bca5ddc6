"""A measurement that cannot be trusted is an error, never a figure."""

import signal
import sys
from collections.abc import Callable


class BenchError(Exception):
    """What made a measurement worth nothing."""


def told(run: Callable[[], None]) -> int:
    """An exit code, after the error is told where there is one. Servers are stopped on SIGTERM, too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        run()
    except BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    return 0
