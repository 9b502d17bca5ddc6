"""How fast a runner is with a file, and what memory it takes, measured in a process of its own.

Begun by `calibrated` as `python -m dragoman.engines.local.measuring LINK LIFELINE`, with an order on the
link. What the process had is gone with it, and the most it ever had is known.
"""

import asyncio
import resource
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TypeAlias

from msgspec import msgpack
from msgspec.structs import replace

from dragoman.engines.choosing import Logits
from dragoman.engines.isolated import wire
from dragoman.engines.isolated.child import leave_signals_to_the_server
from dragoman.engines.isolated.engine import die_with
from dragoman.engines.local import machine
from dragoman.engines.local.calibrated import (
    CONTEXT,
    Converted,
    Failed,
    Measured,
    Order,
    Reply,
    RunnerRefused,
)
from dragoman.engines.local.engine import LocalEngine
from dragoman.engines.local.machine import count_readers, takes_wide
from dragoman.engines.local.opening import open_model
from dragoman.engines.local.openvino.family import NotForOpenVino
from dragoman.engines.local.options import LocalOptions
from dragoman.engines.local.process_pages import use_large_pages
from dragoman.engines.local.runner import AnyRunner, Rows
from dragoman.errors import DragomanError
from dragoman.types import Job, Sampling

Spans: TypeAlias = dict[int, list[float]]
"""How long steps took, by the number of their rows."""
_PROMPT = 128
_TOKENS = CONTEXT - _PROMPT
"""Of an answer, at most."""
_LEAST = 5
_SECONDS = 0.15
"""That an answer is computed for; more where steps take long, of which there are so many at least."""


def obey(order: Order) -> Reply:
    path = Path(order.path)
    try:
        if order.runner == "openvino" and _is_new(path, order.options):
            return Converted()
        return measure(path, replace(order.options, runner=order.runner), order.readers)
    except NotForOpenVino as error:
        return RunnerRefused(str(error))
    except DragomanError as error:
        return Failed(error.message)
    except Exception as error:
        return Failed(type(error).__name__)


def _is_new(path: Path, options: LocalOptions) -> bool:
    """Whether the file had to be converted, which is done now."""
    from dragoman.engines.local.openvino.converted import ensure_converted, is_converted

    wide = takes_wide(path, options)
    if is_converted(path, wide=wide):
        return False
    ensure_converted(path, wide=wide)
    return True


def measure(path: Path, options: LocalOptions, readers: int) -> Measured:
    """Without guesses: what they bring depends on the text."""
    # For whom it is opened stays as it was, however many are tried.
    for_whom = count_readers(options)
    options = replace(
        options, readers=for_whom, slots=readers, context=CONTEXT, kv_memory=None, guesses=0, draft=None
    )
    opened = open_model(path, options)
    spans = _time_steps(opened.runner)
    engine = LocalEngine(opened.runner, opened.tokenizer, opened.card, options)
    before = _clocks()
    try:
        asyncio.run(_answers(engine, readers, spans))
    finally:
        engine.close()
    spent, own, all_ = (after - early for early, after in zip(before, _clocks(), strict=True))
    # llama.cpp takes it at once; pages of OpenVINO's count when they are used, which few were.
    kept = int(opened.card.details["kv_bytes"]) if options.runner == "llamacpp" else 0
    return Measured(
        one=rate(spans, 1),
        many=rate(spans, readers),
        # The largest step reads, all of the prompt or what the runner takes of it at once.
        prompt=rate(spans, max(spans)),
        memory=max(0, peak() - kept),
        others=max(0.0, all_ - own) / spent,
    )


def _time_steps(runner: AnyRunner) -> Spans:
    """Have a runner's steps timed where they are computed: elsewhere they may be heard of late."""
    spans: Spans = defaultdict(list)
    compute = runner.step

    def step(rows: Rows) -> Logits:
        began = time.perf_counter()
        logits = compute(rows)
        spans[len(rows)].append(time.perf_counter() - began)
        return logits

    runner.step = step  # type: ignore[method-assign]
    return spans


async def _answers(engine: LocalEngine, readers: int, spans: Spans) -> None:
    # Any ids do; the first answer finds the weights read and the threads there.
    vocabulary = len(engine.tokenizer.pieces)
    prompt = [7919 * number % vocabulary for number in range(1, _PROMPT + 1)]
    await _answer(engine, prompt[1:3], 1, most=1)
    # As the engine does when it has nothing else to do.
    for _ in use_large_pages():
        pass
    spans.clear()
    await _answer(engine, prompt, 1)
    await _answer(engine, prompt, readers)


async def _answer(engine: LocalEngine, prompt: Sequence[int], readers: int, most: int = _TOKENS) -> None:
    sampling = Sampling(max_tokens=most, temperature=0.0, ignore_eos=True)
    job = Job(id="measuring", prompt=tuple(prompt), n=readers, sampling=sampling)
    began, steps = time.perf_counter(), 0
    async with aclosing(engine.generate(job)) as generated:
        async for step in generated:
            steps += step.index == 0
            if steps == 1:
                began = time.perf_counter()
            if steps > _LEAST and time.perf_counter() - began > _SECONDS:
                break


def rate(spans: Mapping[int, Sequence[float]], rows: int) -> float:
    """Rows a second, in a step that a quarter of them is faster than: the slow ones were disturbed.

    >>> rate({8: [0.25, 0.5, 0.5, 4.0]}, 8)
    16.0
    """
    return rows / sorted(spans[rows])[len(spans[rows]) // 4]


def _clocks() -> tuple[float, float, float]:
    """Of the wall, of this process, and of all."""
    return time.perf_counter(), time.process_time(), machine.used_seconds()


def peak() -> int:
    """The most memory this process has had. On Linux `getrusage` may tell of the one that has begun it."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


def main() -> int:
    link, lifeline = (int(number) for number in sys.argv[1:3])
    leave_signals_to_the_server()
    die_with(lifeline)
    with socket.socket(fileno=link) as connection:
        order = msgpack.decode(wire.receive(connection), type=Order)
        connection.sendall(wire.frame(obey(order)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
