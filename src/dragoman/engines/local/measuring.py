"""How fast a runner is with a file, and what memory it takes, measured in a process of its own.

Begun by `calibrated` as `python -m dragoman.engines.local.measuring LINK LIFELINE`, with an order on the
link. What the process had is gone with it, and the most it ever had is known.
"""

import asyncio
import resource
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from msgspec import msgpack
from msgspec.structs import replace

from dragoman.engines.isolated import wire
from dragoman.engines.isolated.child import leave_signals_to_the_server
from dragoman.engines.isolated.process import die_with
from dragoman.engines.local import machine
from dragoman.engines.local.calibrated import CONTEXT, Converted, Failed, Measured, Order, Refused, Reply
from dragoman.engines.local.engine import LocalEngine
from dragoman.engines.local.openvino.family import NotForOpenVino
from dragoman.engines.local.options import LocalOptions
from dragoman.errors import DragomanError
from dragoman.types import Job, Sampling

Times: TypeAlias = list[float]
_PROMPT = 128
_TOKENS = CONTEXT - _PROMPT
"""Of an answer, at most."""
_WINDOW = 4
"""Steps that are timed together: when one is told of late, the next seems to be quick."""
_LEAST = 2 * _WINDOW
_SECONDS = 0.3
"""That answers are computed for, or more where a step takes long."""


def obey(order: Order) -> Reply:
    path = Path(order.path)
    try:
        if order.runner == "openvino" and _is_new(path):
            return Converted()
        return measure(path, replace(order.options, runner=order.runner), order.readers)
    except NotForOpenVino as error:
        return Refused(str(error))
    except DragomanError as error:
        return Failed(error.message)
    except Exception as error:
        return Failed(type(error).__name__)


def _is_new(path: Path) -> bool:
    """Whether the file had to be converted, which is done now."""
    from dragoman.engines.local.openvino.converted import converted, is_converted

    if is_converted(path):
        return False
    converted(path)
    return True


def measure(path: Path, options: LocalOptions, readers: int) -> Measured:
    """Without guesses: what they bring depends on the text."""
    engine = LocalEngine.open(
        path, replace(options, slots=readers, context=CONTEXT, kv_memory=None, guesses=0)
    )
    before = _clocks()
    try:
        one, many, prompt = asyncio.run(_rates(engine, readers))
    finally:
        engine.close()
    spent, own, all_ = (after - early for early, after in zip(before, _clocks(), strict=True))
    # llama.cpp takes it at once; pages of OpenVINO's count when they are used, which few were.
    kept = int(engine.card.details["kv_bytes"]) if options.runner == "llamacpp" else 0
    others = max(0.0, all_ - own) / spent
    return Measured(one, many, prompt, max(0, _peak() - kept), others)


async def _rates(engine: LocalEngine, readers: int) -> tuple[float, float, float]:
    # Any ids do; the first answer finds the weights read and the threads there.
    vocabulary = len(engine.tokenizer.pieces)
    prompt = [7919 * number % vocabulary for number in range(1, _PROMPT + 1)]
    await _times(engine, prompt[:1], 1, most=1)
    alone = await _times(engine, prompt, 1)
    together = await _times(engine, prompt, readers)
    return rate(alone[1:], 1), rate(together[1:], readers), _PROMPT / (alone[1] - alone[0])


async def _times(
    engine: LocalEngine, prompt: Sequence[int], readers: int, most: int = _TOKENS
) -> list[float]:
    """When it was asked, and when each step of the first answer was there."""
    sampling = Sampling(max_tokens=most, temperature=0.0, ignore_eos=True)
    job = Job(id="measuring", prompt=tuple(prompt), n=readers, sampling=sampling)
    times = [time.perf_counter()]
    async for step in engine.generate(job):
        if step.index == 0:
            times.append(time.perf_counter())
            if len(times) > _LEAST + 1 and times[-1] - times[1] > _SECONDS:
                break
    return times


def rate(times: Sequence[float], rows: int) -> float:
    """Tokens a second in the best of all windows: whatever else the machine does only slows it down.

    >>> rate([0.0, 0.5, 1.0, 1.5, 2.0, 3.0], 8)
    16.0
    """
    spans = [late - early for early, late in zip(times, times[_WINDOW:], strict=False)]
    return rows * _WINDOW / min(spans)


def _clocks() -> tuple[float, float, float]:
    """Of the wall, of this process, and of all."""
    return time.perf_counter(), time.process_time(), machine.used_seconds()


def _peak() -> int:
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
