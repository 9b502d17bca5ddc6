"""Data of the scheduler: a group is a job, a sequence one of its continuations, a plan one step of all."""

import asyncio
from collections.abc import Iterable
from itertools import count
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from dragoman.engines.choosing import Ids, Logits
from dragoman.engines.choosing.sampler import logprob
from dragoman.engines.choosing.together import Continuation
from dragoman.engines.local.runner import Rows, RowsAway, Runner, ShownRows
from dragoman.engines.protocol import BEHIND, behind_owner
from dragoman.types import UNBOUNDED, Job, Sink, TokenLogprob

if TYPE_CHECKING:
    from dragoman.engines.local.pictures import Pictures

Namespace: TypeAlias = tuple[object, ...]
_private = count()


class Slot:
    """Memory for one sequence. When the sequence has ended, its tokens stay cached for others."""

    __slots__ = ("blocks_end", "chain", "ids", "index", "length", "namespace", "pages", "sequence", "used")

    def __init__(self, index: int, context: int) -> None:
        self.index = index
        self.ids: Ids = np.zeros(context, np.int32)
        self.length = 0
        self.blocks_end = 0
        """Where the whole blocks of its prompt end, for runners that use blocks (`Runner.block`)."""
        self.namespace: Namespace = ()
        self.sequence: Sequence | None = None
        self.used = 0
        """When it was last released, on the cache's clock."""
        self.pages: list[int] = []
        """Its pages in order, for runners with pages."""
        self.chain: list[bytes] = []
        """Hash of the tokens up to the end of each full page."""

    def write(self, position: int, tokens: Ids) -> None:
        """Note that tokens have been computed from `position` on."""
        self.length = position + len(tokens)
        self.ids[position : self.length] = tokens


NOT_IDS = 1 << 30
"""Numbers from here on represent rows of media in prompts, derived from their contents, so that prompts
can be compared as if they were all ids.
"""


class ShownMedia:
    """Media rows of a prompt; this class is for prompts without any, `pictures.py` has the other.

    Offsets count rows, and are used by the scheduler. Positions are what the model counts, and may be fewer.
    """

    __slots__ = ("waits",)

    def __init__(self) -> None:
        self.waits = False
        """Whether something has to be encoded before the prefill can continue."""

    def border(self, place: int) -> int:
        """Return the next offset behind this one at which media rows begin or end."""
        return UNBOUNDED

    def begin(self, place: int) -> int:
        """Return where to truncate a prefix of this length: a prefix cannot end within media."""
        return place

    def position(self, place: int) -> int:
        return place

    def is_shown(self, place: int) -> bool:
        """Whether the row at this offset belongs to media."""
        return False

    def is_whole(self, place: int) -> bool:
        """Whether the chunk that begins here cannot be cut."""
        return False

    def rows(self, start: int, end: int) -> ShownRows | None:
        """Return the media rows to compute instead of ids."""
        return None

    def sees(self, length: int) -> bool:
        """Whether all media behind a prefix are encoded; requests the encoding of those that are not."""
        return True

    def release(self) -> bool:
        """Release the encoded media, which have been prefilled; return whether there were any."""
        return False


class Group:
    """A job in the engine."""

    __slots__ = ("job", "loop", "namespace", "prompt", "quiet", "reported", "sequences", "shown", "sink")

    def __init__(
        self,
        job: Job,
        sink: Sink,
        loop: asyncio.AbstractEventLoop,
        prompt: Ids,
        shown: ShownMedia | None = None,
    ) -> None:
        self.job = job
        self.sink = sink
        self.loop = loop
        self.prompt = prompt
        self.shown = shown or ShownMedia()
        # A job that does not share prefixes has a namespace of its own: it neither uses cached prefixes nor
        # caches any for others. Its own continuations still share their prompt.
        self.namespace: Namespace = (
            job.adapters,
            job.cache_salt,
            None if job.reuse_prefix else next(_private),
        )
        self.sequences: list[Sequence] = []
        """Continuations that are not over."""
        self.reported = False
        """Whether the job's first step, which reports facts about the prompt, has been created."""
        self.quiet = False
        """Whether it is an idle prefill (`Rereading`), which no client has requested."""


class Sequence:
    __slots__ = (
        "answer",
        "cached",
        "cancelled",
        "computed",
        "failed_at",
        "group",
        "held_by",
        "held_until",
        "index",
        "order",
        "owner",
        "prompt",
        "prompt_length",
        "prompt_logprobs",
        "slot",
        "spoken",
        "trust",
    )

    def __init__(self, group: Group, index: int, order: tuple[int, int, int], answer: Continuation) -> None:
        self.group = group
        self.index = index
        self.order = order
        """Order of service: priority, arrival, index."""
        job = group.job
        self.owner = job.owner if job.priority < BEHIND else behind_owner(job.owner)
        self.answer = answer
        self.slot: Slot | None = None
        self.prompt: Ids = group.prompt
        self.prompt_length = len(group.prompt)
        self.computed = 0
        """Tokens in the slot. After the prefill, all but the newest."""
        self.cached = 0
        self.cancelled = False
        self.failed_at = 0
        """Length at which a step has failed: up to there it is computed alone; 0 if none has."""
        self.spoken = 0
        """Tokens of the answer generated before it got its slot."""
        self.trust: float | None = None
        """Acceptance rate of its draft tokens; None before the first."""
        self.held_by: Sequence | None = None
        """Another sequence that is computing a prefix this one can use, until it has `held_until` tokens."""
        self.held_until = 0
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        if index == 0 and group.job.sampling.prompt_logprobs is not None:
            self.prompt_logprobs = [None]

    def step_back(self) -> None:
        """Preempt the sequence: it gives up its slot, and will prefill its own tokens as part of the
        prompt.
        """
        self.slot = None
        self.computed = 0
        self.spoken = len(self.answer.output)
        self.prompt = np.concatenate([self.group.prompt, np.array(self.answer.output, np.int32)])
        self.prompt_length = len(self.prompt)
        if self.prompt_logprobs is not None:
            self.prompt_logprobs = None if self.group.reported else [None]

    @property
    def said(self) -> int:
        """Tokens of the answer generated in this slot."""
        return len(self.answer.output) - self.spoken

    @property
    def asked(self) -> int:
        """Length of the prompt as sent; what follows was generated, even if it is prefilled again."""
        return len(self.group.prompt)

    @property
    def unread(self) -> int:
        """Maximum tokens of the next chunk: it ends where the prompt as sent does, or whole blocks, or
        media.
        """
        end = self.asked if self.computed < self.asked else self.prompt_length
        if self.slot is not None and self.in_blocks:
            end = self.slot.blocks_end
        return min(end, self.group.shown.border(self.computed)) - self.computed

    @property
    def in_blocks(self) -> bool:
        """Whether its next chunk is of whole blocks (`Runner.block`)."""
        return self.slot is not None and self.computed < self.slot.blocks_end

    @property
    def is_whole(self) -> bool:
        """Whether its next chunk cannot be cut."""
        return self.group.shown.is_whole(self.computed)

    @property
    def decoding(self) -> bool:
        return self.computed >= self.prompt_length

    @property
    def suspect(self) -> bool:
        """Whether a step with it has failed, and has not been computed since."""
        return bool(self.failed_at)

    def held(self) -> bool:
        """Whether the sequence it waits for is still computing the prefix."""
        other = self.held_by
        return other is not None and other.slot is not None and other.computed < self.held_until


def make_group(
    job: Job,
    sink: Sink,
    loop: asyncio.AbstractEventLoop,
    runner: Runner,
    ends: frozenset[int],
    pictures: "Pictures | None" = None,
) -> Group:
    """Create a group with its sequences. The scheduler sets their order of service."""
    prompt: Ids = np.array(job.prompt, np.int32)
    group = Group(job, sink, loop, prompt)
    if pictures is not None and job.media:
        group = Group(job, sink, loop, *pictures.show(job))
    room = runner.context - len(job.prompt)
    for index in range(job.n):
        answer = Continuation(job, index, prompt, vocabulary=runner.vocabulary, ends=ends, room=room)
        group.sequences.append(Sequence(group, index, (0, 0, index), answer))
    return group


def by_owner(sequences: Iterable[Sequence]) -> dict[str, list[Sequence]]:
    found: dict[str, list[Sequence]] = {}
    for sequence in sequences:
        found.setdefault(sequence.owner, []).append(sequence)
    return found


# One step before it is computed: which tokens of which sequences.


# Fixed cost of a pass, in tokens.
_PASS = 2


class StepPiece:
    """The part of a step for one sequence: its newest token with draft tokens, or a chunk of its prompt."""

    __slots__ = ("guesses", "newest", "outputs", "sequence", "size", "start")

    def __init__(self, sequence: Sequence, size: int) -> None:
        self.sequence = sequence
        self.start = sequence.computed
        self.size = size
        self.newest = sequence.answer.output[-1] if sequence.decoding else None
        """The token to compute; None for a chunk of a prompt."""
        self.guesses: list[int] = []
        if sequence.prompt_logprobs is not None and self.newest is None:
            self.outputs = size
        else:
            self.outputs = int(self.end >= sequence.prompt_length)

    @property
    def end(self) -> int:
        return self.start + self.size

    @property
    def answers(self) -> bool:
        """Whether it yields a token of the answer."""
        return self.newest is not None or self.end >= self.sequence.prompt_length

    def guess(self, tokens: list[int]) -> None:
        """Add draft tokens behind the newest token."""
        self.guesses = tokens
        self.size = self.outputs = 1 + len(tokens)

    def following(self, place: int) -> "StepPiece":
        """Return the piece for the next token of the answer, which is not known yet; `place` is its index
        in the sampling.
        """
        piece = StepPiece.__new__(StepPiece)
        piece.sequence, piece.start, piece.size, piece.outputs = self.sequence, self.start + self.size, 1, 1
        piece.newest, piece.guesses = ~place, []
        return piece

    def add_to(self, rows: Rows) -> None:
        sequence, slot, shown = self.sequence, self.sequence.slot, self.sequence.group.shown
        assert slot is not None
        index, position = slot.index, shown.position(self.start)
        rows.tables[index] = slot.pages
        rows.adapters[index] = sequence.group.job.adapters
        if self.newest is not None and not self.guesses:
            rows.add(index, position, self.newest, sequence.answer.heat)
            return
        if self.newest is None:
            tokens = sequence.prompt[self.start : self.end].tolist()
        else:
            tokens = [self.newest, *self.guesses]
        outputs = [self.outputs == self.size] * self.size
        outputs[-1] = bool(self.outputs)
        rows.extend(index, position, tokens, outputs, said=self.start >= sequence.asked)
        if self.start < slot.blocks_end:
            rows.in_blocks.add(index)
        if self.newest is None and (seen := shown.rows(self.start, self.end)) is not None:
            rows.shown[index] = seen

    def go_back(self) -> bool:
        """Undo an interrupted step; return whether a partly computed medium must begin again."""
        sequence = self.sequence
        begin = sequence.group.shown.begin(self.start)
        if begin == self.start or sequence.slot is None:
            return False
        sequence.computed = sequence.slot.length = begin
        return True

    def read(self) -> None:
        """Note that a chunk of the prompt has been computed."""
        self._note_written(self.sequence.prompt[self.start : self.end])

    def report_prompt(self, logits: Logits, first: int) -> None:
        """Record the log probabilities of the prompt, if requested: row i has that of id i + 1."""
        sequence = self.sequence
        found = sequence.prompt_logprobs
        if self.newest is not None or found is None or len(found) >= sequence.prompt_length:
            return
        top = sequence.group.job.sampling.prompt_logprobs or 0
        following = sequence.group.prompt[self.start + 1 : self.start + 1 + self.size].tolist()
        if isinstance(logits, RowsAway):
            found += logits.report(first, following, top)
            return
        rows = logits[first : first + self.outputs]
        found.extend(logprob(row, token, top) for row, token in zip(rows, following, strict=False))

    def followed(self, said: list[int]) -> int:
        """Note the newest token and the accepted draft tokens as computed; return how many were accepted."""
        sequence, right = self.sequence, max(0, len(said) - 1)
        if right or sequence.slot is None or self.newest is None:
            self._note_written(np.array([self.newest, *said[:right]], np.int32))
        else:
            # For one token this is much less work.
            sequence.slot.ids[self.start] = self.newest
            sequence.computed = sequence.slot.length = self.start + 1
        return right

    def _note_written(self, tokens: Ids) -> None:
        sequence = self.sequence
        assert sequence.slot is not None
        sequence.slot.write(self.start, tokens)
        sequence.computed = self.start + len(tokens)


class Plan:
    __slots__ = ("pieces",)

    def __init__(self, pieces: list[StepPiece]) -> None:
        self.pieces = pieces

    @property
    def counts(self) -> tuple[int, int]:
        """Rows of answers, and of prompts."""
        said = read = 0
        for piece in self.pieces:
            if piece.newest is None:
                read += piece.size
            else:
                said += piece.size
        return said, read

    @property
    def has_guesses(self) -> bool:
        """Whether any piece has draft tokens, so that the number of resulting ids is unknown."""
        return any(piece.guesses for piece in self.pieces)

    def rows(self) -> Rows:
        rows = Rows()
        for piece in self.pieces:
            piece.add_to(rows)
        return rows


def share_out(reading: list[Sequence], rows: int, outputs: int, block: int = 1) -> dict[Sequence, int]:
    """Divide a step of `rows` tokens and `outputs` extra rows of logits between prompts; returns the tokens
    of each. Whole blocks are not cut.

    Each owner has an equal part. A quarter of it goes to the shortest prompts, so that a short question does
    not wait behind a long document; the rest goes in the order of `reading`.
    """
    sizes: dict[Sequence, int] = {}

    def fill(queue: list[Sequence], most: int) -> None:
        nonlocal outputs
        for sequence in queue:
            already = sizes.get(sequence, 0)
            size = min(sequence.unread - already, most - sum(sizes.values()))
            if size < sequence.unread and sequence.is_whole:
                continue
            if sequence.prompt_logprobs is not None:
                size = min(size, outputs)
            if sequence.in_blocks:
                size -= size % block
            if sequence.prompt_logprobs is not None:
                outputs -= max(0, size)
            if size > 0:
                sizes[sequence] = already + size

    owners = by_owner(reading)
    for mine in owners.values():
        start, part = sum(sizes.values()), rows // len(owners)
        fill(sorted(mine, key=lambda each: each.unread), start + part // 4)
        fill(mine, start + part)
    fill(reading, rows)
    if reading and reading[0].is_whole and reading[0] not in sizes:
        # Its turn has come, however long it is; it then has the step for itself.
        return {reading[0]: reading[0].unread}
    return sizes


def level_apart(sizes: dict[Sequence, int]) -> dict[Sequence, int]:
    """Apply `level` to ids and to media separately, as they are not computed together."""
    shown = {one: size for one, size in sizes.items() if one.group.shown.is_shown(one.computed)}
    if not shown:
        return level(sizes)
    whole = {one: size for one, size in shown.items() if one.is_whole}
    ids = {one: size for one, size in sizes.items() if one not in shown}
    pieces = {one: size for one, size in shown.items() if one not in whole}
    return level(ids) | level(pieces) | whole


def level(sizes: dict[Sequence, int]) -> dict[Sequence, int]:
    """Cut chunks to one length if that pays, because each further length takes a pass of its own.

    `9, 10, 12` becomes `9, 9, 9`: the rest comes in the next step. `4, 27, 30` becomes `4, 27, 27`.
    """
    lengths = sorted(set(sizes.values()))

    def efficiency(most: int) -> float:
        tokens = sum(min(size, most) for size in sizes.values())
        passes = 1 + sum(length < most for length in lengths)
        return tokens / (tokens + passes * _PASS)

    common = max(lengths, key=efficiency, default=0)
    return {sequence: min(size, common) for sequence, size in sizes.items()}
