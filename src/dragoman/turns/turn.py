"""One turn: starts its jobs, turns their steps into events, and ends them all by one exit path."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Self

from msgspec.structs import replace

from dragoman.dialects.scan import take_batch
from dragoman.engines.protocol import Engine, JobHandle, count_text, weights_of
from dragoman.engines.validate import start_continuation, start_job
from dragoman.errors import DragomanError, EngineFailed, Unavailable
from dragoman.prompt.encode import replace_surrogates
from dragoman.turns.adapters import AdapterRegistry
from dragoman.turns.choice_reader import ChoiceReader, Detokenizer, ModelDialect, StopFinder
from dragoman.turns.plan import TurnPlan
from dragoman.turns.queue import EngineQueue, Ticket
from dragoman.turns.spec import TurnSpec, refuse_unsupported
from dragoman.types import (
    Answer,
    Event,
    EventFold,
    Sink,
    Step,
    TextStep,
    TokenLogprob,
    TurnRecord,
    Usage,
    coalesce,
)

logger = logging.getLogger("dragoman.turns")

MOST_PENDING = 32
"""Events that may wait for a slow client before adjacent ones are joined."""
GIVEN_IDS = 2**17
"""Prompt ids that are submitted before other requests get a turn: the engine looks at each of them."""


class Turn:
    """A turn. `async with turn:` starts it, possibly through the queue, and aborts what still runs on every
    exit.

    `next()` returns the events that are ready, in order, or [] when there are no more.
    """

    unenforced = ""
    """The field that the engine cannot enforce, if the answer streams all the same."""
    _fresh = True
    """Whether no ids have come yet; text engines never send any."""
    overridden = ""
    """Request fields that the operator's overrides have replaced."""
    begun_at: float | None = None
    """The time when the engine got the first job."""

    def __init__(
        self,
        engine: Engine,
        plan: TurnPlan,
        spec: TurnSpec,
        language: ModelDialect,
        remember: Callable[[TurnRecord, int, ChoiceReader], TurnRecord] | None = None,
        source: str = "",
        queue: EngineQueue | None = None,
        owner: str = "",
        adapters: AdapterRegistry | None = None,
    ) -> None:
        """`remember` is called with each finished answer and the number of its job.

        `source` is the id of the answer that the turn belongs to, `owner` the hashed API key.
        """
        self.jobs = plan.jobs
        self.started_at = 0.0
        self.first_token_at: float | None = None
        self.prompt_logprobs: list[list[TokenLogprob | None] | None] = [None] * len(plan.jobs)
        self.finishes: dict[int, Event] = {}
        """The finish events of the choices that have ended."""
        self.on_ready: Callable[[], None] | None = None
        """Called instead of waking `next`, for consumers without a task."""
        self._remember = remember
        self._source = source
        self.records: list[TurnRecord] = []
        """The finished answers, as ids."""
        self._engine = engine
        self._spec, self._plan, self._language = spec, plan, language
        self._prompt_tokens = [engine.card.count(job.prompt) for job in plan.jobs]
        self._readers = _readers(plan, spec, language, engine.tokenizer.end_ids)
        self._left = len(self._readers)
        self._queue = queue or EngineQueue(self._left)
        self._ticket = Ticket(self._begin, owner, spec.priority, self._left, self)
        self._entered = False
        self._begun: asyncio.Future[None] | None = None
        self._started = 0
        """The number of choices submitted to the engine."""
        self._handles: list[JobHandle] = []
        self._cancels: dict[int, Callable[[], None]] = {}
        """Cancels one choice each."""
        self._pending: list[Event] = []
        self._most_pending = MOST_PENDING
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False
        self._cached = 0
        self._weights: str | None = None
        self._adapters = adapters
        self.on_close: list[Callable[[], None]] = []
        """Called when the turn is closed, however it ended."""

    @property
    def weight_version(self) -> str | None:
        """The weights that computed the latest step; None if the engine does not report them."""
        return self._weights or weights_of(self._engine)

    @property
    def usage(self) -> Usage:
        """The usage so far."""
        return Usage(
            prompt_tokens=sum(self._prompt_tokens),
            completion_tokens=sum(reader.count for reader in self._readers),
            cached_tokens=self._cached,
            reasoning_tokens=sum(reader.reasoning_count for reader in self._readers),
            restored_tokens=self._plan.restored_tokens,
        )

    @property
    def choices(self) -> int:
        return len(self._readers)

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self.started_at = self._loop.time()
        if self._adapters is not None and (used := self.jobs[0].adapters):
            self.on_close.append(self._adapters.retain(used))
        self._queue.submit(self._ticket)
        self._entered = True
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the turn (disconnect, error, stop, shutdown or normal end) and abort what still runs."""
        self._closed = True
        if self._left:
            for handle in self._handles:
                handle.cancel()
        self._left = 0
        self._leave()
        while self.on_close:
            self.on_close.pop()()
        self.wake()
        # Break the reference cycles of the turn, which would keep the whole answer until garbage collection.
        self._handles, self._cancels, self.on_ready = [], {}, None

    async def wait_started(self, most: float) -> None:
        """Wait until the engine has the jobs, for at most `most` seconds. Raises an error that occurred by
        then.
        """
        if self._ticket.is_started or self._closed:
            return
        self._begun = self._loop.create_future()
        with suppress(TimeoutError):
            async with asyncio.timeout(most):
                await self._begun
        self._raise_failure()

    def _raise_failure(self) -> None:
        for finish in self.finishes.values():
            if finish.error is not None:
                raise finish.error

    async def find_fault(self) -> str | None:
        """Return what is wrong with the answers, if the engine could not enforce what was required."""
        return None

    async def next(self) -> list[Event]:
        """Return the events that are ready, waiting for at least one. An empty list means that the turn is
        over.
        """
        if not self._pending and self._left:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        elif self._pending:
            # More events are ready than one call returns; let other requests go first.
            await asyncio.sleep(0)
        return self.take()

    def take(self) -> list[Event]:
        """Return ready events without waiting, a limited number at once: `ready` says whether there are
        more.
        """
        if self._closed:
            return []
        taken, self._pending = take_batch(self._pending)
        return taken

    @property
    def ready(self) -> bool:
        return bool(self._pending) and not self._closed

    @property
    def pending(self) -> int:
        """The number of events not taken yet."""
        return len(self._pending)

    @property
    def engine_finished(self) -> bool:
        """Whether the engine has finished, although some events may not be taken yet."""
        return not self._left

    @property
    def is_over(self) -> bool:
        return self._closed or (not self._left and not self._pending)

    def wake(self) -> None:
        if self.on_ready is not None:
            self.on_ready()
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def answers(self) -> list[Answer]:
        """Run the turn to its end and return the answers. Raises the error that ended it."""
        fold = EventFold(self.choices)
        while not self.is_over:
            fold.add(await self.next())
            self._raise_failure()
        return fold.done()

    def _begin(self, permits: int) -> None:
        """Submit as many choices as there are permits; of many long prompts only some at a time."""
        number = 0
        self.begun_at = self.begun_at or self._loop.time()
        try:
            while permits and number < GIVEN_IDS and not self._closed:
                number += len(self.jobs[self._started // self.jobs[0].n].prompt)
                permits -= self._start_next(permits)
        except BaseException as error:
            for handle in self._handles:
                handle.cancel()
            if not self._entered:
                # It did not have to wait: the error is raised to the caller that enters the turn.
                self.close()
                raise
            self._fail(error)
        else:
            if permits and not self._closed:
                self._loop.call_soon(self._begin, permits)
        finally:
            self._tell_begun()

    def _start_next(self, permits: int) -> int:
        """Submit a whole job if there are permits for it, else the next of its choices; return how many."""
        number, index = divmod(self._started, self.jobs[0].n)
        job, sink = self.jobs[number], self._sink(number)
        priority = self._queue.priority(self._ticket)
        if priority != job.priority and "priority" not in self._engine.card.refused_fields:
            job = replace(job, priority=priority)
        whole = index == 0 and job.n <= permits
        first, count = self._started, job.n if whole else 1
        self._started += count
        handle = (
            start_job(self._engine, job, sink)
            if whole
            else start_continuation(self._engine, job, index, sink)
        )
        self._handles.append(handle)
        self._cancels |= {first + part: partial(handle.cancel, part) for part in range(count)}
        return count

    def _fail(self, error: BaseException) -> None:
        known = (
            error if isinstance(error, DragomanError) else EngineFailed("The engine did not accept the job.")
        )
        if known is not error:
            logger.error("A queued job was rejected by the engine", exc_info=error)
        for number, job in enumerate(self.jobs):
            for index in range(job.n):
                self._sink(number)(Step([], index, finish="error", error=known))

    def _leave(self) -> None:
        self._queue.remove(self._ticket)
        self._tell_begun()

    def _tell_begun(self) -> None:
        if self._begun is not None and not self._begun.done():
            self._begun.set_result(None)

    def _sink(self, number: int) -> Sink:
        n = self.jobs[number].n
        readers = self._readers[number * n : (number + 1) * n]

        def sink(step: Step) -> None:
            reader = readers[step.index]
            if reader.over or self._closed:
                return
            self._weights = step.weight_version or self._weights
            if step.finish == "abort":
                step.finish, step.error = "error", Unavailable("The engine was stopped; retry.")
            pending = self._pending
            try:
                if step.cached_tokens is not None or self._fresh:
                    self._first(number, step, reader)
                reader.read(step, pending)
            except Exception as error:
                # The engine must not see the error, and the client has to get the end of the answer.
                if not isinstance(error, DragomanError):
                    logger.exception("Reading an answer failed")
                    error = DragomanError("The server failed; its log says why.", code="internal_error")
                step.error = error
                reader.fail(error, pending)
            if reader.over:
                self._left -= 1
                if self._left:
                    self._queue.release(self._ticket)
                else:
                    self._leave()
                self.finishes[reader.choice] = pending[-1]
                if step.error is None:
                    self._keep(number, reader)
                if step.finish is None:
                    self._cancels[reader.choice]()
            if len(pending) > self._most_pending:
                self._pending = coalesce(pending)
                # Twice the number that could not be joined: otherwise each step would try again.
                self._most_pending = max(MOST_PENDING, 2 * len(self._pending))
            self.wake()

        return sink

    def _keep(self, number: int, reader: ChoiceReader) -> None:
        traced = TurnRecord(
            prompt=self.jobs[number].prompt,
            ids=tuple(reader.ids),
            logprobs=tuple(reader.logprobs) or None,
            finish=self.finishes[reader.choice].finish,
            choice=reader.choice,
            weight_version=self.weight_version,
            source=self._source,
            **self._plan.log_fields(number),
            # Nothing can continue a text answer: its ids are unknown.
            prompt_key=self._plan.keys[number]() if self._plan.keys and not reader.in_text else b"",
        )
        if self._remember is not None:
            traced = self._remember(traced, number, reader)
        self.records.append(traced)
        # A slow client keeps the turn for long: one copy of the ids is enough.
        reader.ids, reader.logprobs, reader.transcript = [], [], None

    def _first(self, number: int, step: Step, reader: ChoiceReader) -> None:
        """Handle a step before the first ids, so that later steps need not be checked for text."""
        text = step.text if isinstance(step, TextStep) else ""
        if self.first_token_at is None and (step.ids or text):
            self.first_token_at = self._loop.time()
            self._queue.mark_started(self._ticket)
        self._fresh = self._fresh and not step.ids
        if step.prompt_tokens is not None:
            self._prompt_tokens[number] = step.prompt_tokens
        if isinstance(step, TextStep):
            self._read_text(number, step, reader)
        self._cached += step.cached_tokens or 0
        if step.prompt_logprobs is not None:
            self.prompt_logprobs[number] = step.prompt_logprobs

    def _read_text(self, number: int, step: TextStep, reader: ChoiceReader) -> None:
        if not reader.in_text:
            # An engine's card may say only now that it returns text.
            refuse_unsupported(self._spec, self._engine.card)
            job, language = self.jobs[number], self._language.as_text
            dialect = language.readers(self._spec.parsing)(self._plan.in_reasoning[number], job.prompt)
            goes_on = self._spec.keep_stop or job.sampling.ignore_eos
            reader.switch_to_text(dialect, () if goes_on else language.ends)
        if step.text:
            tokens = step.tokens or count_text(self._engine.tokenizer, step.text)
            reader.read_text(replace_surrogates(step.text), tokens, self._pending)
        if reader.over:
            # The answer has ended before the engine did: ignore the rest of this step.
            step.finish = None


def _readers(
    plan: TurnPlan, spec: TurnSpec, language: ModelDialect, end_ids: frozenset[int]
) -> list[ChoiceReader]:
    pieces, reader = language.pieces(spec.parsing), language.readers(spec.parsing)
    return [
        ChoiceReader(
            number * job.n + index,
            Detokenizer(pieces, skip_special=spec.skip_special_tokens),
            StopFinder(plan.stop, keep=spec.keep_stop) if plan.stop else None,
            reader(in_reasoning, job.prompt),
            min_tokens=job.sampling.min_tokens,
            hidden_ids=frozenset() if spec.keep_stop else end_ids | job.sampling.stop_token_ids,
            most_calls=spec.parsing.most_calls if spec.parsing else None,
            text_logprobs=spec.parsing is not None and spec.parsing.logprobs == "text",
            remembers=bool(plan.answered_prompts),
        )
        for number, (job, in_reasoning) in enumerate(zip(plan.jobs, plan.in_reasoning, strict=True))
        for index in range(job.n)
    ]


def log_terms(log_fields: dict[str, Any], turn: Turn) -> None:
    """Note before the turn begins which fields are not enforced or overridden."""
    terms = {"unenforced": turn.unenforced, "overridden": turn.overridden}
    log_fields.update({name: text for name, text in terms.items() if text})


def note_turn(log_fields: dict[str, Any], turn: Turn) -> None:
    """Note usage, finish and timings; with several turns, the finish of the last one."""
    usage = turn.usage
    log_fields.update(usage.log_fields())
    if turn.finishes and log_fields.get("finish") != "disconnect":
        reasons = {event.finish or "" for event in turn.finishes.values()}
        log_fields["finish"] = ",".join(sorted(reasons))
    for event in turn.finishes.values():
        if event.error is not None:
            # The message of a foreign exception may contain anything, so only our own are logged.
            known = isinstance(event.error, DragomanError)
            log_fields["error"] = str(event.error) if known else "the engine failed"
    log_fields.setdefault("queue_ms", round(((turn.begun_at or turn.started_at) - turn.started_at) * 1000, 1))
    if turn.first_token_at is not None:
        log_fields.setdefault("ttft_ms", round((turn.first_token_at - turn.started_at) * 1000, 1))
        writing = asyncio.get_running_loop().time() - turn.first_token_at
        if usage.completion_tokens > 1 and writing > 0:
            log_fields["tokens_per_s"] = round((usage.completion_tokens - 1) / writing, 1)
