"""Stop strings, found as they are written, however the text is cut.

One automaton per stop string, sent one character at a time. The first string to be complete wins; of two
complete at the same character, the longer.
"""

from collections.abc import Sequence
from functools import lru_cache

MOST_TABLES = 64
"""Those of one request: all its answers have the same."""


class StopFinder:
    def __init__(self, stops: Sequence[str], *, keep: bool = False) -> None:
        self._stops = sorted(stops, key=len, reverse=True)
        self._failures = [_failure_table(stop) for stop in self._stops]
        self._states = [0] * len(stops)
        self._first = frozenset(stop[0] for stop in stops)
        self._held = ""
        self._keep = keep

    def feed(self, text: str) -> tuple[str, str | None]:
        """`(text that is safe to show, the stop string that was met)`; the rest may yet become a stop."""
        if not self._held and self._first.isdisjoint(text):
            return text, None
        whole = self._held + text
        for position, char in enumerate(text, len(self._held) + 1):
            for number, stop in enumerate(self._stops):
                if self._advance(number, stop, char):
                    self._held = ""
                    return whole[: position if self._keep else position - len(stop)], stop
        keep_from = len(whole) - max(self._states)
        self._held = whole[keep_from:]
        return whole[:keep_from], None

    def flush(self) -> str:
        """At the end, what was held back is plain text after all."""
        held, self._held = self._held, ""
        return held

    def _advance(self, number: int, stop: str, char: str) -> bool:
        state, failure = self._states[number], self._failures[number]
        while state and stop[state] != char:
            state = failure[state - 1]
        if stop[state] == char:
            state += 1
        self._states[number] = state
        return state == len(stop)


@lru_cache(MOST_TABLES)
def _failure_table(stop: str) -> list[int]:
    """Knuth, Morris, Pratt: for each prefix, the length of its longest proper prefix that is a suffix too."""
    table = [0] * len(stop)
    length = 0
    for position in range(1, len(stop)):
        while length and stop[position] != stop[length]:
            length = table[length - 1]
        if stop[position] == stop[length]:
            length += 1
        table[position] = length
    return table
