"""Guesses at what comes next, so that one step can give a sequence several tokens.

A pass over the weights costs as much as many rows in it. So where few sequences run, a sequence may add rows
for tokens it only guesses: those that its constraint leaves no way around, or those that followed when its
two newest tokens last stood together, in its own prompt and answer or else in other answers. That is often
right where an answer repeats a prompt, a name or itself, or says what models say often. With a draft (see
`drafting.py`) a smaller model guesses, which is right more often, and takes time of its own.

Nothing of what is said changes. Each row is chosen from as ever, and the next row counts only if the choice
was the guess.

A runner that chooses ids itself begins steps before the ids of the last one are known, and guesses are made
of ids: a step with guesses has to wait for them. So there it is guessed for few sequences only, and what that
takes is weighed by the time from one step's end to the next one's.

While nothing is guessed, it is still looked at whether a guess would have been right, which costs no row.
"""

from collections import OrderedDict
from collections.abc import Sequence as Ordered

from dragoman.engines.choosing import Ids
from dragoman.engines.choosing.together import Drawer
from dragoman.engines.local.drafting import Drafter
from dragoman.engines.local.memory import Memory
from dragoman.engines.local.runner import AnyRunner, PagedRunner
from dragoman.engines.local.sequence import Sequence, Slot, StepPiece

# How far one guess moves the trust in further ones; and the way back for who has stopped guessing.
_LEARNING, _FORGETTING = 0.1, 0.01
# What is thought of guesses before any was made, how slowly that moves, and what it does not go below.
_UNKNOWN, _HABIT, _LEAST = 0.5, 0.02, 0.3
_COUNTS = (0, 1, 3, 7, 15)
# A runtime may prepare itself anew for each number of rows, so the same number is kept for a while; graphs of
# another device are there for all numbers.
_WHILE, _SHORT_WHILE = 16, 4
# Sequences for which it is guessed where steps are begun ahead: with more, it is Python that takes the time.
_FEW = 16
# Of so many tokens that were not guessed, one is looked at, whether it could have been: or all of them, where
# few sequences take their time.
_LOOKS, _ALL_OF = 4, 8
_WORTHWHILE = 1.05
# What a guess costs, in rows: it goes through attention by itself, however much it shares with its sequence.
_ALONE = 1.3
# Steps that are shorter say nothing about rows. A figure that is older, in steps, says little about today.
_SHORT_S, _SHORT_AWAY_S, _OLD = 0.002, 0.0002, 2000
# How far one step moves what is known, and what it may be at most, of that: machines have moments.
_NEWS, _MOMENT = 0.2, 2.0
# Pairs of ids of which is known what followed, some megabytes of them.
_PHRASES = 1 << 15
# As many rows as a step of llama.cpp costs by itself, before that was seen.
_SLOT_ROWS = 4
_FIRST = 3


class Guesser:
    """All sequences of a step guess the same number of tokens, so that steps have the same number of rows.

    With pages a token that was guessed wrong is written over by the right one. Slots have to be cut back, and
    rows cost more there, so without a draft nothing is guessed.
    """

    def __init__(self, runner: AnyRunner, memory: Memory, most: int, drafter: Drafter | None = None) -> None:
        self._runner = runner
        self._memory = memory
        self._drafter = drafter
        self._in_pages = isinstance(runner, PagedRunner)
        self._ahead = isinstance(runner, Drawer)
        """Whether steps are begun before the ids of the last one are known."""
        self._pass_rows = (
            runner.pass_rows if isinstance(runner, PagedRunner) else _SLOT_ROWS if drafter else 0
        )
        self.most = most if self._pass_rows else 0
        self._phrases = Phrases(_PHRASES)
        self._costs = StepCosts(self._pass_rows, _SHORT_AWAY_S if self._ahead else _SHORT_S)
        self._watches = drafter is None
        """Whether it is looked at what would have been guessed, while nothing is."""
        self._usual = 0.0 if self._watches and self._ahead else _UNKNOWN
        """How far sequences trusted guesses lately: a new one begins there."""
        self._plain: dict[int, int] = {}
        """Steps without guesses, by the sequences in them, where there is a draft."""
        self._streams: list[tuple[int, int, int]] = []
        """The sequences of the last such step, by their order of service."""
        self._each = 0
        self._left = 0
        self._many = False
        """Whether there are too many sequences to guess for."""

    def add_to(self, pieces: list[StepPiece]) -> None:
        """Add guesses to a step in which nothing is read, where that gives more tokens in the same time."""
        if not self._may_guess(pieces) or not self._decide(pieces):
            return
        if self._each and all(self._has_room(piece, self._each) for piece in pieces):
            self._add_guesses(pieces)
        elif not self._each and self._in_pages:
            self._add_foreseen(pieces)

    def wants_ids(self, pieces: list[StepPiece]) -> bool:
        """Whether there would be guesses in this step, if it were known what the one before it brings."""
        if not self._may_guess(pieces) or not self._decide(pieces):
            return False
        foreseen = [piece.sequence.answer.foreseen[1:] for piece in pieces]
        return self._each > 0 or self._are_worth_it(foreseen)

    def _may_guess(self, pieces: list[StepPiece]) -> bool:
        self._many = self._ahead and len(pieces) > _FEW
        if not self.most or (self._many and len(pieces) > self._pass_rows):
            return False
        return all(piece.newest is not None for piece in pieces)

    def _decide(self, pieces: list[StepPiece]) -> bool:
        """How many guesses each has now. Whether that is known: it may have to be found out without any."""
        if self._many:
            self._each = 0
            return True
        streams = [piece.sequence.order for piece in pieces]
        if streams != self._streams or not self._left:
            self._streams, self._left = streams, _SHORT_WHILE if self._ahead else _WHILE
            trusts = (piece.sequence.trust for piece in pieces)
            self._each = self._best([self._usual if trust is None else trust for trust in trusts])
            if self._drafter is not None and self._plain.get(len(pieces), 0) < _FIRST:
                # What a step takes without a draft has to be known, to weigh the draft against it.
                self._each = self._left = 0
                self._plain[len(pieces)] = self._plain.get(len(pieces), 0) + 1
                return False
        self._left -= 1
        return True

    def _add_guesses(self, pieces: list[StepPiece]) -> None:
        known = [self._known(piece) for piece in pieces]
        drafted: list[list[int]] | None = None
        if self._drafter is not None:
            drafted = self._drafter.guess([piece.sequence for piece in pieces], known, self._each)
            if not (self._in_pages if drafted is None else all(drafted)):
                # The draft is still reading, or has no place for them and nothing else is worth the rows.
                return
        for piece, ids, draft in zip(pieces, known, drafted or [[]] * len(pieces), strict=True):
            piece.guess(self._guess(piece, ids, draft))

    def took(self, pieces: list[StepPiece], seconds: float) -> None:
        """Note how long a step took in which nothing was read."""
        each = len(pieces[0].guesses)
        if self.most and all(p.newest is not None and len(p.guesses) == each for p in pieces):
            # Where steps are begun ahead, all that is between two ends has been counted.
            if self._drafter is not None and each and not self._ahead:
                seconds += self._drafter.seconds
            self._costs.note(len(pieces), each, seconds)

    def close(self) -> None:
        if self._drafter is not None:
            self._drafter.close()

    def _add_foreseen(self, pieces: list[StepPiece]) -> None:
        """Where nothing else is guessed, what constraints make come is worth a step with more rows.

        That, and the step after it, cost the runtime about a pass, because their numbers of rows are others.
        """
        foreseen = [piece.sequence.answer.foreseen for piece in pieces]
        if self._are_worth_it(foreseen):
            for piece, ids in zip(pieces, foreseen, strict=True):
                if ids and self._has_room(piece, len(ids)):
                    piece.guess(ids)

    def _are_worth_it(self, foreseen: list[list[int]]) -> bool:
        streams, more = len(foreseen), sum(map(len, foreseen))
        better = (streams + more) / (2 * self._pass_rows + streams + more)
        has_room = streams + more <= min(self._runner.max_outputs, self._runner.max_rows)
        return has_room and better > _WORTHWHILE * streams / (self._pass_rows + streams)

    def _best(self, trusts: list[float]) -> int:
        """How many guesses of each sequence give the most tokens for what the rows cost."""
        streams, runner = len(trusts), self._runner
        room = min(runner.max_outputs, runner.max_rows) // max(1, streams) - 1

        def gain(each: int) -> float:
            """Tokens of a step, for what it costs. A guess counts only if those before it are right too."""
            tokens = sum(trust**place for trust in trusts for place in range(1 + each))
            cost = self._costs.of(streams, each)
            if self._drafter is not None and (plain := self._costs.seconds(streams)):
                cost = max(cost, plain + each * self._drafter.one_guess)
            return tokens / cost

        best = max((each for each in _COUNTS if each <= min(self.most, room)), key=gain, default=0)
        return best if gain(best) > _WORTHWHILE * gain(0) else 0

    def _has_room(self, piece: StepPiece, count: int) -> bool:
        slot, end = piece.sequence.slot, piece.end + count
        assert slot is not None
        return end <= self._runner.context and self._memory.extend(slot, end)

    def _known(self, piece: StepPiece) -> Ids:
        slot = piece.sequence.slot
        assert slot is not None and piece.newest is not None
        # The newest token is not in memory yet, but its place among the ids is free.
        slot.ids[slot.length] = piece.newest
        return slot.ids[: slot.length + 1]

    def _guess(self, piece: StepPiece, known: Ids, drafted: list[int]) -> list[int]:
        slot = piece.sequence.slot
        assert slot is not None and piece.newest is not None
        guesses = drafted or piece.sequence.answer.foreseen[: self._each] or find_repeated(known, self._each)
        newest = [*known[-2:].tolist(), *guesses][-2:]
        if self._in_pages:
            guesses = guesses + self._phrases.after(slot.chain[0], newest, self._each - len(guesses))
        return guesses + [piece.newest] * (self._each - len(guesses))

    def learn(self, piece: StepPiece, said: list[int], right: int) -> None:
        """Note what followed the newest token of a piece, of which so many ids had been guessed."""
        if not self.most or self._many:
            return
        sequence, slot = piece.sequence, piece.sequence.slot
        assert slot is not None and piece.newest is not None
        guessed = len(piece.guesses)
        looks = 1 if not self._ahead and len(self._streams) <= _ALL_OF else _LOOKS
        if self._watches and not guessed and not slot.length % looks:
            guessed, right = 1, int(self._would_guess(slot) in said[:1])
        if guessed or not self._watches:
            judge(sequence, guessed, right, self._usual)
        if guessed and sequence.trust is not None:
            least = 0.0 if self._watches else _LEAST
            self._usual = max(least, self._usual + _HABIT * (sequence.trust - self._usual))
        # Who shares no prefix with others does not share this either.
        if sequence.group.job.reuse_prefix and self._in_pages:
            self._phrases.note(slot.chain[0], [slot.ids.item(piece.start - 1), piece.newest, *said])

    def _would_guess(self, slot: Slot) -> int | None:
        """The token that would have been guessed at, had anything been."""
        known = slot.ids[: slot.length]
        found = find_repeated(known, 1) or self._phrases.after(slot.chain[0], known[-2:].tolist(), 1)
        return found[0] if found else None


class StepCosts:
    """What steps took, by the sequences in them and the guesses of each.

    How much more rows cost is another thing on each machine, with each model and with each kind of weights:
    beside one sequence a first guess may cost nothing, or three of them a third of the step. So what was seen
    counts. What was not yet seen is estimated from the step without guesses, by the runner's own word.
    """

    def __init__(self, pass_rows: int, shortest: float = _SHORT_S) -> None:
        self._pass_rows = pass_rows
        self._shortest = shortest
        self._seen: dict[tuple[int, int], tuple[float, int]] = {}
        """Seconds, and when that was; without seconds where the runtime may just have prepared itself."""
        self._steps = 0

    def note(self, streams: int, each: int, seconds: float) -> None:
        if seconds < self._shortest:
            return
        self._steps += 1
        if (streams, each) not in self._seen:
            found = 0.0
        elif known := self._known(streams, each):
            found = known + _NEWS * (min(seconds, _MOMENT * known) - known)
        else:
            found = seconds
        self._seen[streams, each] = found, self._steps

    def of(self, streams: int, each: int) -> float:
        """Seconds, if a step without guesses was seen; it is for comparing only."""
        rows, plain = self._rows(streams, each), self._known(streams, 0)
        if not plain:
            return rows
        return self._known(streams, each) or plain * rows / self._rows(streams, 0)

    def seconds(self, streams: int) -> float:
        """Of a step without guesses; 0 where none was seen lately."""
        return self._known(streams, 0)

    def _known(self, streams: int, each: int) -> float:
        seconds, when = self._seen.get((streams, each), (0.0, 0))
        return seconds if self._steps - when < _OLD else 0.0

    def _rows(self, streams: int, each: int) -> float:
        return self._pass_rows + streams * (1 + _ALONE * each)


class Phrases:
    """What followed two ids the last time; of all pairs, those noted last are kept.

    `root` stands for the namespace, as it does for pages: whatever a client made that of, it is short.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        # A plain dictionary takes the longer to find its first, the more have gone before that.
        self._next: OrderedDict[tuple[bytes, int, int], int] = OrderedDict()

    def note(self, root: bytes, ids: Ordered[int]) -> None:
        for first, second, third in zip(ids, ids[1:], ids[2:], strict=False):
            key = (root, first, second)
            self._next[key] = third
            self._next.move_to_end(key)
            if len(self._next) > self._most:
                self._next.popitem(last=False)

    def after(self, root: bytes, newest: Ordered[int], most: int) -> list[int]:
        """At most so many ids that may follow the two newest."""
        found: list[int] = []
        if len(newest) < 2:
            return found
        first, second = newest
        while len(found) < most and (third := self._next.get((root, first, second))) is not None:
            found.append(third)
            first, second = second, third
        return found


def judge(sequence: Sequence, guessed: int, right: int, usual: float = _UNKNOWN) -> None:
    """Trust guesses more or less, after `right` of them were followed."""
    trust = usual if sequence.trust is None else sequence.trust
    if not guessed:
        trust += _FORGETTING * (usual - trust)
    for _ in range(right):
        trust += _LEARNING * (1 - trust)
    if right < guessed:
        trust -= _LEARNING * trust
    sequence.trust = trust


def find_repeated(known: Ids, most: int) -> list[int]:
    """What followed the last two ids when they last stood together: after `7 8 9 5 7 8`, `9 5 7 8`."""
    if known.size < 3:
        return []
    # In bytes they are found in a fraction of the time that numpy takes; not from the midst of an id on.
    text, pair, size = known[:-1].tobytes(), known[-2:].tobytes(), known.itemsize
    place = text.rfind(pair)
    while place > 0 and place % size:
        place = text.rfind(pair, 0, place + len(pair) - 1)
    if place < 0:
        return []
    start = place // size + 2
    found: list[int] = known[start : start + most].tolist()
    return found
