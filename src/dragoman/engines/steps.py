"""Shared parts of engine adapters: seeds, steps, delivery to event loops, and the outputs of
`generate_request`.

Outputs of `generate_request` become steps: of ids where the engine gives any, else of text.
"""

import asyncio
import logging
import types
from collections.abc import (
    AsyncGenerator,
    Callable,
    Collection,
    Coroutine,
    Generator,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from math import isnan
from typing import Any, Protocol, TypeVar

from msgspec.structs import replace

from dragoman.engines.protocol import CallbackEngine
from dragoman.errors import BadRequest, DragomanError, EngineFailed, Overloaded, Unavailable
from dragoman.types import FinishReason, Job, Sink, Step, TextStep, TokenLogprob

# The seed of each of several continuations, whether the engine computes them as one job or as one job each.


def seed_of(seed: int, index: int) -> int:
    """Return the seed of a continuation: the first has the given seed, the others a hash of it, so that
    they do not collide with the next seed a client would choose.
    """
    if index == 0:
        return seed
    digest = blake2b(f"{seed} {index}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1


# Conversion between the two ways to run a job: an iterator for one continuation, and callbacks for all.


async def iterate(engine: CallbackEngine, job: Job) -> AsyncGenerator[Step, None]:
    """Implement `generate` with `submit`. Leaving the iteration early cancels the job; an error is raised."""
    steps: asyncio.Queue[Step] = asyncio.Queue()
    handle = engine.submit(job, steps.put_nowait)
    left = job.n
    try:
        while left:
            step = await steps.get()
            if step.error is not None:
                raise step.error
            left -= step.finish is not None
            yield step
    finally:
        handle.cancel()


def single(job: Job, index: int) -> Job:
    """Return one continuation as a job of its own, with its own seed."""
    if job.n == 1:
        return job
    sampling = job.sampling
    if sampling.seed is not None:
        sampling = replace(sampling, seed=seed_of(sampling.seed, index))
    if index and sampling.prompt_logprobs is not None:
        # Facts about the prompt come once, with the first continuation.
        sampling = replace(sampling, prompt_logprobs=None)
    return replace(job, id=f"{job.id}-{index}", n=1, sampling=sampling)


MOST_APART = 8
"""Steps of one continuation that may queue for the event loop before they are joined.

Up to this number each becomes an event of its own; a server that lags further behind has to save work.
"""


def join_steps(first: Step, second: Step) -> Step:
    """Join two steps of one continuation: the second takes in the first and is returned."""
    second.ids = first.ids + second.ids
    if first.logprobs is not None:
        second.logprobs = first.logprobs + (second.logprobs or [])
    return second


# Delivery of steps from an engine's thread to the event loops of the receivers.


_log = logging.getLogger("dragoman.engine")


class Receiver(Protocol):
    @property
    def sink(self) -> Sink: ...

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...


R = TypeVar("R", bound=Receiver)


class BatchSink(Protocol):
    """Takes the steps of many sinks, from any thread. A sink that belongs to a hub has it as its attribute
    `hub`.
    """

    def deliver_batch(self, items: Sequence[tuple[Any, Step]]) -> None: ...


def deliver_steps(items: Iterable[tuple[R, Step]], drop: Callable[[R], None]) -> None:
    """Hand over all steps with one call per event loop; nearly always there is only one loop.

    `drop` is called with each receiver whose loop is closed or whose sink raised, on either thread.
    """
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[R, Step]]] = {}
    by_hub: dict[BatchSink, list[tuple[Sink, Step]]] = {}
    for receiver, step in items:
        if (hub := getattr(receiver.sink, "batch_sink", None)) is not None:
            by_hub.setdefault(hub, []).append((receiver.sink, step))
        else:
            by_loop.setdefault(receiver.loop, []).append((receiver, step))
    for hub, gathered in by_hub.items():
        # If the hub's loop is closed, the steps are not needed.
        with suppress(RuntimeError):
            hub.deliver_batch(gathered)
    for loop, entries in by_loop.items():
        try:
            loop.call_soon_threadsafe(_call_sinks, entries, drop)
        except RuntimeError:
            # The loop is closed, so the steps are not needed.
            for receiver, _ in entries:
                drop(receiver)


def _call_sinks(entries: list[tuple[R, Step]], drop: Callable[[R], None]) -> None:
    """Call the sinks, on the event loop's thread. A sink that raises does not affect the others."""
    for receiver, step in entries:
        try:
            receiver.sink(step)
        except Exception:
            _log.exception("A sink raised; its job is dropped")
            drop(receiver)


# Texts of engines that return no ids.


CERTAIN = 4
"""Length from which a repeated beginning is not a coincidence: shorter chunks of an answer can begin with
the chunk before.
"""


class OutputMode:
    """Whether an engine sends the whole answer so far each time, or only the new chunk; learned from its
    answers.
    """

    def __init__(self, *, pieces: bool | None = None) -> None:
        self.pieces = pieces


class DeltaExtractor:
    """The new part of each text of one answer.

    The contract of `generate_request` is the whole answer each time. A text that does not begin with the text
    before shows that the engine sends chunks; one that extends a text of several characters shows that it
    does not. Until this is known, texts are held back, so that none is lost or repeated.
    """

    def __init__(self, growth: OutputMode) -> None:
        self._growth = growth
        self._held: list[str] = []
        self._seen = ""

    def add(self, text: str, *, last: bool) -> str:
        if text:
            self._held.append(text)
        if self._growth.pieces is None and len(self._held) > 1:
            self._growth.pieces = _are_pieces(*self._held[-2:], last=last)
        if not self._held or (self._growth.pieces is None and not last):
            return ""
        held, self._held = self._held, []
        return "".join(held) if self._growth.pieces else self._grown(held[-1], last=last)

    def _grown(self, text: str, *, last: bool) -> str:
        if not last:
            # The start of a character, which is replaced when the rest has come.
            text = text.rstrip("\ufffd")
        if not text.startswith(self._seen):
            if self._seen.startswith(text):
                # Some engines finally remove the stop string; it was sent by then.
                return ""
            raise EngineFailed("The engine's texts do not extend each other.")
        new, self._seen = text[len(self._seen) :], text
        return new


def _are_pieces(before: str, text: str, *, last: bool) -> bool | None:
    before = before.rstrip("\ufffd")
    if not text.startswith(before):
        return None if last and before.startswith(text) else True
    return False if len(text) > len(before) >= CERTAIN else None


# Ends of requests: finish reasons of the contract, and the errors that replace them.


logger = logging.getLogger("dragoman.engines")

MOST_MESSAGE = 500
_REFUSED = "The engine refused this request; see the server log."
_ABORTED = "The engine aborted this answer; retry."
_FAILED = "The engine failed during the answer."


def parse_finish(reason: Any) -> tuple[FinishReason | None, DragomanError | None]:
    """Parse a `finish_reason`, an object with a type or the type alone. An unknown type is an error."""
    if reason is None:
        return None, None
    result = reason.to_json() if hasattr(reason, "to_json") else reason
    if not isinstance(result, Mapping):
        result = {"type": result}
    match result.get("type"):
        case "stop":
            return "stop", None
        case "length":
            return "length", None
        case "abort" if result.get("status_code") is None:
            if not result.get("message"):
                return "abort", None
            # The engine is overloaded or shutting down: the client may retry.
            logger.warning("The engine aborted a request: %s", result["message"])
            return "error", Unavailable(_clean(result["message"]) or _ABORTED)
        case "abort" | "error":
            return "error", _error(result.get("status_code") or 500, result.get("message"))
        case other:
            return "error", EngineFailed(
                f"The engine ended the answer with an unknown finish reason: {other}."
            )


def is_refused(error: Exception, *, begun: bool) -> bool:
    """Whether an exception is about the request: it has a status, or came before anything was computed."""
    return _status(error) is not None or (isinstance(error, ValueError) and not begun)


def client_error(error: Exception, packages: Collection[str]) -> DragomanError:
    """Convert an engine's exception to an error for the client.

    Messages raised by the engine's own `packages` are meant for the client. Others may hold anything, and
    stay in the log.
    """
    item = getattr(error, "detail", None) or getattr(error, "message", None) or next(iter(error.args), None)
    return _error(_status(error) or 400, item if _is_raised_in(error, packages) else None)


def _is_raised_in(error: Exception, packages: Collection[str]) -> bool:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    name = str(trace.tb_frame.f_globals.get("__name__", "")) if trace is not None else ""
    return name.partition(".")[0] in packages


def _clean(result: Any) -> str:
    """Return an engine's message as one line of limited length."""
    return " ".join(result.split())[:MOST_MESSAGE] if isinstance(result, str) else ""


def _status(error: Exception) -> int | None:
    status = getattr(error, "status_code", None)
    return int(status) if isinstance(status, int) and 400 <= status < 600 else None


def _error(status: int, message: Any) -> DragomanError:
    """Create the error for a status. The client gets the engine's message only if the request is at fault;
    otherwise it is logged.
    """
    if status >= 500:
        logger.error("The engine failed a request with status %s: %s", int(status), message)
        return (
            Unavailable("The engine cannot take this request now; retry.")
            if status == 503
            else EngineFailed(_FAILED)
        )
    text = _clean(message) or _REFUSED
    return Overloaded(text) if status == 429 else BadRequest(text)


# Outputs. If there are ids, text beside them is ignored; text without ids is the answer.


class OutputReader:
    """Parser of the outputs of one request, in order."""

    def __init__(
        self, job: Job, growth: OutputMode | None = None, on_text: Callable[[], None] | None = None
    ) -> None:
        """`on_text` is called if the answer begins with text without ids."""
        self.begun = False
        self.over = False
        self._job = job
        self._told: list[int] = []
        self._text: DeltaExtractor | None = None
        self._counted = 0
        self._growth = growth or OutputMode()
        self._on_text = on_text

    def step(self, output: Mapping[str, Any]) -> Step:
        meta: Mapping[str, Any] = output.get("meta_info") or {}
        first, self.begun = not self.begun, True
        finish, error = parse_finish(meta.get("finish_reason"))
        self.over = finish is not None
        step = self._content(output, meta)
        step.finish, step.error = finish, error
        if finish == "stop" and step.ids and step.ids[-1] in self._job.sampling.stop_token_ids:
            step.stop_id = step.ids[-1]
        if first:
            step.cached_tokens = meta.get("cached_tokens")
            if self._job.sampling.prompt_logprobs is not None and error is None:
                step.prompt_logprobs = _of_prompt(self._job, meta)
        version = meta.get("weight_version")
        step.weight_version = None if version is None else str(version)
        return step

    def _content(self, output: Mapping[str, Any], meta: Mapping[str, Any]) -> Step:
        ids, text, count = output.get("output_ids"), output.get("text"), meta.get("completion_tokens")
        if self._text is None and not self._told and not ids:
            if isinstance(text, str) and text:
                self._text = DeltaExtractor(self._growth)
                if self._on_text is not None:
                    self._on_text()
            elif self.over and not isinstance(text, str) and (ids is None or count):
                logger.error(
                    "The last output of an answer has neither ids nor text; it has %s", sorted(output)
                )
                raise EngineFailed("The engine gave neither `output_ids` nor `text`.")
        if self._text is not None:
            return self._text_step(self._text, text, meta)
        seen = len(self._told)
        step = Step(self._new(ids or (), count))
        if self._job.sampling.logprobs is not None:
            step.logprobs = _logprobs(step.ids, seen, meta, self._job.sampling.logprobs)
        return step

    def _text_step(self, growing: DeltaExtractor, text: Any, meta: Mapping[str, Any]) -> TextStep:
        count, prompt = int(meta.get("completion_tokens") or self._counted), meta.get("prompt_tokens")
        tokens, self._counted = max(count - self._counted, 0), count
        new = growing.add(text if isinstance(text, str) else "", last=self.over)
        return TextStep([], text=new, tokens=tokens, prompt_tokens=prompt and int(prompt))

    def _new(self, ids: Sequence[int], count: int | None) -> list[int]:
        """Return the ids that are new in this output.

        Some engines send all ids each time although they were asked to stream: then there are more ids than
        the count has grown by, and they begin with those already received. The list may be the one that the
        engine still appends to, so ids beyond the count belong to the next output.
        """
        seen = len(self._told)
        if count is not None and len(ids) > count - seen and list(ids[:seen]) == self._told:
            ids = ids[seen:] if self.over else ids[seen:count]
        new = [int(id_) for id_ in ids]
        self._told += new
        return new


def _logprobs(ids: list[int], seen: int, meta: Mapping[str, Any], most: int) -> list[TokenLogprob]:
    """Return the log probabilities of the new ids; `seen` ids came before."""
    size = len(ids)
    own = _part(meta.get("output_token_logprobs"), seen, size)
    tops = _part(meta.get("output_top_logprobs"), seen, size) if most else [()] * size
    logprobs = [_entry(result, top, most) for result, top in zip(own, tops, strict=True)]
    if [entry.id for entry in logprobs] != ids:
        raise EngineFailed("The engine's log probabilities do not match its tokens.")
    return logprobs


def _of_prompt(job: Job, meta: Mapping[str, Any]) -> list[TokenLogprob | None]:
    most = job.sampling.prompt_logprobs or 0
    # Nothing precedes the first id; engines send None for it, or no entry.
    size = len(job.prompt) - 1
    own = _part(meta.get("input_token_logprobs"), 1, size)
    tops = _part(meta.get("input_top_logprobs"), 1, size) if most else [()] * size
    return [None, *(_entry(result, top, most) for result, top in zip(own, tops, strict=True))]


def _part(entries: Sequence[Any] | None, before: int, size: int) -> Sequence[Any]:
    """Return `size` entries after the first `before`, or all if the list does not have the first ones."""
    items = entries or ()
    start = before if len(items) >= before + size else 0
    if len(items) < size:
        raise EngineFailed("The engine gave no log probabilities for some tokens.")
    return items[start : start + size]


def _entry(items: Sequence[Any], top: Sequence[Sequence[Any]] | None, most: int) -> TokenLogprob:
    others = tuple((int(id_), _number(logprob)) for logprob, id_, *_ in (top or ())[:most])
    return TokenLogprob(int(items[1]), _number(items[0]), others)


def _number(logprob: Any) -> float:
    if logprob is None or isnan(logprob):
        raise EngineFailed("The engine gave a log probability that is not a number.")
    return float(logprob)


# Coroutines that rarely wait: run without a task until they do.


def run_eagerly(work: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
    """Run a coroutine until it waits; a task runs the rest. Returns None if it has finished; raises what
    it raises.
    """
    try:
        waits_for = work.send(None)
    except StopIteration:
        return None
    return asyncio.get_running_loop().create_task(_awaited(work, waits_for))


async def _awaited(begun: Coroutine[Any, Any, None], waits_for: Any) -> None:
    await _rest(begun, waits_for)


@types.coroutine
def _rest(begun: Coroutine[Any, Any, None], waits_for: Any) -> Generator[Any, Any, None]:
    """Continue a coroutine that was started by hand and now waits, in a form that a task can run."""
    while True:
        try:
            answer = yield waits_for
        except BaseException as error:
            # The task is cancelled, and so is the awaited future.
            go_on = partial(begun.throw, error)
        else:
            go_on = partial(begun.send, answer)
        try:
            waits_for = go_on()
        except StopIteration:
            return
