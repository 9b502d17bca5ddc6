"""Guesses at what comes next, so that one step can give a sequence several tokens.

A pass over the weights costs as much as many rows in it. So where few sequences run, a sequence may add rows
for tokens it only guesses: those that followed when its two newest tokens last stood together, in its own
prompt and answer or else in other answers. That is often right where an answer repeats a prompt, a name or
itself, or says what models say often.

Nothing of what is said changes. Each row is chosen from as ever, and the next row counts only if the choice
was the guess.
"""

from collections.abc import Sequence as Ordered

import numpy as np

from dragoman.engines.choosing.arrays import Ids
from dragoman.engines.local.memory import Memory
from dragoman.engines.local.plan import Piece
from dragoman.engines.local.runner import Runner
from dragoman.engines.local.sequence import Namespace, Sequence

# How far one guess moves the trust in further ones; and the way back for who has stopped guessing.
_LEARNING, _FORGETTING = 0.2, 0.01
_UNKNOWN = 0.5
# Pairs of ids of which is known what followed, some megabytes of them.
_PHRASES = 1 << 15


class Guesser:
    def __init__(self, runner: Runner, memory: Memory, most: int) -> None:
        self._runner = runner
        self._memory = memory
        self._most = most if runner.pass_rows else 0
        self._phrases = Phrases(_PHRASES)

    def add_to(self, pieces: list[Piece]) -> None:
        """Add guesses to the pieces of a step, as long as a row is worth what it costs."""
        if not self._most:
            return
        rows = sum(piece.size for piece in pieces)
        outputs = self._runner.max_outputs - sum(piece.outputs for piece in pieces)
        room = min(outputs, self._runner.max_rows - rows)
        for piece in pieces:
            if piece.newest is None:
                continue
            worth = self._worth(piece.sequence.trust, rows)
            guesses = self._guess(piece, min(room, worth))
            piece.guess(guesses)
            rows += len(guesses)
            room -= len(guesses)

    def _worth(self, trust: float, rows: int) -> int:
        """How many guesses are likelier to be right than a row is dear.

        With a pass that costs as much as 16 rows, a row in a step of one takes a 17th more time, and one in a
        step of 32 as much as two thirds of what a token costs there.
        """
        count, likely = 0, trust
        while count < self._most and likely > rows / (rows + self._runner.pass_rows):
            count, rows, likely = count + 1, rows + 1, likely * trust
        return count

    def _guess(self, piece: Piece, most: int) -> list[int]:
        sequence, slot = piece.sequence, piece.sequence.slot
        assert slot is not None and piece.newest is not None
        # The last token of an answer needs no row of its own, and a context has an end.
        most = min(most, sequence.answer.left - 1, self._runner.context - piece.end)
        if most <= 0:
            return []
        # The newest token is not in memory yet, but its place among the ids is free.
        slot.ids[slot.length] = piece.newest
        known = slot.ids[: slot.length + 1]
        guesses = repeated(known, most)
        newest = [*known[-2:].tolist(), *guesses][-2:]
        guesses += self._phrases.after(slot.namespace, newest, most - len(guesses))
        return guesses if self._memory.extend(slot, piece.end + len(guesses)) else []

    def learn(self, piece: Piece, said: list[int], right: int) -> None:
        """Note what followed the newest token of a piece, of which so many ids had been guessed."""
        if not self._most:
            return
        sequence, slot = piece.sequence, piece.sequence.slot
        assert slot is not None and piece.newest is not None
        judge(sequence, len(piece.guesses), right)
        # Who shares no prefix with others does not share this either.
        if sequence.group.job.reuse_prefix:
            before = slot.ids[max(0, piece.start - 1) : piece.start].tolist()
            self._phrases.note(slot.namespace, [*before, piece.newest, *said])


class Phrases:
    """What followed two ids the last time, within a namespace; of all pairs, those noted last are kept."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._next: dict[tuple[Namespace, int, int], int] = {}

    def note(self, namespace: Namespace, ids: Ordered[int]) -> None:
        for first, second, third in zip(ids, ids[1:], ids[2:], strict=False):
            key = (namespace, first, second)
            self._next.pop(key, None)
            self._next[key] = third
            if len(self._next) > self._most:
                del self._next[next(iter(self._next))]

    def after(self, namespace: Namespace, newest: Ordered[int], most: int) -> list[int]:
        """At most so many ids that may follow the two newest."""
        found: list[int] = []
        if len(newest) < 2:
            return found
        first, second = newest
        while len(found) < most and (third := self._next.get((namespace, first, second))) is not None:
            found.append(third)
            first, second = second, third
        return found


def judge(sequence: Sequence, guessed: int, right: int) -> None:
    """Trust guesses more or less, after `right` of them were followed."""
    trust = sequence.trust
    if not guessed:
        trust += _FORGETTING * (_UNKNOWN - trust)
    for _ in range(right):
        trust += _LEARNING * (1 - trust)
    if right < guessed:
        trust -= _LEARNING * trust
    sequence.trust = trust


def repeated(known: Ids, most: int) -> list[int]:
    """What followed the last two ids when they last stood together: after `7 8 9 5 7 8`, `9 5 7 8`."""
    if known.size < 3:
        return []
    places = np.flatnonzero((known[1:-1] == known[-1]) & (known[:-2] == known[-2]))
    if not places.size:
        return []
    start = int(places[-1]) + 2
    found: list[int] = known[start : start + most].tolist()
    return found
