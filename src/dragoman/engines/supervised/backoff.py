"""How long to wait before an engine that failed is opened again."""

WINDOW_S = 60.0
FREE = 5
MOST_S = 60.0


class Backoff:
    """Five failures in a row are answered at once; then each waits twice as long, up to a minute.

    An engine that has lived for a minute has a clean slate.
    """

    def __init__(self) -> None:
        self._failures = 0
        self._opened = 0.0

    def opened(self, now: float) -> None:
        self._opened = now

    def failed(self, now: float) -> float:
        """Seconds to wait."""
        if now - self._opened >= WINDOW_S:
            self._failures = 0
        self._failures += 1
        # Not below: a failed opening is a failure too, however long ago the last good one was.
        self._opened = now
        beyond = self._failures - FREE
        return min(MOST_S, 2.0 ** (beyond - 1)) if beyond > 0 else 0.0
