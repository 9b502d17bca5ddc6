"""Engines that do what no engine may, each fault by its name: the last message of a request names it."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np

from dragoman.engines.protocol import ModelCard
from dragoman.engines.scripted import END_ID, ByteTokenizer
from dragoman.errors import BadRequest, EngineFailed, Unavailable
from dragoman.types import Job, Sink, Step, TokenLogprob

A = ord("a")
CARD = ModelCard(name="unruly", max_model_len=4096, templates={"default": "{{ messages[-1].content }}"})


def said(*ids: Any, finish: Any = None, **fields: Any) -> Step:
    return Step(list(ids), finish=finish, **fields)


def last(**fields: Any) -> list[Any]:
    """An answer of one step that is right but for these fields."""
    return [said(A, END_ID, **{"finish": "stop", **fields})]


def logprob(id_: Any = A, value: Any = -1.0, top: Any = ()) -> TokenLogprob:
    return TokenLogprob(id_, value, top)


STEPS: dict[str, list[Any]] = {
    "good": last(),
    "negative id": [said(-1)],
    "far id": [said(A), said(999)],
    "text for an id": [said(A), said("a")],
    "a bool for an id": [said(A), said(True)],
    "a float for an id": [said(A), said(97.0)],
    "an id of numpy": [said(A), said(np.int64(A))],
    "ids of numpy": [said(A), Step(np.array([A]))],  # type: ignore[arg-type]
    "no ids": [Step(None)],  # type: ignore[arg-type]
    "a dict for a step": [{"ids": [A]}],
    "none for a step": [said(A), None],
    "unknown finish": last(finish="eos"),
    "a list for a finish": last(finish=["stop"]),
    "error without an error": last(finish="error"),
    "text for an error": last(finish="error", error="boom"),
    "a base exception for an error": last(finish="error", error=KeyboardInterrupt()),
    "odd weight version": last(weight_version=7),
    "odd cached tokens": last(cached_tokens="all"),
    "odd stop id": last(stop_id="a"),
    "far stop id": last(stop_id=10**6),
    "no finish": [said(A)],
    "nothing at all": [],
}
"""Steps of `generate`, one after the other."""

MENDED: dict[str, tuple[list[Any], str, str]] = {
    "two finishes": ([*last(), *last()], "a", "stop"),
    "cached below zero": (last(cached_tokens=-5), "a", "stop"),
    "cached beyond the prompt": (last(cached_tokens=10**9), "a", "stop"),
    "cached again and again": ([said(A, cached_tokens=3), *last(cached_tokens=3)], "aa", "stop"),
    "log probabilities that nobody asked for": (last(logprobs=[logprob()]), "a", "stop"),
    "far too many ids at once": ([said(*[A] * 5000)], "a" * 8, "length"),
    "ids after the end": ([said(A, END_ID, A, A, finish="length")], "a", "stop"),
    "an end without a finish": ([said(A), said(END_ID), said(A)], "a", "stop"),
    "a stop id in the middle": ([said(A, ord("z"), A), said(A)], "a", "stop"),
}
"""What is set right: the steps, and the answer to `max_tokens: 8` and the stop id of `z`."""

LOGPROBS: dict[str, Any] = {
    "missing": None,
    "too few": [],
    "not of its type": [-1.0],
    "of another id": [logprob(A + 1)],
    "not a number": [logprob(value=float("nan"))],
    "above zero": [logprob(value=0.5)],
    "of numpy": [logprob(value=np.float32(-1))],
    "with a far alternative": [logprob(top=((10**6, -1.0),))],
    "with too many alternatives": [logprob(top=((A, -1.0), (A, -1.0), (A, -1.0)))],
}

RAISED: dict[str, BaseException] = {
    "CancelledError": asyncio.CancelledError(),
    "GeneratorExit": GeneratorExit(),
    "SystemExit": SystemExit(3),
    "KeyboardInterrupt": KeyboardInterrupt(),
    "StopAsyncIteration": StopAsyncIteration(),
    "ValueError": ValueError("secret"),
}


class Unruly:
    card = CARD

    def __init__(self) -> None:
        self.tokenizer: Any = ByteTokenizer()
        self.live = 0

    def generate(self, job: Job) -> Any:
        name = bytes(job.prompt).decode()
        match name:
            case "a coroutine":
                return asyncio.sleep(0)
            case "a plain generator":
                return iter(STEPS["good"])
            case "nothing":
                return None
        return self._steps(name)

    async def _steps(self, name: str) -> AsyncIterator[Any]:
        self.live += 1
        try:
            for step in self._told(name):
                await asyncio.sleep(0)
                # Each job gets steps of its own: they are changed on their way.
                yield (
                    Step(**{f: getattr(step, f) for f in Step.__struct_fields__})
                    if isinstance(step, Step)
                    else step
                )
        finally:
            self.live -= 1

    def _told(self, name: str) -> Iterator[Any]:
        kind, _, which = name.partition(": ")
        if kind == "raised":
            yield said(A)
            raise RAISED[which]
        if kind == "raised at once":
            raise RAISED[which]
        if kind == "logprobs":
            yield said(A, finish="length", logprobs=LOGPROBS[which])
        elif kind == "prompt":
            entries = LOGPROBS[which] or [None]
            yield said(A, finish="length", prompt_logprobs=entries * len(name))
        elif kind == "endless":
            while True:
                yield said(A) if which == "ids" else said()
        elif kind == "abort":
            yield said(finish="abort", error=Unavailable("The weights are being moved."))
        else:
            yield from STEPS[name] if name in STEPS else MENDED[name][0]


class Handle:
    def __init__(self) -> None:
        self.cancelled = 0

    def cancel(self, index: int | None = None) -> None:
        self.cancelled += 1


class UnrulyCallbackEngine(Unruly):
    """Faults of engines that call back."""

    def __init__(self) -> None:
        super().__init__()
        self.handle = Handle()

    def submit(self, job: Job, sink: Sink) -> Any:
        faults: dict[str, Callable[[Job, Sink], Any]] = {
            "raises": lambda job, sink: 1 / 0,
            "raises CancelledError": _raise(asyncio.CancelledError()),
            "raises SystemExit": _raise(SystemExit(3)),
            "refuses": _raise(BadRequest("no such thing", param="top_k")),
            "no handle": lambda job, sink: None,
            "wrong index": lambda job, sink: self._later(sink, Step([A], 1)),
            "odd index": lambda job, sink: self._later(sink, Step([A], "0")),  # type: ignore[arg-type]
            "from a thread": self._from_a_thread,
            "before it returns": self._early,
        }
        return faults[bytes(job.prompt).decode()](job, sink)

    def _later(self, sink: Sink, step: Step) -> Handle:
        asyncio.get_running_loop().call_soon(sink, step)
        return self.handle

    def _from_a_thread(self, job: Job, sink: Sink) -> Handle:
        def run() -> None:
            for step in (said(A), said(A), said(END_ID, finish="stop")):
                sink(step)

        threading.Thread(target=run).start()
        return self.handle

    def _early(self, job: Job, sink: Sink) -> Handle:
        """Beyond the first stop string, and all of it before the handle is there."""
        for letter in b"aazaa":
            sink(said(letter))
        return self.handle


def _raise(error: BaseException) -> Callable[[Job, Sink], Any]:
    def submit(job: Job, sink: Sink) -> Any:
        raise error

    return submit


class Dead(Unruly):
    """It says that it is dead, and takes no job."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def check(self) -> None:
        raise EngineFailed("The engine has crashed.")

    def submit(self, job: Job, sink: Sink) -> Any:
        raise EngineFailed("The engine has crashed.")
