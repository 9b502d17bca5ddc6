"""Data of the scheduler: a group is a job, a sequence one of its continuations, a plan one step of all."""

import asyncio
from collections.abc import Iterable
from itertools import count
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from dragoman.engines.local.runner import DeviceLogits, MediaRows, Runner, StepRows
from dragoman.engines.protocol import BACKGROUND_PRIORITY, background_owner
from dragoman.engines.sampling import Ids, Logits
from dragoman.engines.sampling.batched import Continuation
from dragoman.engines.sampling.sampler import logprob
from dragoman.types import UNBOUNDED, Job, Sink, TokenLogprob

if TYPE_CHECKING:
    from dragoman.engines.local.encoder_cache import EncoderCache

Namespace: TypeAlias = tuple[object, ...]
_private = count()


class Slot:
    """Memory for one sequence. When the sequence has ended, its tokens stay cached for others."""

    __slots__ = (
        "blocks_end",
        "ids",
        "index",
        "length",
        "namespace",
        "page_hashes",
        "pages",
        "sequence",
        "used",
    )

    def __init__(self, index: int, context: int) -> None:
        self.index = index
        self.ids: Ids = np.zeros(context, np.int32)
        self.length = 0
        self.blocks_end = 0
        """Where the whole blocks of its prompt end, for runners that use blocks (`Runner.prefill_block`)."""
        self.namespace: Namespace = ()
        self.sequence: Sequence | None = None
        self.used = 0
        """When it was last released, on the cache's clock."""
        self.pages: list[int] = []
        """Its pages in order, for runners with pages."""
        self.page_hashes: list[bytes] = []
        """Hash of the tokens up to the end of each full page."""

    def write(self, position: int, tokens: Ids) -> None:
        """Note that tokens have been computed from `position` on."""
        self.length = position + len(tokens)
        self.ids[position : self.length] = tokens


NOT_IDS = 1 << 30
"""Numbers from here on represent rows of media in prompts, derived from their contents, so that prompts
can be compared as if they were all ids.
"""


class PromptMedia:
    """Media rows of a prompt; this class is for prompts without any, `encoder_cache.py` has the other.

    Offsets count rows, and are used by the scheduler. Positions are what the model counts, and may be fewer.
    """

    __slots__ = ("waits",)

    def __init__(self) -> None:
        self.waits = False
        """Whether something has to be encoded before the prefill can continue."""

    def border(self, index: int) -> int:
        """Return the next offset behind this one at which media rows begin or end."""
        return UNBOUNDED

    def begin(self, index: int) -> int:
        """Return where to truncate a prefix of this length: a prefix cannot end within media."""
        return index

    def position(self, index: int) -> int:
        return index

    def is_shown(self, index: int) -> bool:
        """Whether the row at this offset belongs to media."""
        return False

    def is_whole(self, index: int) -> bool:
        """Whether the chunk that begins here cannot be cut."""
        return False

    def rows(self, start: int, end: int) -> MediaRows | None:
        """Return the media rows to compute instead of ids."""
        return None

    def request_media(self, length: int) -> bool:
        """Whether all media behind a prefix are encoded; requests the encoding of those that are not."""
        return True

    def release(self) -> bool:
        """Release the encoded media, which have been prefilled; return whether there were any."""
        return False


class SequenceGroup:
    """A job in the engine."""

    __slots__ = (
        "is_idle_prefill",
        "job",
        "loop",
        "namespace",
        "prompt",
        "reported",
        "sequences",
        "shown",
        "sink",
    )

    def __init__(
        self,
        job: Job,
        sink: Sink,
        loop: asyncio.AbstractEventLoop,
        prompt: Ids,
        shown: PromptMedia | None = None,
    ) -> None:
        self.job = job
        self.sink = sink
        self.loop = loop
        self.prompt = prompt
        self.shown = shown or PromptMedia()
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
        self.is_idle_prefill = False
        """Whether it is an idle prefill (`IdlePrefill`), which no client has requested."""


class Sequence:
    __slots__ = (
        "acceptance_rate",
        "answer",
        "cached",
        "cancelled",
        "computed",
        "failed_at",
        "generated_before_slot",
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
    )

    def __init__(
        self, group: SequenceGroup, index: int, order: tuple[int, int, int], answer: Continuation
    ) -> None:
        self.group = group
        self.index = index
        self.order = order
        """Order of service: priority, arrival, index."""
        job = group.job
        self.owner = job.owner if job.priority < BACKGROUND_PRIORITY else background_owner(job.owner)
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
        self.generated_before_slot = 0
        """Tokens of the answer generated before it got its slot."""
        self.acceptance_rate: float | None = None
        """Acceptance rate of its draft tokens; None before the first."""
        self.held_by: Sequence | None = None
        """Another sequence that is computing a prefix this one can use, until it has `held_until` tokens."""
        self.held_until = 0
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        if index == 0 and group.job.sampling.prompt_logprobs is not None:
            self.prompt_logprobs = [None]

    def preempt(self) -> None:
        """Preempt the sequence: it gives up its slot, and will prefill its own tokens as part of the
        prompt.
        """
        self.slot = None
        self.computed = 0
        self.generated_before_slot = len(self.answer.output)
        self.prompt = np.concatenate([self.group.prompt, np.array(self.answer.output, np.int32)])
        self.prompt_length = len(self.prompt)
        if self.prompt_logprobs is not None:
            self.prompt_logprobs = None if self.group.reported else [None]

    @property
    def generated(self) -> int:
        """Tokens of the answer generated in this slot."""
        return len(self.answer.output) - self.generated_before_slot

    @property
    def sent_length(self) -> int:
        """Length of the prompt as sent; what follows was generated, even if it is prefilled again."""
        return len(self.group.prompt)

    @property
    def max_chunk(self) -> int:
        """Maximum tokens of the next chunk: it ends where the prompt as sent does, or whole blocks, or
        media.
        """
        end = self.sent_length if self.computed < self.sent_length else self.prompt_length
        if self.slot is not None and self.in_blocks:
            end = self.slot.blocks_end
        return min(end, self.group.shown.border(self.computed)) - self.computed

    @property
    def in_blocks(self) -> bool:
        """Whether its next chunk is of whole blocks (`Runner.prefill_block`)."""
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

    def is_blocked(self) -> bool:
        """Whether the sequence it waits for is still computing the prefix."""
        other = self.held_by
        return other is not None and other.slot is not None and other.computed < self.held_until


def make_group(
    job: Job,
    sink: Sink,
    loop: asyncio.AbstractEventLoop,
    runner: Runner,
    ends: frozenset[int],
    pictures: "EncoderCache | None" = None,
) -> SequenceGroup:
    """Create a group with its sequences. The scheduler sets their order of service."""
    prompt: Ids = np.array(job.prompt, np.int32)
    group = SequenceGroup(job, sink, loop, prompt)
    if pictures is not None and job.media:
        group = SequenceGroup(job, sink, loop, *pictures.show(job))
    room = runner.context - len(job.prompt)
    for index in range(job.n):
        answer = Continuation(job, index, prompt, vocabulary=runner.vocabulary, ends=ends, room=room)
        group.sequences.append(Sequence(group, index, (0, 0, index), answer))
    return group


def by_owner(sequences: Iterable[Sequence]) -> dict[str, list[Sequence]]:
    fields: dict[str, list[Sequence]] = {}
    for sequence in sequences:
        fields.setdefault(sequence.owner, []).append(sequence)
    return fields


# One step before it is computed: which tokens of which sequences.


# Fixed cost of a pass, in tokens.
_PASS = 2


class ScheduledTokens:
    """The part of a step for one sequence: its newest token with draft tokens, or a chunk of its prompt."""

    __slots__ = ("drafts", "input_token", "outputs", "sequence", "size", "start")

    def __init__(self, sequence: Sequence, size: int) -> None:
        self.sequence = sequence
        self.start = sequence.computed
        self.size = size
        self.input_token = sequence.answer.output[-1] if sequence.decoding else None
        """The token to compute; None for a chunk of a prompt."""
        self.drafts: list[int] = []
        if sequence.prompt_logprobs is not None and self.input_token is None:
            self.outputs = size
        else:
            self.outputs = int(self.end >= sequence.prompt_length)

    @property
    def end(self) -> int:
        return self.start + self.size

    @property
    def yields_token(self) -> bool:
        """Whether it yields a token of the answer."""
        return self.input_token is not None or self.end >= self.sequence.prompt_length

    def add_drafts(self, tokens: list[int]) -> None:
        """Add draft tokens behind the newest token."""
        self.drafts = tokens
        self.size = self.outputs = 1 + len(tokens)

    def following(self, index: int) -> "ScheduledTokens":
        """Return the piece for the next token of the answer, which is not known yet; `place` is its index
        in the sampling.
        """
        piece = ScheduledTokens.__new__(ScheduledTokens)
        piece.sequence, piece.start, piece.size, piece.outputs = self.sequence, self.start + self.size, 1, 1
        piece.input_token, piece.drafts = ~index, []
        return piece

    def add_to(self, rows: StepRows) -> None:
        sequence, slot, shown = self.sequence, self.sequence.slot, self.sequence.group.shown
        assert slot is not None
        index, position = slot.index, shown.position(self.start)
        rows.tables[index] = slot.pages
        rows.adapters[index] = sequence.group.job.adapters
        if self.input_token is not None and not self.drafts:
            rows.add(index, position, self.input_token, sequence.answer.inverse_temperature)
            return
        if self.input_token is None:
            tokens = sequence.prompt[self.start : self.end].tolist()
        else:
            tokens = [self.input_token, *self.drafts]
        outputs = [self.outputs == self.size] * self.size
        outputs[-1] = bool(self.outputs)
        rows.extend(index, position, tokens, outputs, outcome=self.start >= sequence.sent_length)
        if self.start < slot.blocks_end:
            rows.in_blocks.add(index)
        if self.input_token is None and (seen := shown.rows(self.start, self.end)) is not None:
            rows.media_rows[index] = seen

    def roll_back(self) -> bool:
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
        logprobs = sequence.prompt_logprobs
        if self.input_token is not None or logprobs is None or len(logprobs) >= sequence.prompt_length:
            return
        top = sequence.group.job.sampling.prompt_logprobs or 0
        following = sequence.group.prompt[self.start + 1 : self.start + 1 + self.size].tolist()
        if isinstance(logits, DeviceLogits):
            logprobs += logits.report(first, following, top)
            return
        rows = logits[first : first + self.outputs]
        logprobs.extend(logprob(row, token, top) for row, token in zip(rows, following, strict=False))

    def accept_drafts(self, numbers: list[int]) -> int:
        """Note the newest token and the accepted draft tokens as computed; return how many were accepted."""
        sequence, right = self.sequence, max(0, len(numbers) - 1)
        if right or sequence.slot is None or self.input_token is None:
            self._note_written(np.array([self.input_token, *numbers[:right]], np.int32))
        else:
            # For one token this is much less work.
            sequence.slot.ids[self.start] = self.input_token
            sequence.computed = sequence.slot.length = self.start + 1
        return right

    def _note_written(self, tokens: Ids) -> None:
        sequence = self.sequence
        assert sequence.slot is not None
        sequence.slot.write(self.start, tokens)
        sequence.computed = self.start + len(tokens)


class StepPlan:
    __slots__ = ("pieces",)

    def __init__(self, pieces: list[ScheduledTokens]) -> None:
        self.pieces = pieces

    @property
    def counts(self) -> tuple[int, int]:
        """Rows of answers, and of prompts."""
        number = read = 0
        for piece in self.pieces:
            if piece.input_token is None:
                read += piece.size
            else:
                number += piece.size
        return number, read

    @property
    def has_guesses(self) -> bool:
        """Whether any piece has draft tokens, so that the number of resulting ids is unknown."""
        return any(piece.drafts for piece in self.pieces)

    def rows(self) -> StepRows:
        rows = StepRows()
        for piece in self.pieces:
            piece.add_to(rows)
        return rows


def split_prefill(reading: list[Sequence], rows: int, outputs: int, block: int = 1) -> dict[Sequence, int]:
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
            size = min(sequence.max_chunk - already, most - sum(sizes.values()))
            if size < sequence.max_chunk and sequence.is_whole:
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
        fill(sorted(mine, key=lambda each: each.max_chunk), start + part // 4)
        fill(mine, start + part)
    fill(reading, rows)
    if reading and reading[0].is_whole and reading[0] not in sizes:
        # Its turn has come, however long it is; it then has the step for itself.
        return {reading[0]: reading[0].max_chunk}
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
