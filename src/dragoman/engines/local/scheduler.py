"""Continuous batching: which sequences are computed in the next step, and what its results mean for them.

The problem. A model computes many rows in one call nearly as fast as one, so all running answers are computed
together. They come and go at any time, though, and are at different points: one has a prompt of ten thousand
ids to prefill, the next one needs a single row for its next token.

The idea. Time is cut into steps. A job is a `SequenceGroup` of `n` sequences, each of which is one answer: it
waits, it runs in a slot (its part of the KV cache), and it leaves when it ends. `step` is one round:

    _admit     give slots to waiting sequences
    _pieces    what each running sequence computes now: a chunk of its prompt, or one row for its newest
               token; `_with_room` allocates memory for it, `Speculator.add_drafts` may add rows of draft
               tokens
    _compute   one call of the runner: rows in, logits out
    _read      sample the next token of each sequence whose prompt is done; those that ended free their slot

    sequence   slot   step 1           step 2           step 3
    A          0      decodes          decodes          decodes, and ends
    B          1      prompt 0-511     prompt 512-803   decodes
    C          -      waits            waits            waits; has slot 0 from step 4 on

If ids are sampled on another device (`DeviceSampler`), the next step can begin there before the host knows
them: its rows refer to the sampled ids. So the results of a step are read while the next one is computed. The
round is then:

    _follow    begin the next step (`_plan_after`, `_begin`) of the sequences that certainly continue; prompts
               are prefilled in it, too
    _land      read the step before: fetch its ids, report them, remove sequences that ended
    _choose    sample ids for the step that was begun, on the device; constraints and masks are known now

A sequence that ends at an unforeseen id is already part of the next step; the result of that row is
discarded. Draft tokens depend on known ids, so where they are worth it, the step before is read first.

Results of a step are collected (`_say`) and taken by the engine thread after it (`take`), which passes all of
them to the event loop at once. A step waits for nothing but the computation.

Rules of this file:
- Sequences that decode are in every step of their adapters; prompts share the rest of the step.
- A prompt is cut into chunks, which are small while others decode, so that no answer stalls for long.
- Prompts are prefilled in the order of service, but a part of each step is for the shortest.
- Owners have equal shares: of slots and turns (see fair_share.py), and of a step's prefill.
- Where rows cost little, sequences that decode add draft tokens.
- Chunks are of ids or of media. A sequence that waits for media to be encoded has no slot meanwhile.
- If memory runs out, the sequences that came last are preempted, first those of the owner with the most.
- If the runner applies one set of adapters to all rows of a step, the sets take turns.
- Rows are in the order of their slots, because the native library splits a step where slots are not adjacent.
- While nothing else is to be done, answers are prefilled for requests that will continue them (see
  idle_prefill.py).
- A step that was interrupted has no effect: its chunks are scheduled again. If the runner cannot interrupt a
  step, steps are short: about 10 ms for idle prefill, about 250 ms for prompts alone.
- A step that failed is retried before any client gets an error, each of its sequences alone, so that only the
  one that cannot be computed ends with an error (see `_recover` and step_guard.py).
- Everything runs on the engine thread.
"""

import logging
import math
import time
from bisect import insort
from collections.abc import Mapping, Set
from itertools import count
from typing import TYPE_CHECKING

from msgspec import Struct

from dragoman.engines.local.draft_model import Drafter
from dragoman.engines.local.fair_share import (
    AdapterRotation,
    FairShareLedger,
    PrefillPacer,
    SlotAssignment,
    pick_victim,
)
from dragoman.engines.local.idle_prefill import IdlePrefill
from dragoman.engines.local.kv_cache import KVCache, SlotKVCache
from dragoman.engines.local.paged_kv_cache import PagedKVCache
from dragoman.engines.local.runner import AnyRunner, PagedRunner, StepFailed, StepInterrupted
from dragoman.engines.local.sequence import (
    ScheduledTokens,
    Sequence,
    SequenceGroup,
    StepPlan,
    level_apart,
    split_prefill,
)
from dragoman.engines.local.speculation import Speculator
from dragoman.engines.local.step_guard import StepGuard
from dragoman.engines.protocol import EngineFaults
from dragoman.engines.sampling import Logits
from dragoman.engines.sampling.batched import DeviceSampler, InFlightSampling, StepSampler, TokenChoice
from dragoman.errors import DragomanError, EngineFailed
from dragoman.types import FinishReason, Step

if TYPE_CHECKING:
    from dragoman.engines.local.encoder_cache import EncoderCache, EncoderCacheEntry

_log = logging.getLogger("dragoman.engine")
_NOTHING: Mapping[Sequence, ScheduledTokens] = {}
QUIET_STEP_S, _QUIET_ROWS = 0.010, 8
"""Target time and minimum rows of an idle prefill step, because the next request waits until it is over."""
ALONE_STEP_S, _ALONE_ROWS = 0.25, 64
"""The same for steps with only prompts, where they cannot be interrupted. With fewer rows than these, the
weights would be read too often.
"""
_CANNOT = "The model could not compute this answer."


class InFlightStep(Struct):
    """A step that is being computed on another device; its results have not been read yet."""

    plan: StepPlan
    logits: Logits
    began: float
    answering: list[ScheduledTokens] = []
    """The chunks for which ids are being sampled; `begun` is that sampling."""
    begun: InFlightSampling | None = None


class Scheduler:
    def __init__(
        self,
        runner: AnyRunner,
        *,
        batch: int,
        chunk: int,
        choosers: int = 1,
        guesses: int = 0,
        drafter: Drafter | None = None,
        pictures: "EncoderCache | None" = None,
        pause: float = math.inf,
    ) -> None:
        self._runner = runner
        self._guard = StepGuard(runner)
        self._batch = batch
        self._chunk = chunk
        self._memory: KVCache = (
            PagedKVCache(runner) if isinstance(runner, PagedRunner) else SlotKVCache(runner)
        )
        self._guesser = Speculator(runner, self._memory, guesses, drafter)
        self._choosers = StepSampler(choosers, self._guesser.most)
        self._drawer = runner if isinstance(runner, DeviceSampler) else None
        self.rereading = IdlePrefill(runner)
        """Answers to prefill while the engine is idle."""
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._suspects: set[Sequence] = set()
        """Sequences whose last step failed."""
        self._suspects_turn = False
        self._failures_in_a_row = 0
        """Answers that ended because they could not be computed, with no good step in between."""
        self._turns = AdapterRotation()
        self._pictures = pictures
        self._pause = pause
        self._pace = PrefillPacer()
        self.account = FairShareLedger()
        self._arrivals = count()
        self._flight: InFlightStep | None = None
        """The step that is being computed on the device."""
        self._landed = 0.0
        self._out: list[tuple[SequenceGroup, Step]] = []
        self.weight_version: str | None = None
        """Version of the weights, if set."""
        self.in_step: list[Sequence] = []
        """The sequences in the step that is being computed. May be read by other threads."""

    @property
    def busy(self) -> bool:
        runs = self._running or self._flight is not None
        return bool(runs) or any(not one.group.shown.waits for one in self._waiting)

    @property
    def faults(self) -> EngineFaults:
        """Counters of failures in steps. May be read by other threads."""
        return self._guard.faults

    @property
    def kv_usage(self) -> float:
        """Fraction of the KV cache used by running sequences. May be read by other threads."""
        return self._memory.used

    def start_idle_prefill(self) -> None:
        """Start an idle prefill, when nothing else is to be done; any request interrupts it."""
        group = self.rereading.take()
        if group is not None and self._memory.allocate(group.sequences[0]):
            self._running.append(group.sequences[0])

    def cancel_idle_prefill(self) -> None:
        """Interrupt the idle prefill, because there is work."""
        for sequence in [one for one in self._running if one.group.is_idle_prefill]:
            self._leave(sequence)
            self.rereading.again(sequence.group)

    def add(self, group: SequenceGroup) -> None:
        self.cancel_idle_prefill()
        arrival = next(self._arrivals)
        self.account.on_arrival(group.job.owner)
        for sequence in group.sequences:
            sequence.order = (group.job.priority, arrival, sequence.index)
            insort(self._waiting, sequence, key=_order)

    def drop_cancelled(self) -> None:
        for sequence in [s for s in self._waiting + self._running if s.cancelled]:
            self._end(sequence, "abort")

    def end_all(self, finish: FinishReason, error: DragomanError | None = None) -> None:
        """End all sequences, finally. It relies on no state, because it may follow an error."""
        ended = dict.fromkeys(self._waiting + self._running)
        self._waiting, self._running, self._flight = [], [], None
        for sequence in ended:
            sequence.group.sequences.remove(sequence)
            self._say(sequence, Step([], sequence.index, finish=finish, error=error))

    def close(self) -> None:
        self._choosers.close()
        self._guesser.close()

    def take(self) -> list[tuple[SequenceGroup, Step]]:
        """Return the steps collected since the last call."""
        out, self._out = self._out, []
        return out

    @property
    def owners(self) -> set[str]:
        """Owners of running sequences."""
        return {sequence.owner for sequence in self._running}

    def uses_adapter(self, adapter: str) -> bool:
        """Whether any running or waiting sequence uses this adapter."""
        jobs = (sequence.group.job for sequence in self._waiting + self._running)
        return any(adapter == name for job in jobs for name, _ in job.adapters)

    def step(self, beside: Set[str] = frozenset()) -> None:
        """Compute one step and collect its results. `beside`: owners of other work, such as embeddings."""
        began = time.perf_counter()
        if self._flight is not None and self._follow(self._flight, beside):
            return
        self.synchronize()
        self._admit()
        if self._memory.gather():
            self._running.sort(key=_slot_index)
        encoding = self._pictures is not None and self._pictures.encoding
        plan = StepPlan(self._with_room(self._pieces(beside, encoding)))
        self._guesser.add_drafts(plan.pieces)
        if not plan.pieces:
            return
        if self._drawer is not None:
            flight = self._begin(plan, began)
            self._flight = None if flight is None else self._choose(flight, self._drawer)
            return
        began = time.perf_counter()
        logits = self._compute(plan)
        if logits is not None:
            self._took(plan, time.perf_counter() - began, encoding)
            self._read(plan, logits)

    def _begin(self, plan: StepPlan, began: float) -> InFlightStep | None:
        """Start a step on the device. Work there is done in order, so what is begun counts as written."""
        logits = self._compute(plan)
        if logits is None:
            return None
        self._note_read(plan)
        return InFlightStep(plan, logits, began)

    def _compute(self, plan: StepPlan) -> Logits | None:
        """Compute a step; None if it was interrupted or failed."""
        self.in_step = [piece.sequence for piece in plan.pieces]
        try:
            return self._guard.step(plan.rows())
        except StepInterrupted:
            self._go_back(plan.pieces)
        except StepFailed:
            # The results of the step before it are read first: its ids were sampled, and count.
            self.synchronize()
            self._recover(plan.pieces)
        finally:
            self.in_step = []
        return None

    def _took(self, plan: StepPlan, seconds: float, encoding: bool = False) -> None:
        self.account.charge_step(plan.pieces, seconds)
        self._pace.took(*plan.counts, encoding, seconds)
        self._guesser.record_step(plan.pieces, seconds)

    def synchronize(self) -> None:
        """Read the results of the step in flight, so that none is being computed."""
        flight, self._flight = self._flight, None
        if flight is not None:
            self._land(flight)

    def _follow(self, flight: InFlightStep, beside: Set[str]) -> bool:
        """Start the step after the one in flight, and read the results of that meanwhile. Returns False if
        that is not possible: if sequences may have to be admitted, or it is not certain which ones
        continue.
        """
        assert self._drawer is not None
        if self._waiting and (self._memory.idle or self._are_several()):
            return False
        plan = self._plan_after(flight, beside)
        if plan is None:
            return False
        following = self._begin(plan, time.perf_counter())
        if following is not None and all(piece.sequence.answer.samples_raw_row for piece in plan.pieces):
            self._choose(following, self._drawer)
        rebuilds = self.faults.rebuilds
        self.synchronize()
        if self.faults.rebuilds > rebuilds:
            # The new step belongs to the old runner.
            return True
        for piece in plan.pieces:
            if piece.input_token is not None and piece.sequence.slot is not None:
                piece.input_token = piece.sequence.answer.output[-1]
        if following is not None:
            self._flight = following if following.begun is not None else self._choose(following, self._drawer)
        return True

    def _plan_after(self, flight: InFlightStep, beside: Set[str]) -> StepPlan | None:
        if flight.plan.has_guesses:
            return None
        answering = enumerate(flight.answering)
        pieces = [piece.following(index) for index, piece in answering if piece.sequence.slot is not None]
        if len(pieces) < len(self._running):
            following = {piece.sequence: piece for piece in pieces}
            if any(one.decoding and one not in following for one in self._running):
                return None
            pieces = self._pieces(beside, False, following)
        pieces = [
            piece for piece in pieces if piece.input_token is None or not piece.sequence.answer.is_last_token
        ]
        if not pieces or self._guesser.needs_known_ids(pieces):
            return None
        for piece in pieces:
            slot = piece.sequence.slot
            if slot is None or not self._memory.reserve(slot, piece.end):
                return None
        return StepPlan(pieces)

    def _choose(self, flight: InFlightStep, drawer: DeviceSampler) -> InFlightStep:
        """Sample ids on the device for the step in flight, for sequences that have not left meanwhile."""
        row, choices = 0, []
        flight.answering = []
        for piece in flight.plan.pieces:
            row += piece.outputs
            if piece.yields_token and piece.sequence.slot is not None:
                flight.answering.append(piece)
                guesses = piece.drafts
                choices.append(TokenChoice(piece.sequence.answer, row - 1 - len(guesses), guesses))
        flight.begun = self._choosers.begin(choices, flight.logits, drawer)
        return flight

    def _land(self, flight: InFlightStep) -> None:
        assert flight.begun is not None
        try:
            steps = self._choosers.finish(flight.begun)
        except Exception as error:
            # A device reports a failed step when its results are fetched. Everything computed after it is
            # invalid.
            self._guard.note(error, "a step on the device")
            self._rebuild()
            return
        now = time.perf_counter()
        self._took(flight.plan, now - max(flight.began, self._landed))
        self._landed = now
        row = 0
        for piece in flight.plan.pieces:
            piece.report_prompt(flight.logits, row)
            row += piece.outputs
        for piece, step in zip(flight.answering, steps, strict=True):
            if piece.sequence.slot is not None:
                self._tell(piece, step)

    def discard_cache(self) -> None:
        """Discard everything computed, because the weights have changed. Running answers prefill their
        prompts and their own tokens again.
        """
        self.synchronize()
        self.cancel_idle_prefill()
        self.rereading.clear()
        for sequence in [*self._running]:
            self._step_back(sequence)
        self._memory.clear()

    def _recover(self, pieces: list[ScheduledTokens]) -> None:
        """Handle a step that raised: retry its sequences alone, or end one that failed alone."""
        ended = [piece for piece in pieces if self._retry_or_end(piece)]
        if ended or not self._guard.reset():
            self._rebuild()

    def recover_embedding(self, error: Exception, *, again: bool) -> bool:
        """Handle a failed step of an embedding; return whether to retry it."""
        self._guard.note(error, "a step of an embedding")
        self.synchronize()
        if not again or not self._guard.reset():
            self._rebuild()
        return again

    def _retry_or_end(self, piece: ScheduledTokens) -> bool:
        """Preempt a sequence to compute it alone; if it was alone already, end it. Returns whether it
        ended.
        """
        sequence, slot = piece.sequence, piece.sequence.slot
        if slot is None:
            return False
        self._memory.discard(slot)
        if sequence.group.is_idle_prefill:
            self._leave(sequence)
            return False
        if sequence in self._suspects:
            self._failures_in_a_row += 1
            self._end(sequence, "error", EngineFailed(_CANNOT))
            return True
        sequence.failed_at = piece.end
        self._suspects.add(sequence)
        self._step_back(sequence)
        return False

    def _rebuild(self) -> None:
        """Recreate the runner. Running answers wait for it, and continue."""
        self.discard_cache()
        self._guard.rebuild()
        self._failures_in_a_row = 0

    def _failed_rows(self, plan: StepPlan, logits: Logits) -> set[ScheduledTokens]:
        """Return the chunks whose logits are not finite. They are retried; the others keep their results."""
        rows = self._guard.rows_without_numbers(logits)
        if not rows:
            self._failures_in_a_row = 0
            return set()
        failed, row = set[ScheduledTokens](), 0
        for piece in plan.pieces:
            if any(row <= bad < row + piece.outputs for bad in rows):
                failed.add(piece)
            row += piece.outputs
        for piece in failed:
            if piece.sequence.slot is not None:
                self._memory.distrust(piece.sequence.slot)
            self._retry_or_end(piece)
        if self._failures_in_a_row > 1:
            self._rebuild()
            return {*plan.pieces}
        return failed

    def _trust_again(self) -> None:
        """Clear suspects that have passed the point at which their step failed."""
        for sequence in [one for one in self._suspects if one.computed >= one.failed_at]:
            sequence.failed_at = 0
            self._suspects.discard(sequence)

    def on_media_encoded(self, picture: "EncoderCacheEntry") -> None:
        """Handle media that were encoded, or could not be."""
        for shown in picture.take_in():
            for one in [one for one in self._waiting + self._running if one.group.shown is shown]:
                if picture.error is not None:
                    self._end(one, "error", picture.error)
        self._look_again()

    def _look_again(self) -> None:
        for one in self._waiting:
            one.group.shown.waits = False

    def _let_go(self, group: SequenceGroup) -> None:
        """Release media once all sequences of a group have prefilled them."""
        if all(one.decoding for one in group.sequences) and group.shown.release():
            self._look_again()

    def _go_back(self, pieces: list[ScheduledTokens]) -> None:
        for piece in pieces:
            slot = piece.sequence.slot
            if slot is not None and piece.roll_back():
                self._memory.truncate(slot)

    def _admit(self) -> None:
        """Give slots to waiting sequences."""
        if not self._waiting or not (self._memory.idle or self._are_several()):
            return
        assignment = SlotAssignment(self._memory, self._running, self._waiting, self._step_back)
        assignment.give()
        if assignment.placed:
            self._waiting = [sequence for sequence in self._waiting if sequence not in assignment.placed]
            for sequence in assignment.placed:
                insort(self._running, sequence, key=_slot_index)

    def _are_several(self) -> bool:
        """Whether a sequence waits whose owner differs from that of another running or waiting one."""
        owner = self._waiting[0].owner
        return any(one.owner != owner for one in self._running) or any(
            one.owner != owner for one in self._waiting
        )

    def _pieces(
        self, beside: Set[str], encoding: bool, following: Mapping[Sequence, ScheduledTokens] = _NOTHING
    ) -> list[ScheduledTokens]:
        """Return what each sequence computes next. `following`: pieces of sequences whose newest token is
        not known yet.
        """
        mine = self._running if not self._suspects else self._apart()
        if self._runner.adapters and not self._runner.batches_adapters:
            adapters = self._turns.next(mine)
            mine = [s for s in mine if s.group.job.adapters == adapters]
        reading = self.account.prefill_candidates(mine, self.owners | beside)
        sizes = self._sizes(mine, sorted(reading, key=_order), encoding) if reading else {}
        due = [sequence for sequence in mine if sequence.decoding or sequence in sizes]
        return [following.get(one) or ScheduledTokens(one, sizes.get(one, 1)) for one in due]

    def _apart(self) -> list[Sequence]:
        """In every other step, return one sequence whose last step failed, alone; else all others."""
        self._suspects_turn = not self._suspects_turn
        others = [one for one in self._running if one not in self._suspects]
        suspects = [one for one in self._running if one in self._suspects]
        return suspects[:1] if self._suspects_turn or not others else others

    def _sizes(self, mine: list[Sequence], reading: list[Sequence], encoding: bool) -> dict[Sequence, int]:
        """Decide how much of each prompt to prefill now, beside the answers among `mine`."""
        alone = len(reading) == len(mine) and not self.account.is_contended
        rows = self._rows_alone(mine[0].group.is_idle_prefill, encoding) if alone else self._chunk
        if any(one.decoding for one in self._running):
            # Including those with other adapters, whose turn is another one.
            answers, most = sum(one.decoding for one in mine), self._longest
            rows = int(min(self._chunk, self._pace.rows(answers, encoding, self._pause, most)))
        rows, block = max(rows, self._runner.prefill_block), self._runner.prefill_block
        sizes = split_prefill(reading, rows, self._runner.max_outputs - self._runner.slots, block)
        return level_apart(sizes) if self._runner.wants_equal_chunks else sizes

    def _rows_alone(self, quiet: bool, encoding: bool) -> int:
        """Return the rows of a step that only prefills."""
        if self._runner.interruptible:
            return self._chunk if quiet else self._batch
        least, seconds = (_QUIET_ROWS, QUIET_STEP_S) if quiet else (_ALONE_ROWS, ALONE_STEP_S)
        rows = self._pace.rows(0, encoding, seconds)
        return int(min(self._chunk if quiet else self._batch, max(least, rows)))

    @property
    def _longest(self) -> float:
        """Maximum seconds for which answers may stand still, whatever the pace."""
        return math.inf if self._pictures is None else self._pictures.pause

    def _with_room(self, pieces: list[ScheduledTokens]) -> list[ScheduledTokens]:
        """Return the pieces for which there is memory, preempting the sequences that came last."""
        growing = [piece for piece in pieces if not self._memory.has(piece.sequence.slot, piece.end)]
        for piece in sorted(growing, key=lambda piece: piece.sequence.order):
            while (slot := piece.sequence.slot) is not None and not self._memory.reserve(slot, piece.end):
                self._step_back(pick_victim(self._running))
        return [piece for piece in pieces if piece.sequence.slot is not None]

    def _step_back(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self._running.remove(sequence)
        self._memory.release(sequence.slot)
        sequence.preempt()
        insort(self._waiting, sequence, key=_order)

    def _read(self, plan: StepPlan, logits: Logits) -> None:
        """Go through the rows of logits, in the plan's order, and sample the next tokens."""
        failed = self._failed_rows(plan, logits)
        self._note_read(plan, failed)
        row = 0
        answering: list[ScheduledTokens] = []
        choices: list[TokenChoice] = []
        for piece in plan.pieces:
            end = row + piece.outputs
            if piece in failed:
                row = end
                continue
            if piece.input_token is None:
                piece.report_prompt(logits, row)
            if piece.sequence.decoding:
                answering.append(piece)
                choices.append(TokenChoice(piece.sequence.answer, end - 1 - len(piece.drafts), piece.drafts))
            row = end
        steps = self._choosers.advance(choices, logits, self._runner.block_stats)
        for piece, step in zip(answering, steps, strict=True):
            self._tell(piece, step)
        if self._suspects:
            self._trust_again()

    def _tell(self, piece: ScheduledTokens, step: Step) -> None:
        if piece.input_token is not None:
            self._keep_followed(piece, step)
        if step.finish is not None:
            if step.finish == "stop":
                self.rereading.note(piece.sequence)
            self._leave(piece.sequence)
        self._say(piece.sequence, step)

    def _keep_followed(self, piece: ScheduledTokens, step: Step) -> None:
        """Keep the newest token and the draft tokens that were accepted."""
        sequence = piece.sequence
        right = piece.accept_drafts(step.ids)
        self._guesser.record_outcome(piece, step.ids, right)
        assert sequence.slot is not None
        if right < len(piece.drafts):
            self._memory.truncate(sequence.slot)
        self._memory.commit(sequence.slot)

    def _note_read(self, plan: StepPlan, failed: Set[ScheduledTokens] = frozenset()) -> None:
        """Note that chunks of prompts are in their slots."""
        for piece in plan.pieces:
            slot = piece.sequence.slot
            if piece.input_token is None and slot is not None and piece not in failed:
                piece.read()
                self._memory.commit(slot)
                self._let_go(piece.sequence.group)

    def _say(self, sequence: Sequence, step: Step) -> None:
        group = sequence.group
        if group.is_idle_prefill:
            return
        step.weight_version = self.weight_version
        if not group.reported:
            group.reported = True
            step.cached_tokens = sequence.cached
            step.prompt_logprobs = sequence.prompt_logprobs
        self._out.append((group, step))

    def _end(self, sequence: Sequence, finish: FinishReason, error: DragomanError | None = None) -> None:
        self._leave(sequence)
        self._say(sequence, Step([], sequence.index, finish=finish, error=error))

    def _leave(self, sequence: Sequence) -> None:
        """Remove a sequence from wherever it is, and drop all references to it: grammars are not left for
        the garbage collector.
        """
        sequence.group.sequences.remove(sequence)
        self._suspects.discard(sequence)
        if sequence.slot is None:
            self._waiting.remove(sequence)
        else:
            self._running.remove(sequence)
            self._memory.release(sequence.slot)
            sequence.slot = None
        self._let_go(sequence.group)


def _order(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.order


def _slot_index(sequence: Sequence) -> int:
    assert sequence.slot is not None
    return sequence.slot.index
