"""Which id comes next: for one continuation, for the rows of many at once, and for all of a step."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Protocol, runtime_checkable

import numpy as np
from msgspec import Struct, field

from dragoman.engines.choosing import BitMasking, Change, Ids, Logits, Places, RowRules
from dragoman.engines.choosing.edits import change_values, forbid_until
from dragoman.engines.choosing.sampler import (
    BLOCK,
    SEVERAL,
    NoTokenLeft,
    RowBlocks,
    Sampler,
    draw_few,
    heat_of,
    largest_ids,
    leaves_few,
)
from dragoman.engines.steps import join_steps
from dragoman.errors import BadRequest, ConstraintFailed, EngineFailed
from dragoman.types import FinishReason, Foreseeing, Job, Preparing, Sampling, Step, TokenLogprob

_log = logging.getLogger("dragoman.engine")
NOT_FINITE = -2
"""In the place of an id that was chosen elsewhere: the logits of its row were not numbers."""
_CANNOT = "The next token of this answer could not be chosen."

# One continuation of a job: which id comes next, and whether the answer ends there.


class Continuation:
    """`room` is how many ids the context has left after the prompt; `ends` are the model's own end ids."""

    __slots__ = (
        "_ends",
        "_matcher",
        "_most",
        "_sampler",
        "few",
        "foreseen",
        "heat",
        "index",
        "largest",
        "output",
        "plain",
        "sampling",
    )

    def __init__(
        self, job: Job, index: int, prompt: Ids, *, vocabulary: int, ends: frozenset[int], room: int
    ) -> None:
        sampling = self.sampling = job.sampling
        self.index = index
        self.output: list[int] = []
        self.foreseen: list[int] = []
        """What the constraint makes come next, as far as it has been worked out."""
        self._ends = ends
        self._most = min(sampling.max_tokens, room)
        self._sampler = Sampler(sampling, index, prompt, vocabulary, ends)
        matcher = self._matcher = None if job.constraint is None else job.constraint.start()
        if matcher is not None:
            if sampling.ignore_eos:
                # The answer goes on as long as the constraint lets it.
                self._sampler.add(forbid_until(ends, sampling.max_tokens))
            self._sampler.hold_to(matcher.mask)
        self.plain = self._sampler.drawable and not self._sampler.edited and self._most > 0
        """Whether row and `sampling` decide alone: then whoever has the row may choose, with `uniform`."""
        # The same, once `changes` have been made to the row: and those are made to single ids.
        simple = matcher is None and sampling.allowed_token_ids is None
        simple = simple and self._sampler.drawable and self._most > 0
        self.largest = simple and sampling.temperature <= 0
        """Whether it is the largest that is chosen then."""
        self.few = simple and leaves_few(sampling)
        """Whether it is drawn then, from few."""
        self.heat = heat_of(sampling) if self.few and self.plain and not sampling.min_p else 0.0
        """At what heat its row is summed up as it comes, where that is certain (`RowBlocks`); else 0."""

    def advance(self, row: Logits, token: int | None = None) -> Step:
        """Choose the next id, unless it has been chosen. A step with a finish is the last one."""
        if self._most <= 0:
            return Step([], self.index, finish="length")
        try:
            if token is None:
                token = self._sampler.sample(row, self.output)
        except NoTokenLeft:
            return Step([], self.index, finish="error", error=self._nothing_left())
        except ConstraintFailed as error:
            return Step([], self.index, finish="error", error=error)
        return self.take(token, None if self.sampling.logprobs is None else self._sampler.report(row, token))

    @property
    def constrained(self) -> bool:
        return self._matcher is not None

    def prepare(self, ahead: int) -> None:
        """Work out what the constraint lets come next, before there is a row. On any thread.

        And up to so many ids what has to come.
        """
        if isinstance(self._matcher, Preparing):
            self._matcher.prepare()
        if ahead and isinstance(self._matcher, Foreseeing):
            self.foreseen = self._matcher.foresee(ahead)

    @property
    def takes_largest(self) -> bool:
        """Whether the largest logit decides, and nothing else is asked of the row: then `take` is enough."""
        return self._sampler.takes_largest and self.sampling.logprobs is None and self._most > 0

    def changes(self) -> list[Change]:
        """What rules change in the next row; to be asked once for each id, and not before `advance`."""
        return self._sampler.changes(self.output)

    @property
    def ends_next(self) -> bool:
        """Whether the next id is the last one, whatever it is."""
        return len(self.output) + 1 >= self._most

    def rules(self) -> RowRules | None:
        """What changes the next row, as data, for one that `plain` does not describe; None where that takes
        the row itself. To be asked once for each id, and not where `advance` follows."""
        if not self._sampler.drawable or self._most <= 0:
            return None
        words = None
        if self._matcher is not None:
            if not isinstance(self._matcher, BitMasking):
                return None
            with suppress(ConstraintFailed):
                words = self._matcher.words()
            if words is None:
                return None
        return RowRules(self.changes(), words)

    def uniform(self) -> float:
        """The number in [0, 1) that decides the next draw."""
        return self._sampler.uniform()

    def give_back(self, uniforms: Sequence[float]) -> None:
        """The last ones decided nothing after all: the next draws have them."""
        self._sampler.give_back(uniforms)

    def took(self, token: int, logprob: TokenLogprob | None) -> Step:
        """`take`, of an id that was chosen elsewhere: there may have been none."""
        if token == NOT_FINITE:
            return Step([], self.index, finish="error", error=EngineFailed(_CANNOT))
        if token < 0:
            return Step([], self.index, finish="error", error=self._nothing_left())
        return self.take(token, logprob)

    def take(self, token: int, logprob: TokenLogprob | None = None) -> Step:
        """The id was chosen."""
        if self._matcher is not None:
            try:
                self._matcher.accept(token)
            except ConstraintFailed as error:
                return Step([], self.index, finish="error", error=error)
            self.foreseen = self.foreseen[1:] if self.foreseen[:1] == [token] else []
        self.output.append(token)
        finish, stop_id = self._finish(token)
        logprobs = None if logprob is None else [logprob]
        return Step([token], self.index, finish=finish, stop_id=stop_id, logprobs=logprobs)

    def _finish(self, token: int) -> tuple[FinishReason | None, int | None]:
        sampling, matcher = self.sampling, self._matcher
        # Under a constraint an end id can also be a marker in the middle of an answer.
        may_end = not sampling.ignore_eos if matcher is None else matcher.accepting
        if token in self._ends and may_end:
            return "stop", None
        if token in sampling.stop_token_ids:
            return "stop", token
        if matcher is not None and matcher.over:
            return "stop", None
        return ("length" if len(self.output) >= self._most else None), None

    def _nothing_left(self) -> BadRequest:
        why = "" if self._matcher is None else "the constraint of the answer, "
        message = (
            f"No token can come next after {len(self.output)} of the answer: {why}allowed_token_ids,"
            " bad_words, logit_bias, min_tokens and ignore_eos together forbid all of them."
        )
        return BadRequest(message, code="no_token_left")


# The choices of one step, and the masks of the next.
#
# What a constraint lets come next is known as soon as an id is chosen, long before there are logits for it.
# It is worked out outside of Python, so several threads do that while the model computes. All else about a
# choice is many short calls, in which threads would only wait for each other; so rows share them, where the
# runner gives what that takes (`draw_few`).


# With more answers a step is full of rows without guesses, so it is of no use to foresee ids.
_FORESEEN = 64


class TokenChoice(Struct):
    answer: Continuation
    row: int
    """Which of all rows says what may come next; those behind it, what may come after each guess."""
    guesses: Sequence[int] = ()

    def advance(self, logits: Logits, token: int | None = None) -> Step:
        """The next id, if it is not chosen yet; and as long as that was guessed, the one after it."""
        if token is not None and self.answer.sampling.logprobs is None:
            step = self.answer.take(token)
        else:
            step = self.answer.advance(logits[self.row], token)
        for row, guess in enumerate(self.guesses, self.row + 1):
            if step.finish is not None or step.ids[-1] != guess:
                break
            step = join_steps(step, self.answer.advance(logits[row]))
        return step

    def go_on(
        self, step: Step, found: Sequence[tuple[int, TokenLogprob | None]], uniforms: Sequence[float]
    ) -> Step:
        """The same after the first id, where what comes after each guess was chosen, by these numbers."""
        used = 0
        for guess, chosen in zip(self.guesses, found, strict=False):
            if step.finish is not None or step.ids[-1] != guess:
                break
            step = join_steps(step, self.answer.took(*chosen))
            used += 1
        self.answer.give_back(uniforms[used : len(self.guesses)])
        return step


class Choosers:
    def __init__(self, threads: int, ahead: int = 0) -> None:
        """`ahead`: so many ids that a constraint forces are of use before they are chosen."""
        self._ahead = ahead
        self._pool = ThreadPoolExecutor(threads, "dragoman-mask") if threads > 1 else None
        self._begun: list[Future[None]] = []

    def advance(
        self, choices: Sequence[TokenChoice], logits: Logits, blocks: RowBlocks | None = None
    ) -> list[Step]:
        """The next step of each continuation, in order."""
        self._wait()
        chosen = {} if blocks is None else _chosen(choices, logits, blocks)
        return self._told(choices, [_advance(choice, logits, chosen.get(choice.row)) for choice in choices])

    def begin(self, choices: Sequence[TokenChoice], logits: Logits, drawer: "Drawer") -> "Begun":
        """Have ids chosen where the rows are; what only Python can choose is chosen now.

        Where row and sampling decide alone, ids after all guesses are chosen at once, though only those count
        that come after right ones. Rules have to know what was said before.
        """
        self._wait()
        drawn, steps = Drawn([], [], []), {}
        for number, choice in enumerate(choices):
            answer, place, rules = choice.answer, len(drawn.rows), None
            if not answer.plain and (rules := answer.rules()) is None:
                steps[number] = _advance(choice, logits)
                drawn.known[place] = (steps[number].ids or [0])[-1]
            elif rules is not None:
                drawn.rules[place] = rules
            drawn.add(choice.row, answer.sampling, 0.0 if number in steps else answer.uniform())
            if choice.guesses and answer.plain:
                for row in range(choice.row + 1, choice.row + 1 + len(choice.guesses)):
                    drawn.add(row, answer.sampling, answer.uniform())
        return Begun(choices, logits, drawer, drawn, drawer.choose(drawn) if choices else None, steps)

    def finish(self, begun: "Begun") -> list[Step]:
        """Wait for what was begun: the next step of each continuation, in order."""
        return self._told(begun.choices, self._finish(begun))

    def _finish(self, begun: "Begun") -> list[Step]:
        steps, further = [], {}
        found = () if begun.pending is None else begun.pending.wait()
        place = 0
        for number, choice in enumerate(begun.choices):
            step, guesses = begun.steps.get(number), choice.guesses
            if step is None:
                step = choice.answer.took(*found[place])
                if guesses and choice.answer.plain:
                    step = choice.go_on(step, found[place + 1 :], begun.drawn.uniforms[place + 1 :])
                    place += len(guesses)
                elif guesses and step.finish is None and step.ids[-1] == guesses[0]:
                    further[number] = TokenChoice(choice.answer, choice.row + 1, guesses[1:])
            steps.append(step)
            place += 1
        if further:
            more = self._finish(self.begin([*further.values()], begun.logits, begun.drawer))
            for number, step in zip(further, more, strict=True):
                steps[number] = join_steps(steps[number], step)
        return steps

    def _wait(self) -> None:
        for begun in self._begun:
            if (error := begun.exception()) is not None:
                # The mask is computed again when it is needed; if that fails, that answer ends.
                _log.error("a mask could not be prepared", exc_info=error)

    def _told(self, choices: Sequence[TokenChoice], steps: list[Step]) -> list[Step]:
        both = zip(choices, steps, strict=True)
        self._begin([c.answer for c, step in both if c.answer.constrained and step.finish is None])
        return steps

    def _begin(self, constrained: Sequence[Continuation]) -> None:
        ahead = self._ahead if len(constrained) <= _FORESEEN else 0
        if self._pool is not None:
            self._begun = [self._pool.submit(answer.prepare, ahead) for answer in constrained]
        elif ahead:
            for answer in constrained:
                answer.prepare(ahead)

    def close(self) -> None:
        """What was begun is done, and its threads are gone."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


class Drawn(Struct):
    """What is to be chosen from rows of the last step, column by column."""

    rows: list[int]
    asked: list[Sampling]
    uniforms: list[float]
    rules: dict[int, RowRules] = field(default_factory=dict)
    """What changes a row first, by its place in the columns."""
    known: dict[int, int] = field(default_factory=dict)
    """Ids that have been chosen, by place."""

    def add(self, row: int, asked: Sampling, uniform: float) -> None:
        self.rows.append(row)
        self.asked.append(asked)
        self.uniforms.append(uniform)


class PendingIds(Protocol):
    def wait(self) -> Sequence[tuple[int, TokenLogprob | None]]:
        """The id of each row, and its log probability where that is asked for; -1 where none is left."""


@runtime_checkable
class Drawer(Protocol):
    """Chooses from the rows of the last step itself, where they are, and remembers the ids: in the next step
    the token `~place` is the one that was chosen at that place."""

    def choose(self, drawn: Drawn) -> PendingIds: ...


class Begun(Struct):
    choices: Sequence[TokenChoice]
    logits: Logits
    drawer: Drawer
    drawn: Drawn
    pending: PendingIds | None
    steps: dict[int, Step]
    """Those that are known, by the number of their choice."""


def _chosen(choices: Sequence[TokenChoice], logits: Logits, blocks: RowBlocks) -> dict[int, int | None]:
    """What can be chosen together, by row."""
    chosen: dict[int, int | None] = {}
    greedy = {choice.row: choice.answer for choice in choices if choice.answer.largest}
    few = {choice.row: choice.answer for choice in choices if choice.answer.few}
    several = [each for group in (greedy, few) if len(group) >= SEVERAL for each in group.items()]
    changes = [(row, answer.changes()) for row, answer in several if not answer.plain]
    with _changed(logits, blocks.maxima, changes):
        if len(greedy) >= SEVERAL:
            chosen.update(zip(greedy, largest_ids(logits, blocks.maxima, [*greedy]), strict=True))
        if len(few) >= SEVERAL:
            chosen.update(_draw_together(logits, blocks, few))
    return chosen


def _draw_together(
    logits: Logits, blocks: RowBlocks, few: Mapping[int, Continuation]
) -> dict[int, int | None]:
    """Where that fails, nothing is drawn: each row is drawn by itself then, by the same numbers."""
    sampling, uniforms = [one.sampling for one in few.values()], [one.uniform() for one in few.values()]
    try:
        return dict(zip(few, draw_few(logits, blocks, [*few], sampling, uniforms), strict=True))
    except Exception:
        _log.exception("rows could not be drawn together")
        for answer, uniform in zip(few.values(), uniforms, strict=True):
            answer.give_back([uniform])
        return {}


def _advance(choice: TokenChoice, logits: Logits, token: int | None = None) -> Step:
    """A fault of a sampler or a grammar ends the answer that has it, and no other."""
    try:
        return choice.advance(logits, token)
    except Exception:
        _log.exception("an answer could not be sampled")
        return Step([], choice.answer.index, finish="error", error=EngineFailed(_CANNOT))


@contextmanager
def _changed(
    logits: Logits, maxima: Logits, changes: Sequence[tuple[int, Sequence[Change]]]
) -> Iterator[None]:
    """Have rules applied to their rows: the first of all rows at once, then the second, as far as there are.

    Rows are as they were afterwards; the maxima of changed blocks are not.
    """
    rows = [(row * logits.shape[1], of_row) for row, of_row in changes if of_row]
    values, blocks = logits.reshape(-1), logits.reshape(-1, BLOCK)
    before: list[tuple[Places, Logits]] = []
    for turn in range(max((len(of_row) for _, of_row in rows), default=0)):
        now = [(start, of_row[turn]) for start, of_row in rows if turn < len(of_row)]
        places = np.concatenate([start + change.places for start, change in now])
        old = values[places]
        before.append((places, old))
        values[places] = new = change_values(old, [change for _, change in now])
        touched = places // BLOCK
        most = maxima.reshape(-1)[touched]
        # To look through a block takes long, and most changes are to ids that are not the largest of theirs.
        touched = touched[(old >= most) | (new > most)]
        maxima.reshape(-1)[touched] = blocks.take(touched, axis=0).max(axis=1)
    try:
        yield
    finally:
        for places, old in reversed(before):
            values[places] = old
