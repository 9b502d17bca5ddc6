"""Validation of everything that an engine reports about a job, once, before the rest of the server uses it.

Engines can be third-party code, so every step is checked before anything acts on it:

- What cannot be right (an id that is not in the vocabulary, an unknown finish reason, log probabilities of
  other ids) ends the answer with an error. It is logged, and the job is cancelled in the engine.
- What exceeds the request (ids after `max_tokens`, after an end or a stop id) is cut off: the answer is valid
  up to there. It is logged once for each engine.
- What comes too late (after a finish, after a cancel) is dropped.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from functools import cache, partial
from threading import get_ident
from typing import Any, get_args

from dragoman.engines.contract import (
    PROTOCOL_VIOLATED,
    show_value,
    wrong_ids,
    wrong_iterator,
    wrong_logprobs,
    wrong_prompt_logprobs,
)
from dragoman.engines.lifecycle import is_cancelled, is_keyboard_interrupt
from dragoman.engines.protocol import Engine, JobHandle
from dragoman.engines.steps import single
from dragoman.errors import DragomanError, EngineFailed
from dragoman.logs import safe_message
from dragoman.types import FinishReason, Job, Sink, Step, TextStep

logger = logging.getLogger("dragoman.engine")

FINISHES = get_args(FinishReason)
MOST_EMPTY = 10_000
"""Consecutive steps without content that are accepted, so that an engine cannot send them for ever."""
FAILED = "The engine failed during the answer."


class _ProtocolViolation(Exception):
    """A violation of the engine protocol; the message is for the log."""


class StepValidator:
    """Validates one job's steps: the sink given to the engine (`on_step`) and the handle given to the
    caller.
    """

    def __init__(
        self, engine: Engine, job: Job, sink: Sink, tell: Callable[[str], None] | None = None
    ) -> None:
        """`tell` is called with each violation, instead of logging it."""
        card, tokenizer, sampling = engine.card, engine.tokenizer, job.sampling
        self._name = type(engine).__name__
        self._tell = tell or partial(logger.error, "The engine %s violated its protocol: %s", self._name)
        self._warn = tell or partial(_warn, self._name)
        self._job = job
        self._sink = sink
        self._size = len(tokenizer.pieces)
        # Ids made from text can be more than were sampled.
        self._most = sampling.max_tokens if card.returns_ids else card.context_tokens
        self._card = card
        self._least = sampling.min_tokens
        self._remaining_tokens = dict.fromkeys(range(job.n), self._most)
        """For each unfinished continuation, how many ids may still come."""
        # Under a constraint, an end id can be a marker in the middle of an answer.
        goes_on = sampling.ignore_eos or job.constraint is not None
        self._ends = frozenset[int]() if goes_on else tokenizer.end_ids
        self._stops = self._ends | sampling.stop_token_ids
        self._logprobs = None if "logprobs" in card.refused_fields else sampling.logprobs
        self._prompt_told = sampling.prompt_logprobs is None or "prompt_logprobs" in card.refused_fields
        self._cached_told = False
        self._cancelled = False
        self._empty = self._most, 0
        """The sum of `_remaining_tokens` at the last step without ids, and how many such steps there were
        since it changed.
        """
        self._quick = False
        self._handle: JobHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._thread = get_ident()
        self._early: list[Step] | None = None
        """Steps that the engine reported before it returned a handle; they are delivered afterwards."""

    def begin(self, start: Callable[[Sink], JobHandle]) -> None:
        """Call `start_job`, which submits the job to the engine; anything it raises becomes a
        DragomanError.
        """
        self._early = []
        try:
            handle = start(self.on_step)
        except DragomanError:
            self._remaining_tokens.clear()
            raise
        except BaseException as error:
            self._remaining_tokens.clear()
            if is_keyboard_interrupt(error):
                raise
            logger.error(
                "The engine %s did not accept a job: %s", self._name, safe_message(error), exc_info=error
            )
            raise EngineFailed("The engine did not accept the job; see the server log.") from None
        if not callable(getattr(handle, "cancel", None)):
            self._remaining_tokens.clear()
            self._tell(f"submit returned {show_value(handle)}, not a handle")
            raise EngineFailed(PROTOCOL_VIOLATED)
        self._handle = handle
        if self._early:
            # Not now: the caller has no handle yet, either.
            self._loop.call_soon(self._take_early)
        else:
            self._early = None

    def is_open(self, index: int) -> bool:
        """Whether the continuation is unfinished and not cancelled."""
        return index in self._remaining_tokens

    def cancel(self, index: int | None = None) -> None:
        self._cancelled = True
        if index is None:
            self._remaining_tokens.clear()
        else:
            self._remaining_tokens.pop(index, None)
        self._stop(index)
        if not self._remaining_tokens:
            self._break_cycle()

    def on_step(self, step: Step) -> None:
        if self._quick and type(step) is Step:
            # The fast path of nearly every step: one more id and nothing else.
            ids, index = step.ids, step.index
            if (
                type(ids) is list
                and len(ids) == 1
                and type(id_ := ids[0]) is int
                and 0 <= id_ < self._size
                and id_ not in self._stops
                and step.finish is None
                and step.logprobs is None
                and step.cached_tokens is None
                and step.prompt_logprobs is None
                and step.error is None
                and ((version := step.weight_version) is None or type(version) is str)
                and type(index) is int
                and (room := self._remaining_tokens.get(index, 0))
            ):
                self._remaining_tokens[index] = room - 1
                self._sink(step)
                return
        self._take(step)

    def _take(self, step: Step) -> None:
        if self._early is not None or get_ident() != self._thread:
            self._put_off(step)
            return
        try:
            passes = self._validate(step)
        except _ProtocolViolation as wrong:
            self.fail(str(wrong), getattr(step, "index", None))
            return
        except Exception as error:
            # Attributes of a third-party object may raise anything.
            self.fail(f"a step cannot be read: {safe_message(error)}", None)
            return
        # An engine that calls from another thread does so from its first step on.
        self._quick = self._logprobs is None
        if step.finish is not None:
            del self._remaining_tokens[step.index]
        if passes:
            self._sink(step)
        if not self._remaining_tokens:
            self._break_cycle()

    def _break_cycle(self) -> None:
        """Break the reference cycle of handle and sink, which keeps the whole answer alive."""
        self._handle, self._sink = None, _ignore

    def fail(self, what: str, index: Any = None) -> None:
        """End a continuation, or all of them, because the engine violated its protocol."""
        self._tell(what)
        ended = (
            [index]
            if type(index) is int and index in self._remaining_tokens
            else list(self._remaining_tokens)
        )
        for each in ended:
            del self._remaining_tokens[each]
            self._stop(each)
            self._sink(Step([], each, finish="error", error=EngineFailed(PROTOCOL_VIOLATED)))

    def _stop(self, index: int | None) -> None:
        if self._handle is None:
            return
        try:
            self._handle.cancel(index)
        except Exception as error:
            logger.error("The engine %s failed to cancel a job", self._name, exc_info=error)

    def _put_off(self, step: Step) -> None:
        self._quick = False
        if get_ident() != self._thread:
            self._warn("calls the sink from its own thread instead of the event loop's")
            with suppress(RuntimeError):
                # The loop may be closed by now; then the step is not needed.
                self._loop.call_soon_threadsafe(self.on_step, step)
        elif self._early is not None:
            self._early.append(step)

    def _take_early(self) -> None:
        early, self._early = self._early or [], None
        for step in early:
            self.on_step(step)

    def _validate(self, step: Step) -> bool:
        """Cut the step to the job's limits; return whether it has anything to report. Raises
        `_ProtocolViolation` for an invalid step.
        """
        if type(step) is not Step:
            self._check_kind(step)
        index = step.index
        if type(index) is not int or index not in self._remaining_tokens:
            return self._stray(step)
        ids, size, stops = step.ids, self._size, self._stops
        cut = -1
        if type(ids) is not list:
            raise _ProtocolViolation(f"a step's ids {wrong_ids(ids, size) or 'are a tuple, not a list'}")
        for id_ in ids:
            if type(id_) is not int or not 0 <= id_ < size:
                raise _ProtocolViolation(f"a step's ids {wrong_ids(ids, size)}")
            if id_ in stops:
                cut = 0
        if self._logprobs is not None:
            if ids and (wrong := wrong_logprobs(step.logprobs, ids, size, self._logprobs)):
                raise _ProtocolViolation(wrong)
        elif step.logprobs is not None:
            step.logprobs = None
        if ids:
            room = self._remaining_tokens[index] - len(ids)
            if cut == 0 or room < 0:
                self._cut(step, self._remaining_tokens[index])
            self._remaining_tokens[index] = room
        elif isinstance(step, TextStep) and step.text:
            self._count_text(step)
        elif step.finish is None and not self._tells(step):
            return False
        if step.cached_tokens is not None or step.prompt_logprobs is not None:
            self._check_prompt(step)
        if step.weight_version is not None and type(step.weight_version) is not str:
            raise _ProtocolViolation(
                f"weight_version is {show_value(step.weight_version)}; it must be a str or None"
            )
        if step.finish is not None or step.error is not None:
            self._check_end(step)
        return True

    def _check_kind(self, step: Step) -> None:
        if not isinstance(step, Step):
            raise _ProtocolViolation(f"it gave {show_value(step)} instead of a dragoman.Step")
        if isinstance(step, TextStep):
            if self._card.returns_ids:
                raise _ProtocolViolation(
                    "it gives text, though its card says that it returns ids; set samples_ids=False"
                )
            counts = (step.tokens, step.prompt_tokens or 0)
            if type(step.text) is not str or step.ids or any(type(n) is not int or n < 0 for n in counts):
                raise _ProtocolViolation(
                    "a TextStep has text that is not a str, counts that are not ints from 0, or ids"
                )

    def _stray(self, step: Step) -> bool:
        """Handle a step for a continuation that is over, or that the job does not have: drop it, or raise."""
        if type(step.index) is not int or not 0 <= step.index < self._job.n:
            raise _ProtocolViolation(
                f"a step's index is {show_value(step.index)}; the job has {self._job.n} continuations"
            )
        if not self._cancelled:
            self._warn("continues after the end of an answer; such steps are dropped")
        step.finish = None
        return False

    def _tells(self, step: Step) -> bool:
        """Whether a step without ids carries any other information."""
        room = sum(self._remaining_tokens.values())
        before, count = self._empty
        self._empty = room, count + 1 if room == before else 1
        if self._empty[1] > MOST_EMPTY:
            raise _ProtocolViolation(f"{MOST_EMPTY} steps in a row had no ids")
        return step.cached_tokens is not None or step.prompt_logprobs is not None or step.error is not None

    def _count_text(self, step: TextStep) -> None:
        """Count a text step by the token count that the engine reports: only the engine knows it."""
        number = self._most - self._remaining_tokens[step.index]
        self._remaining_tokens[step.index] -= step.tokens
        if number >= self._job.sampling.max_tokens and step.finish is None:
            self._warn("continues after max_tokens; the answer is cut off there")
            step.text, step.finish = "", "length"
            self._stop(step.index)

    def _cut(self, step: Step, room: int) -> None:
        """End the answer at the first end or stop id, or at `max_tokens`."""
        # Before `min_tokens` no end or stop id ends the answer.
        free = max(self._least - (self._most - room), 0)
        ends = [index for index, id_ in enumerate(step.ids[:room]) if index >= free and id_ in self._stops]
        size, stop_id = room, None
        finish: FinishReason = "length"
        if ends:
            size, finish = ends[0] + 1, "stop"
            stop_id = None if step.ids[ends[0]] in self._ends else step.ids[ends[0]]
        if size > len(step.ids) or (size == len(step.ids) and step.finish is not None):
            return
        if ends and size == len(step.ids):
            self._warn("gives an end or a stop id without a finish; the answer ends there")
        else:
            after = "an end or a stop id" if ends else "max_tokens"
            self._warn(f"continues after {after}; the answer is cut off there")
        going_on = step.finish is None
        step.ids, step.finish, step.stop_id, step.error = step.ids[:size], finish, stop_id, None
        if step.logprobs is not None:
            step.logprobs = step.logprobs[:size]
        if going_on:
            self._stop(step.index)

    def _check_prompt(self, step: Step) -> None:
        """Check the facts about the prompt; each is reported once."""
        logprobs, cached = step.prompt_logprobs, step.cached_tokens
        if (count := step.prompt_tokens) is not None and (type(count) is not int or count < 0):
            raise _ProtocolViolation(
                f"prompt_tokens is {show_value(count)}; it must be an int from 0, or None"
            )
        if cached is not None:
            if type(cached) is not int:
                raise _ProtocolViolation(f"cached_tokens is {show_value(cached)}; it must be an int")
            most = max(len(self._job.prompt), step.prompt_tokens or 0)
            if not 0 <= cached <= most:
                self._warn("reports cached_tokens below 0, or above the prompt's length")
            step.cached_tokens = None if self._cached_told else min(max(cached, 0), most)
            self._cached_told = True
        if logprobs is not None:
            if self._prompt_told:
                step.prompt_logprobs = None
            elif wrong := wrong_prompt_logprobs(logprobs, self._job.prompt):
                raise _ProtocolViolation(wrong)
            self._prompt_told = True

    def _check_end(self, step: Step) -> None:
        """Check that the finish reason is valid, and that a finish "error" has an error."""
        error, finish = step.error, step.finish
        if finish is not None and finish not in FINISHES:
            raise _ProtocolViolation(
                f"finish is {show_value(finish)}; it must be one of {', '.join(FINISHES)}"
            )
        if error is not None and not isinstance(error, Exception):
            raise _ProtocolViolation(f"a step's error is {show_value(error)}, not an Exception")
        if step.stop_id is not None and (type(step.stop_id) is not int or not 0 <= step.stop_id < self._size):
            raise _ProtocolViolation(f"stop_id is {show_value(step.stop_id)}, which is not in the vocabulary")
        if error is None and finish == "error":
            raise _ProtocolViolation("finish is 'error', but there is no error")
        if error is None:
            if finish != "abort" and not self._prompt_told and step.index == 0:
                raise _ProtocolViolation("prompt_logprobs were requested, but not given")
            return
        if not isinstance(error, DragomanError):
            # The text of a third-party exception stays in the log: it may hold anything.
            logger.error("The engine %s failed on job %s", self._name, self._job.id, exc_info=error)
            step.error = EngineFailed(FAILED)
        elif finish == "abort":
            logger.warning("The engine %s aborted job %s: %s", self._name, self._job.id, safe_message(error))
        step.finish = "error"


@cache
def _warn(engine: str, what: str) -> None:
    """Log it once for each engine, which would do the same with every answer."""
    logger.warning("The engine %s %s.", engine, what)


# Start a job on any engine, so that its steps arrive at a sink.


STEPS_A_TURN = 16
"""Steps after which an iterator that never waits yields to the event loop."""
CLOSE_S = 10.0
"""Seconds that an iterator may take to close."""


def start_job(engine: Engine, job: Job, sink: Sink, tell: Callable[[str], None] | None = None) -> JobHandle:
    """Start a job: its steps go to `sink`, on the event loop's thread, until all continuations are over.

    Protocol violations go to `tell`, or to the log.
    """
    # Not isinstance: with a protocol it takes longer than everything else in the start of a job.
    submit: Callable[[Job, Sink], JobHandle] | None = getattr(engine, "submit", None)
    if submit is not None and getattr(engine, "is_validated", False):
        # Its steps were validated when they came from the engine that it wraps.
        return submit(job, sink)
    border = StepValidator(engine, job, sink, tell)
    border.begin(partial(_IteratorJob, engine, job, border) if submit is None else partial(submit, job))
    return border


def start_continuation(engine: Engine, job: Job, index: int, sink: Sink) -> JobHandle:
    """Start one continuation of several, when a slot is free for it before the others."""

    def one(step: Step) -> None:
        _name(step, index)
        sink(step)

    return start_job(engine, single(job, index), one)


def _name(step: Step, index: int) -> None:
    step.index = index
    if index:
        # Facts about the prompt come once, with the first continuation.
        step.cached_tokens = step.prompt_logprobs = None


def _ignore(step: Step) -> None:
    """Sink of a job that is over."""


_tasks: set[asyncio.Task[None]] = set()
"""Tasks that iterate over engines. asyncio keeps only weak references to a task, so these stay here until
they have closed their iterator.
"""


class _IteratorJob:
    """A job of an engine that has only `generate`: one task per continuation passes its steps on."""

    def __init__(self, engine: Engine, job: Job, border: StepValidator, sink: Sink) -> None:
        self._sink = sink
        self._border = border
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._run(engine, single(job, index), index)) for index in range(job.n)
        ]
        _tasks.update(self._tasks)
        for task in self._tasks:
            task.add_done_callback(_tasks.discard)

    def cancel(self, index: int | None = None) -> None:
        running = asyncio.current_task()
        for task in self._tasks if index is None else self._tasks[index : index + 1]:
            # A task that is just passing on a step notices the cancel itself, and closes its iterator
            # normally.
            if task is not running:
                task.cancel()

    async def _run(self, engine: Engine, job: Job, index: int) -> None:
        try:
            result: Any = engine.generate(job)
            if wrong := wrong_iterator(result):
                self._border.fail(wrong, index)
                return
            try:
                await self._read(result, index)
            finally:
                await _close(result)
        except DragomanError as error:
            self._fail(index, error)
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            self._border.fail("generate raised CancelledError, but the task was not cancelled", index)
        except BaseException as error:
            # The text of a third-party exception stays in the log: it may hold anything.
            logger.error("The engine %s failed on job %s", type(engine).__name__, job.id, exc_info=error)
            self._fail(index, EngineFailed(FAILED))
            if is_keyboard_interrupt(error):
                raise

    async def _read(self, steps: AsyncGenerator[Step, None], index: int) -> None:
        count = 0
        async for step in steps:
            if isinstance(step, Step):
                _name(step, index)
            self._sink(step)
            if not self._border.is_open(index):
                return
            count += 1
            if not count % STEPS_A_TURN:
                await asyncio.sleep(0)
        self._fail(index, EngineFailed("The engine stopped before the answer was finished."))

    def _fail(self, index: int, error: DragomanError) -> None:
        if self._border.is_open(index):
            self._sink(Step([], index, finish="error", error=error))


async def _close(steps: AsyncGenerator[Step, None]) -> None:
    try:
        async with asyncio.timeout(CLOSE_S):
            await steps.aclose()
    except TimeoutError:
        logger.warning("The engine's iterator did not close within %.0f seconds", CLOSE_S)
