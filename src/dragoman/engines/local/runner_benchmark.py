"""Benchmark of a runner with a file: its speed and memory, measured in a process of its own.

Started by `calibrated` as `python -m dragoman.engines.local.runner_benchmark LINK LIFELINE`, with an order on
the link. The process ends with its memory, and its peak memory is known.
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

from dragoman.engines.isolated import wire
from dragoman.engines.isolated.child import ignore_stop_signals
from dragoman.engines.isolated.engine import die_with_parent
from dragoman.engines.local import hardware
from dragoman.engines.local.engine import LocalEngine
from dragoman.engines.local.hardware import count_readers, widens_to_int8
from dragoman.engines.local.opening import open_model
from dragoman.engines.local.openvino.architectures import OpenVinoUnsupported
from dragoman.engines.local.options import LocalOptions
from dragoman.engines.local.os_memory import use_large_pages
from dragoman.engines.local.runner import AnyRunner, StepRows
from dragoman.engines.local.runner_choice import (
    CONTEXT,
    BenchmarkFailure,
    BenchmarkOrder,
    ConversionDone,
    Reply,
    RunnerMeasurement,
    UnsupportedFile,
)
from dragoman.engines.sampling import Logits
from dragoman.errors import DragomanError
from dragoman.types import Job, Sampling

Spans: TypeAlias = dict[int, list[float]]
"""Durations of steps, by their number of rows."""
_PROMPT = 128
_TOKENS = CONTEXT - _PROMPT
"""Maximum tokens of an answer."""
_LEAST = 5
_SECONDS = 0.15
"""Seconds to generate, or longer until `_LEAST` steps are done."""


def obey(order: BenchmarkOrder) -> Reply:
    path = Path(order.path)
    try:
        if order.runner == "openvino" and _is_new(path, order.options):
            return ConversionDone()
        return measure(path, replace(order.options, runner=order.runner), order.readers)
    except OpenVinoUnsupported as error:
        return UnsupportedFile(str(error))
    except DragomanError as error:
        return BenchmarkFailure(error.message)
    except Exception as error:
        return BenchmarkFailure(type(error).__name__)


def _is_new(path: Path, options: LocalOptions) -> bool:
    """Convert the file if that is needed; return whether it was."""
    from dragoman.engines.local.openvino.conversion_cache import ensure_converted, is_converted

    wide = widens_to_int8(path, options)
    if is_converted(path, wide=wide):
        return False
    ensure_converted(path, wide=wide)
    return True


def measure(path: Path, options: LocalOptions, readers: int) -> RunnerMeasurement:
    """Benchmark a runner, without draft tokens: their gain depends on the text."""
    # The expected concurrency decides how the model is opened, however many answers are benchmarked.
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
    # llama.cpp allocates the KV cache at once; OpenVINO's pages count only once used, which few were.
    kept = int(opened.card.details["kv_bytes"]) if options.runner == "llamacpp" else 0
    return RunnerMeasurement(
        one=rate(spans, 1),
        many=rate(spans, readers),
        # The largest step is a prefill: the whole prompt, or as much as the runner takes at once.
        prompt=rate(spans, max(spans)),
        memory=max(0, peak() - kept),
        others=max(0.0, all_ - own) / spent,
    )


def _time_steps(runner: AnyRunner) -> Spans:
    """Time a runner's steps in the thread that computes them; elsewhere the reports may be late."""
    spans: Spans = defaultdict(list)
    compute = runner.step

    def step(rows: StepRows) -> Logits:
        began = time.perf_counter()
        logits = compute(rows)
        spans[len(rows)].append(time.perf_counter() - began)
        return logits

    runner.step = step  # type: ignore[method-assign]
    return spans


async def _answers(engine: LocalEngine, readers: int, spans: Spans) -> None:
    # Any ids will do; the first answer reads the weights and starts the threads.
    vocabulary = len(engine.tokenizer.pieces)
    prompt = [7919 * number % vocabulary for number in range(1, _PROMPT + 1)]
    await _answer(engine, prompt[1:3], 1, most=1)
    # As the engine does when idle.
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
    """Return rows per second of the step at the first quartile: slower ones were disturbed.

    >>> rate({8: [0.25, 0.5, 0.5, 4.0]}, 8)
    16.0
    """
    return rows / sorted(spans[rows])[len(spans[rows]) // 4]


def _clocks() -> tuple[float, float, float]:
    """Return wall time, CPU time of this process, and CPU time of all processes."""
    return time.perf_counter(), time.process_time(), hardware.used_seconds()


def peak() -> int:
    """Return the peak memory of this process. On Linux `getrusage` may include the parent's."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


def main() -> int:
    link, lifeline = (int(number) for number in sys.argv[1:3])
    ignore_stop_signals()
    die_with_parent(lifeline)
    with socket.socket(fileno=link) as connection:
        order = msgpack.decode(wire.receive(connection), type=BenchmarkOrder)
        connection.sendall(wire.frame(obey(order)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
