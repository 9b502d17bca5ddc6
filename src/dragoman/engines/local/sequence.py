"""The scheduler's nouns: a group is a job, a sequence is one of its continuations, a slot holds one."""

import asyncio
from collections.abc import Iterable
from itertools import count
from typing import TypeAlias

import numpy as np

from dragoman.engines.choosing.arrays import Ids
from dragoman.engines.choosing.continuation import Continuation
from dragoman.types import Job, Sink, TokenLogprob

Namespace: TypeAlias = tuple[object, ...]
_private = count()


class Slot:
    """A place for one sequence. After the sequence has ended its tokens stay, for others to build on."""

    __slots__ = ("chain", "ids", "index", "length", "namespace", "pages", "sequence", "used")

    def __init__(self, index: int, context: int) -> None:
        self.index = index
        self.ids: Ids = np.zeros(context, np.int32)
        self.length = 0
        self.namespace: Namespace = ()
        self.sequence: Sequence | None = None
        self.used = 0
        """When it was last in use, on the scheduler's count."""
        self.pages: list[int] = []
        """Where its tokens lie, for runners with pages."""
        self.chain: list[bytes] = []
        """What stands for the tokens up to the end of each full page."""

    def write(self, position: int, tokens: Ids) -> None:
        """Note that tokens have been computed from `position` on."""
        self.length = position + len(tokens)
        self.ids[position : self.length] = tokens


class Group:
    """A job on its way through the engine."""

    __slots__ = ("job", "loop", "namespace", "prompt", "reported", "sequences", "sink")

    def __init__(self, job: Job, sink: Sink, loop: asyncio.AbstractEventLoop) -> None:
        self.job = job
        self.sink = sink
        self.loop = loop
        self.prompt: Ids = np.array(job.prompt, np.int32)
        # A job that does not want to share has a namespace of its own: it neither reads what others left
        # nor leaves anything for them. Its own continuations still share their prompt.
        self.namespace: Namespace = (
            job.adapters,
            job.cache_salt,
            None if job.reuse_prefix else next(_private),
        )
        self.sequences: list[Sequence] = []
        self.reported = False
        """Whether the job's first step, which tells about its prompt, has been made."""


class Sequence:
    __slots__ = (
        "answer",
        "cached",
        "cancelled",
        "computed",
        "group",
        "held_by",
        "held_until",
        "index",
        "order",
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
        """Priority, arrival, index: who goes first."""
        self.answer = answer
        self.slot: Slot | None = None
        self.prompt: Ids = group.prompt
        self.prompt_length = len(group.prompt)
        self.computed = 0
        """Tokens in the slot. Once the prompt is done, all but the newest."""
        self.cached = 0
        self.cancelled = False
        self.spoken = 0
        """Tokens of the answer that were said when it got its slot."""
        self.trust = 0.5
        """How likely a guess at its next token is right, as far as guesses have shown."""
        self.held_by: Sequence | None = None
        """Another sequence that is computing a prefix this one can use, and how far it has to get."""
        self.held_until = 0
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        if index == 0 and group.job.sampling.prompt_logprobs is not None:
            self.prompt_logprobs = [None]

    def step_back(self) -> None:
        """Give up the slot, to begin again later with what has been said as part of the prompt."""
        self.slot = None
        self.computed = 0
        self.spoken = len(self.answer.output)
        self.prompt = np.concatenate([self.group.prompt, np.array(self.answer.output, np.int32)])
        self.prompt_length = len(self.prompt)
        if self.prompt_logprobs is not None:
            self.prompt_logprobs = None if self.group.reported else [None]

    @property
    def owner(self) -> str:
        return self.group.job.owner

    @property
    def said(self) -> int:
        """Tokens of the answer since it has its slot."""
        return len(self.answer.output) - self.spoken

    @property
    def asked(self) -> int:
        """Tokens that were sent; what follows them has been said, also where it is read again."""
        return len(self.group.prompt)

    @property
    def unread(self) -> int:
        """Tokens that one piece may have: it does not go over the end of what was sent."""
        return (self.asked if self.computed < self.asked else self.prompt_length) - self.computed

    @property
    def decoding(self) -> bool:
        return self.computed >= self.prompt_length

    def held(self) -> bool:
        """Whether the sequence it waits for is still on its way."""
        other = self.held_by
        return other is not None and other.slot is not None and other.computed < self.held_until


def by_owner(sequences: Iterable[Sequence]) -> dict[str, list[Sequence]]:
    found: dict[str, list[Sequence]] = {}
    for sequence in sequences:
        found.setdefault(sequence.owner, []).append(sequence)
    return found
