"""Speculative decoding: draft tokens, so that one step can give a sequence several tokens.

One pass over the weights costs as much as many rows in it. So if few sequences run, a sequence may add rows
for draft tokens: those that its constraint makes inevitable, or those that followed the last time its two
newest tokens stood together, in its own prompt and answer or else in other answers. That is often right where
an answer repeats a prompt, a name or itself, or a common phrase. With a draft model (see `draft_model.py`)
its tokens are used, which are right more often, and take time of their own.

The answer does not change: each row is sampled as ever, and the next row counts only if the sampled token was
the draft token.

A runner that samples on its device begins steps before the ids of the last one are known, but draft tokens
depend on these ids, so a step with draft tokens has to wait for them. There, only few sequences get draft
tokens, and their cost is measured from one step's end to the next one's.

While no draft tokens are used, the scheduler still checks whether one would have been right, which costs no
row.
"""

from collections import OrderedDict
from collections.abc import Sequence as Ordered

from dragoman.engines.local.draft_model import Drafter
from dragoman.engines.local.kv_cache import KVCache
from dragoman.engines.local.runner import AnyRunner, PagedRunner
from dragoman.engines.local.sequence import ScheduledTokens, Sequence, Slot
from dragoman.engines.sampling import Ids
from dragoman.engines.sampling.batched import DeviceSampler

# How far one draft token moves a sequence's acceptance rate; and its drift back to the usual rate without
# any.
_LEARNING, _FORGETTING = 0.1, 0.01
# Acceptance rate before any measurement; how slowly the usual rate moves; and its minimum.
_UNKNOWN, _HABIT, _LEAST = 0.5, 0.02, 0.3
_COUNTS = (0, 1, 3, 7, 15)
# Steps for which the number of draft tokens is kept, as a runtime may prepare itself for each new number of
# rows. The shorter one is for devices with graphs for all numbers.
_WHILE, _SHORT_WHILE = 16, 4
# Sequences up to which draft tokens are used where steps begin ahead; with more, Python becomes the
# bottleneck.
_FEW = 16
# Without draft tokens, one token in `_LOOKS` is checked for whether it could have been drafted; or every
# token, for up to `_ALL_OF` sequences, where steps do not begin ahead.
_LOOKS, _ALL_OF = 4, 8
_WORTHWHILE = 1.05
# Cost of a draft token in rows: its attention is computed separately, though it shares its sequence's prefix.
_ALONE = 1.3
# Steps shorter than this tell nothing about the cost of rows. Measurements older than `_OLD` steps are
# ignored.
_SHORT_S, _SHORT_AWAY_S, _OLD = 0.002, 0.0002, 2000
# How far one step moves the measured time, and the largest step time that counts, relative to it: machines
# have hiccups.
_NEWS, _MOMENT = 0.2, 2.0
# Pairs of ids for which the next id is stored; this takes some megabytes.
_PHRASES = 1 << 15
# Fixed cost of a llama.cpp step, in rows, before it is measured.
_SLOT_ROWS = 4
_FIRST = 3


class Speculator:
    """Adds draft tokens to steps. All sequences of a step get the same number, so that steps have equal
    numbers of rows.

    In pages a wrong draft token is simply overwritten by the right one. Slots have to be truncated, and rows
    cost more there, so slot runners use only a draft model.
    """

    def __init__(self, runner: AnyRunner, memory: KVCache, most: int, drafter: Drafter | None = None) -> None:
        self._runner = runner
        self._memory = memory
        self._drafter = drafter
        self._in_pages = isinstance(runner, PagedRunner)
        self._ahead = isinstance(runner, DeviceSampler)
        """Whether steps begin before the ids of the last one are known."""
        self._pass_rows = (
            runner.step_overhead_rows if isinstance(runner, PagedRunner) else _SLOT_ROWS if drafter else 0
        )
        self.most = most if self._pass_rows else 0
        self._phrases = NgramCache(_PHRASES)
        self._costs = StepCosts(self._pass_rows, _SHORT_AWAY_S if self._ahead else _SHORT_S)
        self._watches = drafter is None
        """Whether to check what would have been drafted while no draft tokens are used."""
        self._usual = 0.0 if self._watches and self._ahead else _UNKNOWN
        """Recent acceptance rate of all sequences; a new sequence starts with it."""
        self._plain: dict[int, int] = {}
        """Steps without draft tokens, by their number of sequences, if there is a draft model."""
        self._streams: list[tuple[int, int, int]] = []
        """The sequences of the last such step, by their order of service."""
        self._each = 0
        self._left = 0
        self._many = False
        """Whether there are too many sequences for draft tokens."""

    def add_drafts(self, pieces: list[ScheduledTokens]) -> None:
        """Add draft tokens to a step without prefill, if that gives more tokens in the same time."""
        if not self._may_guess(pieces) or not self._decide(pieces):
            return
        if self._each and all(self._has_room(piece, self._each) for piece in pieces):
            self._add_guesses(pieces)
        elif not self._each and self._in_pages:
            self._add_foreseen(pieces)

    def needs_known_ids(self, pieces: list[ScheduledTokens]) -> bool:
        """Whether this step would get draft tokens if the ids of the step before were known."""
        if not self._may_guess(pieces) or not self._decide(pieces):
            return False
        foreseen = [piece.sequence.answer.forced_ids[1:] for piece in pieces]
        return self._each > 0 or self._are_worth_it(foreseen)

    def _may_guess(self, pieces: list[ScheduledTokens]) -> bool:
        self._many = self._ahead and len(pieces) > _FEW
        if not self.most or (self._many and len(pieces) > self._pass_rows):
            return False
        return all(piece.input_token is not None for piece in pieces)

    def _decide(self, pieces: list[ScheduledTokens]) -> bool:
        """Set the number of draft tokens per sequence. Returns False if a step without any has to be
        measured first.
        """
        if self._many:
            self._each = 0
            return True
        streams = [piece.sequence.order for piece in pieces]
        if streams != self._streams or not self._left:
            self._streams, self._left = streams, _SHORT_WHILE if self._ahead else _WHILE
            trusts = (piece.sequence.acceptance_rate for piece in pieces)
            self._each = self._best([self._usual if trust is None else trust for trust in trusts])
            if self._drafter is not None and self._plain.get(len(pieces), 0) < _FIRST:
                # The time of a step without draft tokens is needed to judge the draft model.
                self._each = self._left = 0
                self._plain[len(pieces)] = self._plain.get(len(pieces), 0) + 1
                return False
        self._left -= 1
        return True

    def _add_guesses(self, pieces: list[ScheduledTokens]) -> None:
        known = [self._known(piece) for piece in pieces]
        drafted: list[list[int]] | None = None
        if self._drafter is not None:
            drafted = self._drafter.guess([piece.sequence for piece in pieces], known, self._each)
            if not (self._in_pages if drafted is None else all(drafted)):
                # The draft model is still in prefill, or has no slot and nothing else is worth the rows.
                return
        for piece, ids, draft in zip(pieces, known, drafted or [[]] * len(pieces), strict=True):
            piece.add_drafts(self._guess(piece, ids, draft))

    def record_step(self, pieces: list[ScheduledTokens], seconds: float) -> None:
        """Note how long a step without prefill took."""
        each = len(pieces[0].drafts)
        if self.most and all(p.input_token is not None and len(p.drafts) == each for p in pieces):
            # Where steps begin ahead, the time between two ends includes the draft model's.
            if self._drafter is not None and each and not self._ahead:
                seconds += self._drafter.seconds
            self._costs.note(len(pieces), each, seconds)

    def close(self) -> None:
        if self._drafter is not None:
            self._drafter.close()

    def _add_foreseen(self, pieces: list[ScheduledTokens]) -> None:
        """Add the tokens that constraints make inevitable, if they are worth a step with more rows.

        This step and the one after it each cost the runtime about a pass, because their numbers of rows
        differ.
        """
        foreseen = [piece.sequence.answer.forced_ids for piece in pieces]
        if self._are_worth_it(foreseen):
            for piece, ids in zip(pieces, foreseen, strict=True):
                if ids and self._has_room(piece, len(ids)):
                    piece.add_drafts(ids)

    def _are_worth_it(self, foreseen: list[list[int]]) -> bool:
        streams, more = len(foreseen), sum(map(len, foreseen))
        better = (streams + more) / (2 * self._pass_rows + streams + more)
        has_room = streams + more <= min(self._runner.max_outputs, self._runner.max_rows)
        return has_room and better > _WORTHWHILE * streams / (self._pass_rows + streams)

    def _best(self, trusts: list[float]) -> int:
        """Return how many draft tokens per sequence give the most tokens for the cost of the rows."""
        streams, runner = len(trusts), self._runner
        room = min(runner.max_outputs, runner.max_rows) // max(1, streams) - 1

        def gain(each: int) -> float:
            """Return the tokens of a step per cost. A draft token counts only if those before it are
            accepted, too.
            """
            tokens = sum(trust**index for trust in trusts for index in range(1 + each))
            cost = self._costs.of(streams, each)
            if self._drafter is not None and (plain := self._costs.seconds(streams)):
                cost = max(cost, plain + each * self._drafter.one_guess)
            return tokens / cost

        best = max((each for each in _COUNTS if each <= min(self.most, room)), key=gain, default=0)
        return best if gain(best) > _WORTHWHILE * gain(0) else 0

    def _has_room(self, piece: ScheduledTokens, count: int) -> bool:
        slot, end = piece.sequence.slot, piece.end + count
        assert slot is not None
        return end <= self._runner.context and self._memory.reserve(slot, end)

    def _known(self, piece: ScheduledTokens) -> Ids:
        slot = piece.sequence.slot
        assert slot is not None and piece.input_token is not None
        # The newest token is not in the KV cache yet, but its place among the ids is free.
        slot.ids[slot.length] = piece.input_token
        return slot.ids[: slot.length + 1]

    def _guess(self, piece: ScheduledTokens, known: Ids, drafted: list[int]) -> list[int]:
        slot = piece.sequence.slot
        assert slot is not None and piece.input_token is not None
        guesses = drafted or piece.sequence.answer.forced_ids[: self._each] or find_ngram(known, self._each)
        newest = [*known[-2:].tolist(), *guesses][-2:]
        if self._in_pages:
            guesses = guesses + self._phrases.after(slot.page_hashes[0], newest, self._each - len(guesses))
        return guesses + [piece.input_token] * (self._each - len(guesses))

    def record_outcome(self, piece: ScheduledTokens, numbers: list[int], right: int) -> None:
        """Record what followed the newest token; `right` of the draft tokens were accepted."""
        if not self.most or self._many:
            return
        sequence, slot = piece.sequence, piece.sequence.slot
        assert slot is not None and piece.input_token is not None
        guessed = len(piece.drafts)
        looks = 1 if not self._ahead and len(self._streams) <= _ALL_OF else _LOOKS
        if self._watches and not guessed and not slot.length % looks:
            guessed, right = 1, int(self._would_guess(slot) in numbers[:1])
        if guessed or not self._watches:
            update_acceptance(sequence, guessed, right, self._usual)
        if guessed and sequence.acceptance_rate is not None:
            least = 0.0 if self._watches else _LEAST
            self._usual = max(least, self._usual + _HABIT * (sequence.acceptance_rate - self._usual))
        # A sequence that shares no prefix does not share its phrases either.
        if sequence.group.job.reuse_prefix and self._in_pages:
            self._phrases.note(
                slot.page_hashes[0], [slot.ids.item(piece.start - 1), piece.input_token, *numbers]
            )

    def _would_guess(self, slot: Slot) -> int | None:
        """Return the token that would have been drafted."""
        known = slot.ids[: slot.length]
        ngram = find_ngram(known, 1) or self._phrases.after(slot.page_hashes[0], known[-2:].tolist(), 1)
        return ngram[0] if ngram else None


class StepCosts:
    """Measured step times, by the number of sequences and of draft tokens for each.

    The cost of more rows differs by machine, model and weight type: beside one sequence the first draft token
    may be free, or three of them cost a third of the step. So measurements count; what was not measured is
    estimated from the step without draft tokens, with the runner's `step_overhead_rows`.
    """

    def __init__(self, pass_rows: int, shortest: float = _SHORT_S) -> None:
        self._pass_rows = pass_rows
        self._shortest = shortest
        self._seen: dict[tuple[int, int], tuple[float, int]] = {}
        """Seconds, and the step of the measurement; 0 seconds for the first one, in which the runtime may
        have prepared itself.
        """
        self._steps = 0

    def note(self, streams: int, each: int, seconds: float) -> None:
        if seconds < self._shortest:
            return
        self._steps += 1
        if (streams, each) not in self._seen:
            value = 0.0
        elif known := self._known(streams, each):
            value = known + _NEWS * (min(seconds, _MOMENT * known) - known)
        else:
            value = seconds
        self._seen[streams, each] = value, self._steps

    def of(self, streams: int, each: int) -> float:
        """Return the cost of a step: in seconds if a step without draft tokens was measured, else in rows.
        Only for comparisons.
        """
        rows, plain = self._rows(streams, each), self._known(streams, 0)
        if not plain:
            return rows
        return self._known(streams, each) or plain * rows / self._rows(streams, 0)

    def seconds(self, streams: int) -> float:
        """Return the time of a step without draft tokens; 0 if none was measured recently."""
        return self._known(streams, 0)

    def _known(self, streams: int, each: int) -> float:
        seconds, when = self._seen.get((streams, each), (0.0, 0))
        return seconds if self._steps - when < _OLD else 0.0

    def _rows(self, streams: int, each: int) -> float:
        return self._pass_rows + streams * (1 + _ALONE * each)


class NgramCache:
    """The id that followed each pair of ids the last time; the most recently noted pairs are kept.

    `root` identifies the namespace, as it does for pages; it is short, however long the client's salt is.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        # An OrderedDict: in a plain dict, finding the first key gets slower with each key removed before.
        self._next: OrderedDict[tuple[bytes, int, int], int] = OrderedDict()

    def note(self, root: bytes, ids: Ordered[int]) -> None:
        for first, second, third in zip(ids, ids[1:], ids[2:], strict=False):
            key = (root, first, second)
            self._next[key] = third
            self._next.move_to_end(key)
            if len(self._next) > self._most:
                self._next.popitem(last=False)

    def after(self, root: bytes, newest: Ordered[int], most: int) -> list[int]:
        """Return at most `most` ids that may follow the two newest."""
        numbers: list[int] = []
        if len(newest) < 2:
            return numbers
        first, second = newest
        while len(numbers) < most and (third := self._next.get((root, first, second))) is not None:
            numbers.append(third)
            first, second = second, third
        return numbers


def update_acceptance(sequence: Sequence, guessed: int, right: int, usual: float = _UNKNOWN) -> None:
    """Update the acceptance rate of a sequence after `right` of `guessed` draft tokens were accepted."""
    trust = usual if sequence.acceptance_rate is None else sequence.acceptance_rate
    if not guessed:
        trust += _FORGETTING * (usual - trust)
    for _ in range(right):
        trust += _LEARNING * (1 - trust)
    if right < guessed:
        trust -= _LEARNING * trust
    sequence.acceptance_rate = trust


def find_ngram(known: Ids, most: int) -> list[int]:
    """Return what followed the last two ids when they last stood together: after `7 8 9 5 7 8`, `9 5 7 8`."""
    if known.size < 3:
        return []
    # Searching bytes is much faster than numpy; matches that begin within an id are skipped.
    text, pair, size = known[:-1].tobytes(), known[-2:].tobytes(), known.itemsize
    index = text.rfind(pair)
    while index > 0 and index % size:
        index = text.rfind(pair, 0, index + len(pair) - 1)
    if index < 0:
        return []
    start = index // size + 2
    numbers: list[int] = known[start : start + most].tolist()
    return numbers
