"""Who of several owners is served next: each that has jobs has an equal share of slots, steps and rows.

Rules of this file:
- A slot goes to the owner with the fewest, and of each owner to the first in the order of service.
- Where there is none left, the owner with the most gives one up to who has at least two less: its last
  sequence steps back. So nobody waits for another's long answers, and nothing is taken back and forth.
- Where there are more owners than slots, a sequence steps back when it has had its turn.
- Where several come and go, no step is long.
- Time is shared between owners, and only then between kinds of work: what an owner's prompts and embeddings
  take, others have as well before it has more. They take as long as many steps.
- Answers do not stand still for long while prompts are read beside them (`Pace`).
- What nobody waits for (`is_behind`) has what is left: it comes after all others, and makes way for them.
- An owner whose next prompt finds no room blocks the others only if nothing of its own runs.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Set
from typing import TypeVar

from dragoman.engines.local.memory import Memory
from dragoman.engines.local.sequence import Sequence, StepPiece, by_owner
from dragoman.engines.protocol import is_behind
from dragoman.types import Adapters

_T = TypeVar("_T", str, Adapters)

TURN = 64
"""Tokens of an answer that make up a turn, where owners have to take turns; more after a long prompt."""


def last_of_most(running: list[Sequence]) -> Sequence:
    """Who steps back: of the owner with the most sequences the last in the order of service."""
    counts = Counter(sequence.owner for sequence in running)
    return max(running, key=lambda one: (is_behind(one.owner), counts[one.owner], one.order))


CROWDED_S = 10.0
"""After the last change of owners; from then on steps may be long."""


class Places:
    """One round of giving slots to those who wait; `step_back` takes the slot of one away."""

    def __init__(
        self,
        memory: Memory,
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
            owner = min(self._waiting, key=lambda one: (is_behind(one), self._counts[one]))
            if not self._place_next(owner):
                if self._memory.full and not self._counts[owner]:
                    return
                del self._waiting[owner]

    def _place_next(self, owner: str) -> bool:
        """Whether one of an owner's sequences got a slot; who waits for a prefix does not block the rest."""
        mine = self._waiting[owner]
        self._memory.full = False
        while mine and not self._memory.full:
            sequence = mine.pop(0)
            if sequence.held() or sequence.group.shown.waits or self._memory.must_wait(sequence):
                continue
            if not self._memory.idle and not self._make_way(owner):
                return False
            if self._place(sequence):
                self.placed.add(sequence)
                self._counts[owner] += 1
                return True
        return False

    def _place(self, sequence: Sequence) -> bool:
        while not self._memory.place(sequence):
            if not self._memory.full or not self._make_way(sequence.owner):
                return False
            self._memory.full = False
        return True

    def _make_way(self, owner: str) -> bool:
        """Whether somebody could give up a slot."""
        others = [one for one in self._running if one.owner != owner and one.slot is not None]
        if not others:
            return False
        victim = max(others, key=lambda one: (is_behind(one.owner), self._counts[one.owner], one.order))
        more = self._counts[victim.owner] - self._counts[owner]
        if is_behind(victim.owner) != is_behind(owner):
            if is_behind(owner):
                return False
        elif more < 1 or (more == 1 and not (self._counts[owner] == 0 and _had_its_turn(victim))):
            return False
        self._counts[victim.owner] -= 1
        self._step_back(victim)
        return True


def _had_its_turn(sequence: Sequence) -> bool:
    return sequence.decoding and sequence.said >= max(TURN, sequence.computed // 4)


class Turns:
    """A step has one set of adapters: owners take turns, and so do the sets of each."""

    def __init__(self) -> None:
        self._owner = ""
        self._latest: dict[str, Adapters] = {}

    def next(self, running: list[Sequence]) -> Adapters:
        """The adapters whose turn it is, among those that have something to compute."""
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
    """The next in order, and after the last the first."""
    ordered = sorted(present)
    return next((one for one in ordered if one > last), ordered[0])


class Account:
    """Whose time it was. Answers are said on in every step, but prompts and embeddings can wait a little.

    Who has had time for such work owes it to all others, and has no more of it until they have had as much
    time, for whatever it was: of a step every owner has the part of its rows. Who is alone owes embeddings to
    its own answers: they have half of the time each, and who comes next finds no long piece begun at once.
    """

    def __init__(self) -> None:
        self._came: str | None = None
        self._crowded_until = 0.0
        self._owed: dict[str, float] = {}
        """Seconds, by owner."""
        self._alone = True
        """Whether one owner has all that there is to compute."""

    def came(self, owner: str) -> None:
        """Something of this owner has come."""
        if self._came not in (None, owner):
            self._crowded_until = time.monotonic() + CROWDED_S
        self._came = owner

    @property
    def crowded(self) -> bool:
        """Whether several owners come and go, so that a long step would keep the next one waiting."""
        return time.monotonic() < self._crowded_until

    def must_wait(self, present: Set[str]) -> Set[str]:
        """Of the owners with something to compute those that owe; never all of them."""
        self._alone = len(present) < 2
        least = min((self._owed.get(owner, 0.0) for owner in present), default=0.0)
        return {owner for owner in present if self._owed.get(owner, 0.0) > least}

    def may_embed(self, owner: str, answering: Set[str], present: Set[str]) -> bool:
        """`answering`: owners of answers at work; `present`: of all that there is to compute."""
        late = self.must_wait(present)
        return owner not in late and not (owner in answering and owner in self._owed)

    def may_be_read(self, sequences: list[Sequence], present: Set[str]) -> list[Sequence]:
        """Those of which a part of the prompt is due. Where all owners read, a step has parts of all."""
        reading = [sequence for sequence in sequences if not sequence.decoding]
        if not reading and not self._owed:
            return reading
        ahead = [sequence for sequence in reading if not is_behind(sequence.owner)]
        if ahead and len(ahead) < len(reading):
            reading, present = ahead, {owner for owner in present if not is_behind(owner)}
        late = self.must_wait(present)
        if present == {sequence.owner for sequence in reading}:
            return reading
        return [sequence for sequence in reading if sequence.owner not in late]

    def stepped(self, pieces: Iterable[StepPiece], seconds: float) -> None:
        """A step took so long."""
        if not self._owed and all(piece.newest is not None for piece in pieces):
            return
        if self._alone:
            for owner in list(self._owed):
                self._owe(owner, -seconds)
            return
        rows: Counter[str] = Counter()
        read: Counter[str] = Counter()
        for piece in pieces:
            rows[piece.sequence.owner] += piece.size
            if piece.newest is None:
                read[piece.sequence.owner] += piece.size
        a_row = seconds / rows.total()
        for owner in self._owed.keys() | read.keys():
            self._owe(owner, a_row * (read[owner] - (rows.total() - rows[owner])))

    def embedded(self, owner: str, seconds: float) -> None:
        """A piece of an embedding took so long."""
        if self._alone:
            # Nobody was kept waiting by those before.
            self._owed.pop(owner, None)
        for other in self._owed.keys() | {owner}:
            self._owe(other, seconds if other == owner else -seconds)

    def _owe(self, owner: str, seconds: float) -> None:
        self._owed[owner] = self._owed.get(owner, 0.0) + seconds
        if self._owed[owner] <= 0:
            del self._owed[owner]


# How much of prompts is read beside answers.


_PASS, _ANSWER = 8, 1.75
"""What a step costs by itself, and an answer in it, in rows of prompts. It need only be so roughly: what is
known is what steps took that had about as many."""
_WORSE, _BETTER, _MOMENT = 0.4, 0.2, 2.0
"""How far one step moves what is known; and what it may be at most, of that: machines have moments."""
_SLOWED = 2.0
"""By what an encoding beside it makes a step longer, before that was seen."""
_LONGER, _LEAST = 1.5, 0.125
"""Where a step takes long by itself, by so much one that reads may take longer; and what reading has of its
time at least, whatever else takes time."""


class StepTime:
    """What steps take: for each row that they are reckoned as by themselves, and for each that they read."""

    def __init__(self, own: float = 0.0, row: float = 0.0) -> None:
        self.own = own
        self.row = row

    def of(self, answers: int, read: int) -> float:
        return (_PASS + _ANSWER * answers) * self.own + read * self.row

    def learn(self, answers: int, read: int, seconds: float) -> None:
        """Which part it was that took longer or shorter than expected is told by steps that read nothing."""
        if not (expected := self.of(answers, read)):
            self.own = self.row = seconds / (_PASS + _ANSWER * answers + read)
            return
        more = min(seconds / expected, _MOMENT) - 1
        by = 1 + more * (_WORSE if more > 0 else _BETTER)
        self.own *= by
        self.row *= by if read else 1.0


class Pace:
    """How many rows of prompts go into a step with answers, so that it takes no longer than so many seconds.

    Where a row takes 3 ms, 128 of them would keep all answers waiting for nearly half a second. What it takes
    differs a hundredfold between machines and models, and grows while a picture is encoded on the same cores.
    So it is learned from the steps, apart for those beside which something is encoded.
    """

    def __init__(self) -> None:
        self._usual = StepTime()
        self._slowed: StepTime | None = None

    def rows(self, answers: int, encoding: bool, pause: float, most: float = math.inf) -> float:
        """Rows that a step may read beside so many answers, at least one.

        It may take `pause` seconds, or longer where it takes long by itself, but no more than `most`.
        """
        known = self._known(encoding)
        own, limit = known.of(answers, 0), min(most, max(pause, _LONGER * self._usual.of(answers, 0)))
        return max(1.0, max(limit - own, _LEAST * own) / known.row) if known.row else math.inf

    def took(self, answers: int, read: int, encoding: bool, seconds: float) -> None:
        """A step with so many answers that read so many rows took so long."""
        self._known(encoding).learn(answers, read, seconds)

    def _known(self, encoding: bool) -> StepTime:
        if not encoding:
            return self._usual
        if self._slowed is None:
            self._slowed = StepTime(_SLOWED * self._usual.own, _SLOWED * self._usual.row)
        return self._slowed
