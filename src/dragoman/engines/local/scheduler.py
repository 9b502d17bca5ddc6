"""Continuous batching: which sequences are computed in the next step, and what its results mean for them.

The problem. A model computes many rows in one call nearly as fast as one, so all running answers are computed
together. They come and go at any time, though, and are at different points: one has a prompt of ten thousand
ids to prefill, the next one needs a single row for its next token.

The idea. Time is cut into steps. A job is a `Group` of `n` sequences, each of which is one answer: it waits,
it runs in a slot (its part of the KV cache), and it leaves when it ends. `step` is one round:

    _admit     give slots to waiting sequences
    _pieces    what each running sequence computes now: a chunk of its prompt, or one row for its newest
               token; `_with_room` allocates memory for it, `Guesser.add_to` may add rows of draft tokens
    _compute   one call of the runner: rows in, logits out
    _read      sample the next token of each sequence whose prompt is done; those that ended free their slot

    sequence   slot   step 1           step 2           step 3
    A          0      decodes          decodes          decodes, and ends
    B          1      prompt 0-511     prompt 512-803   decodes
    C          -      waits            waits            waits; has slot 0 from step 4 on

If ids are sampled on another device (`Drawer`), the next step can begin there before the host knows them: its
rows refer to the sampled ids. So the results of a step are read while the next one is computed. The
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
- Owners have equal shares: of slots and turns (see shares.py), and of a step's prefill.
- Where rows cost little, sequences that decode add draft tokens.
- Chunks are of ids or of media. A sequence that waits for media to be encoded has no slot meanwhile.
- If memory runs out, the sequences that came last are preempted, first those of the owner with the most.
- If the runner applies one set of adapters to all rows of a step, the sets take turns.
- Rows are in the order of their slots, because the native library splits a step where slots are not adjacent.
- While nothing else is to be done, answers are prefilled for requests that will continue them (see
  rereading.py).
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

from dragoman.engines.choosing import Logits
from dragoman.engines.choosing.together import Begun, Choosers, Drawer, TokenChoice
from dragoman.engines.local.drafting import Drafter
from dragoman.engines.local.guessing import Guesser
from dragoman.engines.local.memory import Memory, Slots
from dragoman.engines.local.paging import Paging
from dragoman.engines.local.rereading import Rereading
from dragoman.engines.local.runner import AnyRunner, PagedRunner, StepFailed, StepInterrupted
from dragoman.engines.local.sequence import Group, Plan, Sequence, StepPiece, level_apart, share_out
from dragoman.engines.local.shares import Account, Pace, Places, Turns, last_of_most
from dragoman.engines.local.step_guard import StepGuard
from dragoman.engines.protocol import EngineFaults
from dragoman.errors import DragomanError, EngineFailed
from dragoman.types import FinishReason, Step

if TYPE_CHECKING:
    from dragoman.engines.local.pictures import Picture, Pictures

_log = logging.getLogger("dragoman.engine")
_NOTHING: Mapping[Sequence, StepPiece] = {}
QUIET_STEP_S, _QUIET_ROWS = 0.010, 8
"""Target time and minimum rows of an idle prefill step, because the next request waits until it is over."""
ALONE_STEP_S, _ALONE_ROWS = 0.25, 64
"""The same for steps with only prompts, where they cannot be interrupted. With fewer rows than these, the
weights would be read too often.
"""
_CANNOT = "The model could not compute this answer."


class Flight(Struct):
    """A step that is being computed on another device; its results have not been read yet."""

    plan: Plan
    logits: Logits
    began: float
    answering: list[StepPiece] = []
    """The chunks for which ids are being sampled; `begun` is that sampling."""
    begun: Begun | None = None


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
        pictures: "Pictures | None" = None,
        pause: float = math.inf,
    ) -> None:
        self._runner = runner
        self._guard = StepGuard(runner)
        self._batch = batch
        self._chunk = chunk
        self._memory: Memory = Paging(runner) if isinstance(runner, PagedRunner) else Slots(runner)
        self._guesser = Guesser(runner, self._memory, guesses, drafter)
        self._choosers = Choosers(choosers, self._guesser.most)
        self._drawer = runner if isinstance(runner, Drawer) else None
        self.rereading = Rereading(runner)
        """Answers to prefill while the engine is idle."""
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._suspects: set[Sequence] = set()
        """Sequences whose last step failed."""
        self._suspects_turn = False
        self._failures_in_a_row = 0
        """Answers that ended because they could not be computed, with no good step in between."""
        self._turns = Turns()
        self._pictures = pictures
        self._pause = pause
        self._pace = Pace()
        self.account = Account()
        self._arrivals = count()
        self._flight: Flight | None = None
        """The step that is being computed on the device."""
        self._landed = 0.0
        self._out: list[tuple[Group, Step]] = []
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

    def reread(self) -> None:
        """Start an idle prefill, when nothing else is to be done; any request interrupts it."""
        group = self.rereading.take()
        if group is not None and self._memory.place(group.sequences[0]):
            self._running.append(group.sequences[0])

    def make_way(self) -> None:
        """Interrupt the idle prefill, because there is work."""
        for sequence in [one for one in self._running if one.group.quiet]:
            self._leave(sequence)
            self.rereading.again(sequence.group)

    def add(self, group: Group) -> None:
        self.make_way()
        arrival = next(self._arrivals)
        self.account.came(group.job.owner)
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

    def take(self) -> list[tuple[Group, Step]]:
        """Return the steps collected since the last call."""
        out, self._out = self._out, []
        return out

    @property
    def owners(self) -> set[str]:
        """Owners of running sequences."""
        return {sequence.owner for sequence in self._running}

    def names(self, adapter: str) -> bool:
        """Whether any running or waiting sequence uses this adapter."""
        jobs = (sequence.group.job for sequence in self._waiting + self._running)
        return any(adapter == name for job in jobs for name, _ in job.adapters)

    def step(self, beside: Set[str] = frozenset()) -> None:
        """Compute one step and collect its results. `beside`: owners of other work, such as embeddings."""
        began = time.perf_counter()
        if self._flight is not None and self._follow(self._flight, beside):
            return
        self.settle()
        self._admit()
        if self._memory.gather():
            self._running.sort(key=_slot_index)
        encoding = self._pictures is not None and self._pictures.encoding
        plan = Plan(self._with_room(self._pieces(beside, encoding)))
        self._guesser.add_to(plan.pieces)
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

    def _begin(self, plan: Plan, began: float) -> Flight | None:
        """Start a step on the device. Work there is done in order, so what is begun counts as written."""
        logits = self._compute(plan)
        if logits is None:
            return None
        self._note_read(plan)
        return Flight(plan, logits, began)

    def _compute(self, plan: Plan) -> Logits | None:
        """Compute a step; None if it was interrupted or failed."""
        self.in_step = [piece.sequence for piece in plan.pieces]
        try:
            return self._guard.step(plan.rows())
        except StepInterrupted:
            self._go_back(plan.pieces)
        except StepFailed:
            # The results of the step before it are read first: its ids were sampled, and count.
            self.settle()
            self._recover(plan.pieces)
        finally:
            self.in_step = []
        return None

    def _took(self, plan: Plan, seconds: float, encoding: bool = False) -> None:
        self.account.stepped(plan.pieces, seconds)
        self._pace.took(*plan.counts, encoding, seconds)
        self._guesser.took(plan.pieces, seconds)

    def settle(self) -> None:
        """Read the results of the step in flight, so that none is being computed."""
        flight, self._flight = self._flight, None
        if flight is not None:
            self._land(flight)

    def _follow(self, flight: Flight, beside: Set[str]) -> bool:
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
        if following is not None and all(piece.sequence.answer.plain for piece in plan.pieces):
            self._choose(following, self._drawer)
        rebuilds = self.faults.rebuilds
        self.settle()
        if self.faults.rebuilds > rebuilds:
            # The new step belongs to the old runner.
            return True
        for piece in plan.pieces:
            if piece.newest is not None and piece.sequence.slot is not None:
                piece.newest = piece.sequence.answer.output[-1]
        if following is not None:
            self._flight = following if following.begun is not None else self._choose(following, self._drawer)
        return True

    def _plan_after(self, flight: Flight, beside: Set[str]) -> Plan | None:
        if flight.plan.has_guesses:
            return None
        answering = enumerate(flight.answering)
        pieces = [piece.following(place) for place, piece in answering if piece.sequence.slot is not None]
        if len(pieces) < len(self._running):
            following = {piece.sequence: piece for piece in pieces}
            if any(one.decoding and one not in following for one in self._running):
                return None
            pieces = self._pieces(beside, False, following)
        pieces = [piece for piece in pieces if piece.newest is None or not piece.sequence.answer.ends_next]
        if not pieces or self._guesser.wants_ids(pieces):
            return None
        for piece in pieces:
            slot = piece.sequence.slot
            if slot is None or not self._memory.extend(slot, piece.end):
                return None
        return Plan(pieces)

    def _choose(self, flight: Flight, drawer: Drawer) -> Flight:
        """Sample ids on the device for the step in flight, for sequences that have not left meanwhile."""
        row, choices = 0, []
        flight.answering = []
        for piece in flight.plan.pieces:
            row += piece.outputs
            if piece.answers and piece.sequence.slot is not None:
                flight.answering.append(piece)
                guesses = piece.guesses
                choices.append(TokenChoice(piece.sequence.answer, row - 1 - len(guesses), guesses))
        flight.begun = self._choosers.begin(choices, flight.logits, drawer)
        return flight

    def _land(self, flight: Flight) -> None:
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

    def start_over(self) -> None:
        """Discard everything computed, because the weights have changed. Running answers prefill their
        prompts and their own tokens again.
        """
        self.settle()
        self.make_way()
        self.rereading.clear()
        for sequence in [*self._running]:
            self._step_back(sequence)
        self._memory.clear()

    def _recover(self, pieces: list[StepPiece]) -> None:
        """Handle a step that raised: retry its sequences alone, or end one that failed alone."""
        ended = [piece for piece in pieces if self._retry_or_end(piece)]
        if ended or not self._guard.reset():
            self._rebuild()

    def recover_embedding(self, error: Exception, *, again: bool) -> bool:
        """Handle a failed step of an embedding; return whether to retry it."""
        self._guard.note(error, "a step of an embedding")
        self.settle()
        if not again or not self._guard.reset():
            self._rebuild()
        return again

    def _retry_or_end(self, piece: StepPiece) -> bool:
        """Preempt a sequence to compute it alone; if it was alone already, end it. Returns whether it
        ended.
        """
        sequence, slot = piece.sequence, piece.sequence.slot
        if slot is None:
            return False
        self._memory.forget(slot)
        if sequence.group.quiet:
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
        self.start_over()
        self._guard.rebuild()
        self._failures_in_a_row = 0

    def _failed_rows(self, plan: Plan, logits: Logits) -> set[StepPiece]:
        """Return the chunks whose logits are not finite. They are retried; the others keep their results."""
        rows = self._guard.rows_without_numbers(logits)
        if not rows:
            self._failures_in_a_row = 0
            return set()
        failed, row = set[StepPiece](), 0
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

    def saw(self, picture: "Picture") -> None:
        """Handle media that were encoded, or could not be."""
        for shown in picture.take_in():
            for one in [one for one in self._waiting + self._running if one.group.shown is shown]:
                if picture.error is not None:
                    self._end(one, "error", picture.error)
        self._look_again()

    def _look_again(self) -> None:
        for one in self._waiting:
            one.group.shown.waits = False

    def _let_go(self, group: Group) -> None:
        """Release media once all sequences of a group have prefilled them."""
        if all(one.decoding for one in group.sequences) and group.shown.release():
            self._look_again()

    def _go_back(self, pieces: list[StepPiece]) -> None:
        for piece in pieces:
            slot = piece.sequence.slot
            if slot is not None and piece.go_back():
                self._memory.cut_back(slot)

    def _admit(self) -> None:
        """Give slots to waiting sequences."""
        if not self._waiting or not (self._memory.idle or self._are_several()):
            return
        places = Places(self._memory, self._running, self._waiting, self._step_back)
        places.give()
        if places.placed:
            self._waiting = [sequence for sequence in self._waiting if sequence not in places.placed]
            for sequence in places.placed:
                insort(self._running, sequence, key=_slot_index)

    def _are_several(self) -> bool:
        """Whether a sequence waits whose owner differs from that of another running or waiting one."""
        owner = self._waiting[0].owner
        return any(one.owner != owner for one in self._running) or any(
            one.owner != owner for one in self._waiting
        )

    def _pieces(
        self, beside: Set[str], encoding: bool, following: Mapping[Sequence, StepPiece] = _NOTHING
    ) -> list[StepPiece]:
        """Return what each sequence computes next. `following`: pieces of sequences whose newest token is
        not known yet.
        """
        mine = self._running if not self._suspects else self._apart()
        if self._runner.adapters and not self._runner.mixes_adapters:
            adapters = self._turns.next(mine)
            mine = [s for s in mine if s.group.job.adapters == adapters]
        reading = self.account.may_be_read(mine, self.owners | beside)
        sizes = self._sizes(mine, sorted(reading, key=_order), encoding) if reading else {}
        due = [sequence for sequence in mine if sequence.decoding or sequence in sizes]
        return [following.get(one) or StepPiece(one, sizes.get(one, 1)) for one in due]

    def _apart(self) -> list[Sequence]:
        """In every other step, return one sequence whose last step failed, alone; else all others."""
        self._suspects_turn = not self._suspects_turn
        others = [one for one in self._running if one not in self._suspects]
        suspects = [one for one in self._running if one in self._suspects]
        return suspects[:1] if self._suspects_turn or not others else others

    def _sizes(self, mine: list[Sequence], reading: list[Sequence], encoding: bool) -> dict[Sequence, int]:
        """Decide how much of each prompt to prefill now, beside the answers among `mine`."""
        alone = len(reading) == len(mine) and not self.account.crowded
        rows = self._rows_alone(mine[0].group.quiet, encoding) if alone else self._chunk
        if any(one.decoding for one in self._running):
            # Including those with other adapters, whose turn is another one.
            answers, most = sum(one.decoding for one in mine), self._longest
            rows = int(min(self._chunk, self._pace.rows(answers, encoding, self._pause, most)))
        rows, block = max(rows, self._runner.block), self._runner.block
        sizes = share_out(reading, rows, self._runner.max_outputs - self._runner.slots, block)
        return level_apart(sizes) if self._runner.equal_pieces else sizes

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

    def _with_room(self, pieces: list[StepPiece]) -> list[StepPiece]:
        """Return the pieces for which there is memory, preempting the sequences that came last."""
        growing = [piece for piece in pieces if not self._memory.has(piece.sequence.slot, piece.end)]
        for piece in sorted(growing, key=lambda piece: piece.sequence.order):
            while (slot := piece.sequence.slot) is not None and not self._memory.extend(slot, piece.end):
                self._step_back(last_of_most(self._running))
        return [piece for piece in pieces if piece.sequence.slot is not None]

    def _step_back(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self._running.remove(sequence)
        self._memory.release(sequence.slot)
        sequence.step_back()
        insort(self._waiting, sequence, key=_order)

    def _read(self, plan: Plan, logits: Logits) -> None:
        """Go through the rows of logits, in the plan's order, and sample the next tokens."""
        failed = self._failed_rows(plan, logits)
        self._note_read(plan, failed)
        row = 0
        answering: list[StepPiece] = []
        choices: list[TokenChoice] = []
        for piece in plan.pieces:
            end = row + piece.outputs
            if piece in failed:
                row = end
                continue
            if piece.newest is None:
                piece.report_prompt(logits, row)
            if piece.sequence.decoding:
                answering.append(piece)
                choices.append(
                    TokenChoice(piece.sequence.answer, end - 1 - len(piece.guesses), piece.guesses)
                )
            row = end
        steps = self._choosers.advance(choices, logits, self._runner.blocks)
        for piece, step in zip(answering, steps, strict=True):
            self._tell(piece, step)
        if self._suspects:
            self._trust_again()

    def _tell(self, piece: StepPiece, step: Step) -> None:
        if piece.newest is not None:
            self._keep_followed(piece, step)
        if step.finish is not None:
            if step.finish == "stop":
                self.rereading.note(piece.sequence)
            self._leave(piece.sequence)
        self._say(piece.sequence, step)

    def _keep_followed(self, piece: StepPiece, step: Step) -> None:
        """Keep the newest token and the draft tokens that were accepted."""
        sequence = piece.sequence
        right = piece.followed(step.ids)
        self._guesser.learn(piece, step.ids, right)
        assert sequence.slot is not None
        if right < len(piece.guesses):
            self._memory.cut_back(sequence.slot)
        self._memory.written(sequence.slot)

    def _note_read(self, plan: Plan, failed: Set[StepPiece] = frozenset()) -> None:
        """Note that chunks of prompts are in their slots."""
        for piece in plan.pieces:
            slot = piece.sequence.slot
            if piece.newest is None and slot is not None and piece not in failed:
                piece.read()
                self._memory.written(slot)
                self._let_go(piece.sequence.group)

    def _say(self, sequence: Sequence, step: Step) -> None:
        group = sequence.group
        if group.quiet:
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
