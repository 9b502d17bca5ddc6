"""Sampling of one continuation, of many rows at once, and of a whole step."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Protocol, runtime_checkable

import numpy as np
from msgspec import Struct, field

from dragoman.engines.sampling import BitmaskMatcher, Ids, Indices, Logits, LogitsChange, RowChanges
from dragoman.engines.sampling.logits_processors import change_values, forbid_until
from dragoman.engines.sampling.sampler import (
    BLOCK,
    SEVERAL,
    BlockStats,
    NoTokenLeft,
    Sampler,
    draw_few,
    heat_of,
    largest_ids,
    leaves_few,
)
from dragoman.engines.steps import join_steps
from dragoman.errors import BadRequest, ConstraintFailed, EngineFailed
from dragoman.types import (
    FinishReason,
    ForcedTokenMatcher,
    Job,
    PrecomputableMatcher,
    Sampling,
    Step,
    TokenLogprob,
)

_log = logging.getLogger("dragoman.engine")
NOT_FINITE = -2
"""Replaces an id sampled on a device: the logits of its row were not finite."""
_CANNOT = "The next token of this answer could not be sampled."

# One continuation of a job: which id comes next, and whether the answer ends there.


class Continuation:
    """One answer during generation. `room`: ids left in the context after the prompt; `ends`: the model's
    end ids.
    """

    __slots__ = (
        "_ends",
        "_matcher",
        "_most",
        "_sampler",
        "draws_from_few",
        "forced_ids",
        "index",
        "inverse_temperature",
        "is_greedy",
        "output",
        "samples_raw_row",
        "sampling",
    )

    def __init__(
        self, job: Job, index: int, prompt: Ids, *, vocabulary: int, ends: frozenset[int], room: int
    ) -> None:
        sampling = self.sampling = job.sampling
        self.index = index
        self.output: list[int] = []
        self.forced_ids: list[int] = []
        """The next ids that the constraint makes inevitable, as far as known."""
        self._ends = ends
        self._most = min(sampling.max_tokens, room)
        self._sampler = Sampler(sampling, index, prompt, vocabulary, ends)
        matcher = self._matcher = None if job.constraint is None else job.constraint.new_matcher()
        if matcher is not None:
            if sampling.ignore_eos:
                # The answer continues as long as the constraint allows it.
                self._sampler.add(forbid_until(ends, sampling.max_tokens))
            self._sampler.set_mask(matcher.mask)
        self.samples_raw_row = (
            self._sampler.has_standard_filters and not self._sampler.has_changes and self._most > 0
        )
        """Whether the row and `sampling` alone decide, so that ids may be sampled elsewhere, with
        `uniform`.
        """
        # The same, once `changes` have been applied to the row, which change only single ids.
        simple = matcher is None and sampling.allowed_token_ids is None
        simple = simple and self._sampler.has_standard_filters and self._most > 0
        self.is_greedy = simple and sampling.temperature <= 0
        """Whether the result is then the largest."""
        self.draws_from_few = simple and leaves_few(sampling)
        """Whether the result is then drawn from few candidates."""
        self.inverse_temperature = (
            heat_of(sampling) if self.draws_from_few and self.samples_raw_row and not sampling.min_p else 0.0
        )
        """Inverse temperature at which the total of its unmodified row will be needed for certain
        (`BlockStats`); else 0.
        """

    def advance(self, row: Logits, token: int | None = None) -> Step:
        """Sample the next id, unless `token` is given. A step with a finish is the last one."""
        if self._most <= 0:
            return Step([], self.index, finish="length")
        try:
            if token is None:
                token = self._sampler.sample(row, self.output)
        except NoTokenLeft:
            return Step([], self.index, finish="error", error=self._nothing_left())
        except ConstraintFailed as error:
            return Step([], self.index, finish="error", error=error)
        return self.accept(
            token, None if self.sampling.logprobs is None else self._sampler.report(row, token)
        )

    @property
    def constrained(self) -> bool:
        return self._matcher is not None

    def prepare(self, ahead: int) -> None:
        """Compute the constraint's next mask, before there is a row, and up to `ahead` inevitable ids. On
        any thread.
        """
        if isinstance(self._matcher, PrecomputableMatcher):
            self._matcher.precompute_mask()
        if ahead and isinstance(self._matcher, ForcedTokenMatcher):
            self.forced_ids = self._matcher.forced_tokens(ahead)

    @property
    def is_pure_greedy(self) -> bool:
        """Whether the largest logit decides and no log probability is requested: then `accept` is enough."""
        return self._sampler.is_pure_greedy and self.sampling.logprobs is None and self._most > 0

    def changes(self) -> list[LogitsChange]:
        """Return the processors' changes to the next row; to be called once for each id, and not before
        `advance`.
        """
        return self._sampler.changes(self.output)

    @property
    def is_last_token(self) -> bool:
        """Whether the next id is the last one, whatever it is."""
        return len(self.output) + 1 >= self._most

    def row_changes(self) -> RowChanges | None:
        """Return the changes to the next row as data, if `samples_raw_row` is False; None if they need the
        row itself. To be called once for each id, and not if `advance` follows.
        """
        if not self._sampler.has_standard_filters or self._most <= 0:
            return None
        words = None
        if self._matcher is not None:
            if not isinstance(self._matcher, BitmaskMatcher):
                return None
            with suppress(ConstraintFailed):
                words = self._matcher.bitmask()
            if words is None:
                return None
        return RowChanges(self.changes(), words)

    def uniform(self) -> float:
        """Return the number in [0, 1) that decides the next draw."""
        return self._sampler.uniform()

    def return_uniforms(self, uniforms: Sequence[float]) -> None:
        """Return random numbers that were not used, for the next draws."""
        self._sampler.return_uniforms(uniforms)

    def accept_sampled(self, token: int, logprob: TokenLogprob | None) -> Step:
        """Do the same as `accept` for an id sampled elsewhere, which may be missing."""
        if token == NOT_FINITE:
            return Step([], self.index, finish="error", error=EngineFailed(_CANNOT))
        if token < 0:
            return Step([], self.index, finish="error", error=self._nothing_left())
        return self.accept(token, logprob)

    def accept(self, token: int, logprob: TokenLogprob | None = None) -> Step:
        """Append an id and return its step."""
        if self._matcher is not None:
            try:
                self._matcher.accept(token)
            except ConstraintFailed as error:
                return Step([], self.index, finish="error", error=error)
            self.forced_ids = self.forced_ids[1:] if self.forced_ids[:1] == [token] else []
        self.output.append(token)
        finish, stop_id = self._finish(token)
        logprobs = None if logprob is None else [logprob]
        return Step([token], self.index, finish=finish, stop_id=stop_id, logprobs=logprobs)

    def _finish(self, token: int) -> tuple[FinishReason | None, int | None]:
        sampling, matcher = self.sampling, self._matcher
        # Under a constraint an end id can also be a marker in the middle of an answer.
        may_end = not sampling.ignore_eos if matcher is None else matcher.is_accepting
        if token in self._ends and may_end:
            return "stop", None
        if token in sampling.stop_token_ids:
            return "stop", token
        if matcher is not None and matcher.is_complete:
            return "stop", None
        return ("length" if len(self.output) >= self._most else None), None

    def _nothing_left(self) -> BadRequest:
        why = "" if self._matcher is None else "the constraint of the answer, "
        message = (
            f"No token can follow after {len(self.output)} of the answer: {why}allowed_token_ids,"
            " bad_words, logit_bias, min_tokens and ignore_eos together forbid all of them."
        )
        return BadRequest(message, code="no_token_left")


# The sampling of one step, and the masks of the next.
#
# A constraint's mask is known as soon as an id is sampled, long before there are logits for it. Masks are
# computed outside of Python, so several threads do that while the model computes. The rest of sampling is
# many short calls, in which threads would only wait for each other; so rows share the calls, if the runner
# returns the required data (`draw_few`).


# Answers up to which inevitable ids are computed: with more, steps have no rows left for draft tokens.
_FORESEEN = 64


class TokenChoice(Struct):
    answer: Continuation
    row: int
    """Row of logits for the next id; the rows behind it are for the ids after each draft token."""
    guesses: Sequence[int] = ()

    def advance(self, logits: Logits, token: int | None = None) -> Step:
        """Sample the next id, unless `token` is given; and as long as it equals the draft token, the one
        after it.
        """
        if token is not None and self.answer.sampling.logprobs is None:
            step = self.answer.accept(token)
        else:
            step = self.answer.advance(logits[self.row], token)
        for row, guess in enumerate(self.guesses, self.row + 1):
            if step.finish is not None or step.ids[-1] != guess:
                break
            step = join_steps(step, self.answer.advance(logits[row]))
        return step

    def go_on(
        self, step: Step, items: Sequence[tuple[int, TokenLogprob | None]], uniforms: Sequence[float]
    ) -> Step:
        """Continue after the first id, with the ids sampled after each draft token by these random
        numbers.
        """
        used = 0
        for guess, chosen in zip(self.guesses, items, strict=False):
            if step.finish is not None or step.ids[-1] != guess:
                break
            step = join_steps(step, self.answer.accept_sampled(*chosen))
            used += 1
        self.answer.return_uniforms(uniforms[used : len(self.guesses)])
        return step


class StepSampler:
    def __init__(self, threads: int, ahead: int = 0) -> None:
        """`ahead`: how many inevitable ids are useful before they are sampled."""
        self._ahead = ahead
        self._pool = ThreadPoolExecutor(threads, "dragoman-mask") if threads > 1 else None
        self._begun: list[Future[None]] = []

    def advance(
        self, choices: Sequence[TokenChoice], logits: Logits, blocks: BlockStats | None = None
    ) -> list[Step]:
        """Return the next step of each continuation, in order."""
        self._wait()
        chosen = {} if blocks is None else _chosen(choices, logits, blocks)
        return self._told(choices, [_advance(choice, logits, chosen.get(choice.row)) for choice in choices])

    def begin(
        self, choices: Sequence[TokenChoice], logits: Logits, drawer: "DeviceSampler"
    ) -> "InFlightSampling":
        """Start sampling where the rows are; what only Python can sample is sampled now.

        If row and sampling alone decide, the ids after all draft tokens are sampled at once, though only
        those after accepted ones count. Processors need to know the ids before.
        """
        self._wait()
        drawn, steps = SamplingBatch([], [], []), {}
        for number, choice in enumerate(choices):
            answer, index, rules = choice.answer, len(drawn.rows), None
            if not answer.samples_raw_row and (rules := answer.row_changes()) is None:
                steps[number] = _advance(choice, logits)
                drawn.known[index] = (steps[number].ids or [0])[-1]
            elif rules is not None:
                drawn.row_changes[index] = rules
            drawn.add(choice.row, answer.sampling, 0.0 if number in steps else answer.uniform())
            if choice.guesses and answer.samples_raw_row:
                for row in range(choice.row + 1, choice.row + 1 + len(choice.guesses)):
                    drawn.add(row, answer.sampling, answer.uniform())
        return InFlightSampling(
            choices, logits, drawer, drawn, drawer.choose(drawn) if choices else None, steps
        )

    def finish(self, begun: "InFlightSampling") -> list[Step]:
        """Wait for the sampling that was started; return the next step of each continuation, in order."""
        return self._told(begun.choices, self._finish(begun))

    def _finish(self, begun: "InFlightSampling") -> list[Step]:
        steps, further = [], {}
        items = () if begun.pending is None else begun.pending.wait()
        index = 0
        for number, choice in enumerate(begun.choices):
            step, guesses = begun.steps.get(number), choice.guesses
            if step is None:
                step = choice.answer.accept_sampled(*items[index])
                if guesses and choice.answer.samples_raw_row:
                    step = choice.go_on(step, items[index + 1 :], begun.drawn.uniforms[index + 1 :])
                    index += len(guesses)
                elif guesses and step.finish is None and step.ids[-1] == guesses[0]:
                    further[number] = TokenChoice(choice.answer, choice.row + 1, guesses[1:])
            steps.append(step)
            index += 1
        if further:
            more = self._finish(self.begin([*further.values()], begun.logits, begun.drawer))
            for number, step in zip(further, more, strict=True):
                steps[number] = join_steps(steps[number], step)
        return steps

    def _wait(self) -> None:
        for begun in self._begun:
            if (error := begun.exception()) is not None:
                # The mask is computed again when it is needed; if that fails, that answer ends.
                _log.error("Cannot prepare a mask", exc_info=error)

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
        """Finish the running work and stop the threads."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


class SamplingBatch(Struct):
    """What to sample from rows of the last step, as columns."""

    rows: list[int]
    asked: list[Sampling]
    uniforms: list[float]
    row_changes: dict[int, RowChanges] = field(default_factory=dict)
    """Changes to a row, by its index in the columns."""
    known: dict[int, int] = field(default_factory=dict)
    """Ids that are sampled already, by index."""

    def add(self, row: int, asked: Sampling, uniform: float) -> None:
        self.rows.append(row)
        self.asked.append(asked)
        self.uniforms.append(uniform)


class PendingIds(Protocol):
    def wait(self) -> Sequence[tuple[int, TokenLogprob | None]]:
        """Return the id of each row, and its log probability if requested; -1 if all ids are forbidden."""


@runtime_checkable
class DeviceSampler(Protocol):
    """Samples from the rows of the last step on its device, and keeps the ids: in the next step the token
    `~place` refers to the id that was sampled at that index.
    """

    def choose(self, drawn: SamplingBatch) -> PendingIds: ...


class InFlightSampling(Struct):
    choices: Sequence[TokenChoice]
    logits: Logits
    drawer: DeviceSampler
    drawn: SamplingBatch
    pending: PendingIds | None
    steps: dict[int, Step]
    """Steps that are known already, by the index of their choice."""


def _chosen(choices: Sequence[TokenChoice], logits: Logits, blocks: BlockStats) -> dict[int, int | None]:
    """Sample what can be sampled together; returns ids by row."""
    chosen: dict[int, int | None] = {}
    greedy = {choice.row: choice.answer for choice in choices if choice.answer.is_greedy}
    few = {choice.row: choice.answer for choice in choices if choice.answer.draws_from_few}
    several = [each for group in (greedy, few) if len(group) >= SEVERAL for each in group.items()]
    changes = [(row, answer.changes()) for row, answer in several if not answer.samples_raw_row]
    with _changed(logits, blocks.maxima, changes):
        if len(greedy) >= SEVERAL:
            chosen.update(zip(greedy, largest_ids(logits, blocks.maxima, [*greedy]), strict=True))
        if len(few) >= SEVERAL:
            chosen.update(_draw_together(logits, blocks, few))
    return chosen


def _draw_together(
    logits: Logits, blocks: BlockStats, few: Mapping[int, Continuation]
) -> dict[int, int | None]:
    """Sample rows together. If that fails, return none: each row is then sampled alone, with the same
    random numbers.
    """
    sampling, uniforms = [one.sampling for one in few.values()], [one.uniform() for one in few.values()]
    try:
        return dict(zip(few, draw_few(logits, blocks, [*few], sampling, uniforms), strict=True))
    except Exception:
        _log.exception("Cannot sample rows together")
        for answer, uniform in zip(few.values(), uniforms, strict=True):
            answer.return_uniforms([uniform])
        return {}


def _advance(choice: TokenChoice, logits: Logits, token: int | None = None) -> Step:
    """Sample one answer. A failure of its sampler or grammar ends this answer, and no other."""
    try:
        return choice.advance(logits, token)
    except Exception:
        _log.exception("Cannot sample an answer")
        return Step([], choice.answer.index, finish="error", error=EngineFailed(_CANNOT))


@contextmanager
def _changed(
    logits: Logits, maxima: Logits, changes: Sequence[tuple[int, Sequence[LogitsChange]]]
) -> Iterator[None]:
    """Apply changes to their rows during the block: the first change of all rows at once, then the second,
    and so on.

    Rows are restored afterwards; the maxima of changed blocks are not.
    """
    rows = [(row * logits.shape[1], of_row) for row, of_row in changes if of_row]
    values, blocks = logits.reshape(-1), logits.reshape(-1, BLOCK)
    before: list[tuple[Indices, Logits]] = []
    for turn in range(max((len(of_row) for _, of_row in rows), default=0)):
        now = [(start, of_row[turn]) for start, of_row in rows if turn < len(of_row)]
        indices = np.concatenate([start + change.ids for start, change in now])
        old = values[indices]
        before.append((indices, old))
        values[indices] = new = change_values(old, [change for _, change in now])
        touched = indices // BLOCK
        most = maxima.reshape(-1)[touched]
        # Scanning a block takes long, and most changes are to ids that are not the largest of their block.
        touched = touched[(old >= most) | (new > most)]
        maxima.reshape(-1)[touched] = blocks.take(touched, axis=0).max(axis=1)
    try:
        yield
    finally:
        for indices, old in reversed(before):
            values[indices] = old
