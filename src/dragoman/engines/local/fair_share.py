"""Fair sharing between owners: each owner with jobs has an equal share of slots, steps and rows.

Rules of this file:
- A slot goes to the owner with the fewest, and among an owner's sequences to the first in the order of
  service.
- If no slot is free, the owner with the most gives one up to an owner with at least two fewer: its last
  sequence is preempted. So no owner waits for another's long answers, and slots do not move back and forth.
- If there are more owners than slots, a sequence is preempted when it has had its turn.
- While several owners come and go, no step is long.
- Time is shared between owners first, and only then between kinds of work: time that an owner's prompts and
  embeddings take, the others get as well before it has more. They take as long as many steps.
- Answers do not stand still for long while prompts are prefilled beside them (`PrefillPacer`).
- Background work (`is_background`) gets what is left: it comes after all other work, and is preempted by it.
- An owner whose next prompt does not fit in memory blocks the others only if nothing of its own runs.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Set
from typing import TypeVar

from dragoman.engines.local.kv_cache import KVCache
from dragoman.engines.local.sequence import ScheduledTokens, Sequence, by_owner
from dragoman.engines.protocol import is_background
from dragoman.types import Adapters

_T = TypeVar("_T", str, Adapters)

TURN = 64
"""Tokens of an answer that make up a turn, if owners have to take turns; more after a long prompt."""


def pick_victim(running: list[Sequence]) -> Sequence:
    """Pick the sequence to preempt: the last in the order of service, of the owner with the most
    sequences; background work first.
    """
    counts = Counter(sequence.owner for sequence in running)
    return max(running, key=lambda one: (is_background(one.owner), counts[one.owner], one.order))


CROWDED_S = 10.0
"""Seconds after the last change of owners for which steps stay short."""


class SlotAssignment:
    """One round of giving slots to waiting sequences; `step_back` preempts a running one."""

    def __init__(
        self,
        memory: KVCache,
        running: list[Sequence],
        waiting: list[Sequence],
        step_back: Callable[[Sequence], None],
    ) -> None:
        self._memory = memory
        self._running = running
        self._waiting = by_owner(waiting)
        self._counts = Counter(sequence.owner for sequence in running)
        self._step_back = step_back
        self.placed: set[Sequence] = set()

    def give(self) -> None:
        while self._waiting:
            owner = min(self._waiting, key=lambda one: (is_background(one), self._counts[one]))
            if not self._place_next(owner):
                if self._memory.full and not self._counts[owner]:
                    return
                del self._waiting[owner]

    def _place_next(self, owner: str) -> bool:
        """Place one of an owner's sequences; return whether one got a slot. Sequences that wait for a
        prefix do not block the rest.
        """
        mine = self._waiting[owner]
        self._memory.full = False
        while mine and not self._memory.full:
            sequence = mine.pop(0)
            if sequence.is_blocked() or sequence.group.shown.waits or self._memory.must_wait(sequence):
                continue
            if not self._memory.idle and not self._make_way(owner):
                return False
            if self._place(sequence):
                self.placed.add(sequence)
                self._counts[owner] += 1
                return True
        return False

    def _place(self, sequence: Sequence) -> bool:
        while not self._memory.allocate(sequence):
            if not self._memory.full or not self._make_way(sequence.owner):
                return False
            self._memory.full = False
        return True

    def _make_way(self, owner: str) -> bool:
        """Preempt a sequence of another owner, if the rules allow it; return whether one was."""
        others = [one for one in self._running if one.owner != owner and one.slot is not None]
        if not others:
            return False
        victim = max(others, key=lambda one: (is_background(one.owner), self._counts[one.owner], one.order))
        more = self._counts[victim.owner] - self._counts[owner]
        if is_background(victim.owner) != is_background(owner):
            if is_background(owner):
                return False
        elif more < 1 or (more == 1 and not (self._counts[owner] == 0 and _had_its_turn(victim))):
            return False
        self._counts[victim.owner] -= 1
        self._step_back(victim)
        return True


def _had_its_turn(sequence: Sequence) -> bool:
    return sequence.decoding and sequence.generated >= max(TURN, sequence.computed // 4)


class AdapterRotation:
    """Rotation of adapter sets, for steps with one set each: owners take turns, and so do the sets of each
    owner.
    """

    def __init__(self) -> None:
        self._owner = ""
        self._latest: dict[str, Adapters] = {}

    def next(self, running: list[Sequence]) -> Adapters:
        """Return the adapters whose turn it is, among those that have something to compute."""
        present: dict[str, set[Adapters]] = {}
        for sequence in running:
            present.setdefault(sequence.owner, set()).add(sequence.group.job.adapters)
        if not present:
            return ()
        self._owner = _following(present, self._owner)
        chosen = _following(present[self._owner], self._latest.get(self._owner, ()))
        self._latest = {owner: used for owner, used in self._latest.items() if owner in present}
        self._latest[self._owner] = chosen
        return chosen


def _following(present: Iterable[_T], last: _T) -> _T:
    """Return the next in order, and after the last the first."""
    ordered = sorted(present)
    return next((one for one in ordered if one > last), ordered[0])


class FairShareLedger:
    """Ledger of compute time. Decoding runs in every step; prefill and embeddings can be delayed.

    An owner that used time for these is in debt to all others and gets no more until they have had as much
    time, for any work: each step's time counts to its owners by their rows. An owner that is alone is in debt
    to its own answers for embeddings: they get half of the time each, and a new owner's request finds no long
    chunk just begun.
    """

    def __init__(self) -> None:
        self._came: str | None = None
        self._crowded_until = 0.0
        self._owed: dict[str, float] = {}
        """Debt in seconds, by owner."""
        self._alone = True
        """Whether all work belongs to one owner."""

    def on_arrival(self, owner: str) -> None:
        """Note a request of this owner."""
        if self._came not in (None, owner):
            self._crowded_until = time.monotonic() + CROWDED_S
        self._came = owner

    @property
    def is_contended(self) -> bool:
        """Whether several owners come and go, so that a long step would delay the next request."""
        return time.monotonic() < self._crowded_until

    def indebted_owners(self, present: Set[str]) -> Set[str]:
        """Return the owners in debt, among those with something to compute; never all of them."""
        self._alone = len(present) < 2
        least = min((self._owed.get(owner, 0.0) for owner in present), default=0.0)
        return {owner for owner in present if self._owed.get(owner, 0.0) > least}

    def may_embed(self, owner: str, answering: Set[str], present: Set[str]) -> bool:
        """Whether an embedding of `owner` is due. `answering`: owners of running answers; `present`:
        owners of any work.
        """
        late = self.indebted_owners(present)
        return owner not in late and not (owner in answering and owner in self._owed)

    def prefill_candidates(self, sequences: list[Sequence], present: Set[str]) -> list[Sequence]:
        """Return the sequences whose prefill is due. If all owners are in prefill, a step has parts of
        all.
        """
        reading = [sequence for sequence in sequences if not sequence.decoding]
        if not reading and not self._owed:
            return reading
        ahead = [sequence for sequence in reading if not is_background(sequence.owner)]
        if ahead and len(ahead) < len(reading):
            reading, present = ahead, {owner for owner in present if not is_background(owner)}
        late = self.indebted_owners(present)
        if present == {sequence.owner for sequence in reading}:
            return reading
        return [sequence for sequence in reading if sequence.owner not in late]

    def charge_step(self, pieces: Iterable[ScheduledTokens], seconds: float) -> None:
        """Account for the time of a step."""
        if not self._owed and all(piece.input_token is not None for piece in pieces):
            return
        if self._alone:
            for owner in list(self._owed):
                self._owe(owner, -seconds)
            return
        rows: Counter[str] = Counter()
        read: Counter[str] = Counter()
        for piece in pieces:
            rows[piece.sequence.owner] += piece.size
            if piece.input_token is None:
                read[piece.sequence.owner] += piece.size
        a_row = seconds / rows.total()
        for owner in self._owed.keys() | read.keys():
            self._owe(owner, a_row * (read[owner] - (rows.total() - rows[owner])))

    def charge_embedding(self, owner: str, seconds: float) -> None:
        """Account for the time of a chunk of an embedding."""
        if self._alone:
            # No other owner was waiting for the time used before.
            self._owed.pop(owner, None)
        for other in self._owed.keys() | {owner}:
            self._owe(other, seconds if other == owner else -seconds)

    def _owe(self, owner: str, seconds: float) -> None:
        self._owed[owner] = self._owed.get(owner, 0.0) + seconds
        if self._owed[owner] <= 0:
            del self._owed[owner]


# The amount of prefill beside answers.


_PASS, _ANSWER = 8, 1.75
"""Estimated fixed cost of a step, and of an answer in it, in rows of prompts. A rough estimate is enough:
the learned times come from steps with similar numbers.
"""
_WORSE, _BETTER, _MOMENT = 0.4, 0.2, 2.0
"""How far one step moves the learned times, if slower or faster than expected; and the largest step time
that counts, relative to the expected one, as machines have hiccups.
"""
_SLOWED = 2.0
"""Slowdown of a step by an encoding beside it, before it is measured."""
_LONGER, _LEAST = 1.5, 0.125
"""Factor by which a step with prefill may take longer where steps are long anyway; and the minimum share
of the step's own time that prefill gets in any case.
"""


class StepTimeModel:
    """Learned step times: per row of fixed cost and answers, and per row of prefill."""

    def __init__(self, own: float = 0.0, row: float = 0.0) -> None:
        self.own = own
        self.row = row

    def of(self, answers: int, read: int) -> float:
        return (_PASS + _ANSWER * answers) * self.own + read * self.row

    def learn(self, answers: int, read: int, seconds: float) -> None:
        """Update the times. Steps without prefill tell which of the two has changed."""
        if not (expected := self.of(answers, read)):
            self.own = self.row = seconds / (_PASS + _ANSWER * answers + read)
            return
        more = min(seconds / expected, _MOMENT) - 1
        by = 1 + more * (_WORSE if more > 0 else _BETTER)
        self.own *= by
        self.row *= by if read else 1.0


class PrefillPacer:
    """Controls how many rows of prompts go into a step with answers, so that it takes a limited time.

    At 3 ms per row, 128 of them would keep all answers waiting for nearly half a second. The time per row
    differs a hundredfold between machines and models, and grows while media are encoded on the same cores. So
    it is learned from the steps, separately for those with an encoding beside them.
    """

    def __init__(self) -> None:
        self._usual = StepTimeModel()
        self._slowed: StepTimeModel | None = None

    def rows(self, answers: int, encoding: bool, pause: float, most: float = math.inf) -> float:
        """Return the rows to prefill beside these answers, at least one.

        The step may take `pause` seconds, or longer where steps are long anyway, but no more than `most`.
        """
        known = self._known(encoding)
        own, limit = known.of(answers, 0), min(most, max(pause, _LONGER * self._usual.of(answers, 0)))
        return max(1.0, max(limit - own, _LEAST * own) / known.row) if known.row else math.inf

    def took(self, answers: int, read: int, encoding: bool, seconds: float) -> None:
        """Learn from a step's time."""
        self._known(encoding).learn(answers, read, seconds)

    def _known(self, encoding: bool) -> StepTimeModel:
        if not encoding:
            return self._usual
        if self._slowed is None:
            self._slowed = StepTimeModel(_SLOWED * self._usual.own, _SLOWED * self._usual.row)
        return self._slowed
