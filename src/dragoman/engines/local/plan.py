"""One step, before it is computed: which tokens of which sequences."""

import numpy as np

from dragoman.engines.choosing.arrays import Ids
from dragoman.engines.local.runner import Rows
from dragoman.engines.local.sequence import Sequence, by_owner

# A pass costs about as much as this many tokens in it.
_PASS = 2


class Piece:
    """What one sequence computes in a step: its newest token, guesses after it, or a part of its prompt."""

    __slots__ = ("guesses", "newest", "outputs", "sequence", "size", "start")

    def __init__(self, sequence: Sequence, size: int) -> None:
        self.sequence = sequence
        self.start = sequence.computed
        self.size = size
        self.newest = sequence.answer.output[-1] if sequence.decoding else None
        """The token to be computed; None for a part of a prompt."""
        self.guesses: list[int] = []
        if sequence.prompt_logprobs is not None and self.newest is None:
            self.outputs = size
        else:
            self.outputs = int(self.end >= sequence.prompt_length)

    @property
    def end(self) -> int:
        return self.start + self.size

    def guess(self, tokens: list[int]) -> None:
        """Compute these as well, as if the newest token of an answer were followed by them."""
        self.guesses = tokens
        self.size = self.outputs = 1 + len(tokens)

    def add_to(self, rows: Rows) -> None:
        sequence = self.sequence
        assert sequence.slot is not None
        rows.tables[sequence.slot.index] = sequence.slot.pages
        rows.adapters[sequence.slot.index] = sequence.group.job.adapters
        if self.newest is None:
            tokens = sequence.prompt[self.start : self.end].tolist()
        else:
            tokens = [self.newest, *self.guesses]
        outputs = [self.outputs == self.size] * self.size
        outputs[-1] = bool(self.outputs)
        rows.extend(sequence.slot.index, self.start, tokens, outputs, said=self.start >= sequence.asked)

    def read(self) -> None:
        """The part of the prompt has been computed: it is in the slot."""
        self._written(self.sequence.prompt[self.start : self.end])

    def followed(self, said: list[int]) -> int:
        """The newest token was followed by what was said; how many guesses were right."""
        right = max(0, len(said) - 1)
        self._written(np.array([self.newest, *said[:right]], np.int32))
        return right

    def _written(self, tokens: Ids) -> None:
        sequence = self.sequence
        assert sequence.slot is not None
        sequence.slot.write(self.start, tokens)
        sequence.computed = self.start + len(tokens)


class Plan:
    __slots__ = ("pieces",)

    def __init__(self, pieces: list[Piece]) -> None:
        self.pieces = pieces

    def rows(self) -> Rows:
        rows = Rows()
        for piece in self.pieces:
            piece.add_to(rows)
        return rows


def share_out(reading: list[Sequence], rows: int, outputs: int) -> dict[Sequence, int]:
    """How many tokens of each prompt go into a step of `rows` tokens and `outputs` extra rows of logits.

    Each owner has an equal part. A quarter of it goes to the shortest prompts, so that a question does not
    wait behind a book; the rest goes in the order of `reading`.
    """
    sizes: dict[Sequence, int] = {}

    def fill(queue: list[Sequence], most: int) -> None:
        nonlocal outputs
        for sequence in queue:
            already = sizes.get(sequence, 0)
            size = min(sequence.unread - already, most - sum(sizes.values()))
            if sequence.prompt_logprobs is not None:
                size = min(size, outputs)
                outputs -= max(0, size)
            if size > 0:
                sizes[sequence] = already + size

    owners = by_owner(reading)
    for mine in owners.values():
        start, part = sum(sizes.values()), rows // len(owners)
        fill(sorted(mine, key=lambda each: each.unread), start + part // 4)
        fill(mine, start + part)
    fill(reading, rows)
    return sizes


def level(sizes: dict[Sequence, int]) -> dict[Sequence, int]:
    """Cut pieces to one length where that pays, because each further length takes a pass of its own.

    `9, 10, 12` becomes `9, 9, 9`: what is cut off comes in the next step. `4, 27, 30` becomes `4, 27, 27`.
    """
    lengths = sorted(set(sizes.values()))

    def efficiency(most: int) -> float:
        tokens = sum(min(size, most) for size in sizes.values())
        passes = 1 + sum(length < most for length in lengths)
        return tokens / (tokens + passes * _PASS)

    common = max(lengths, key=efficiency, default=0)
    return {sequence: min(size, common) for sequence, size in sizes.items()}
