"""Selection of the runner for a file on this machine: both are benchmarked once, and the result is stored.

    ~/.cache/dragoman/runners/SmolLM2-135M-Instruct.Q4_1-0c7b1f2d9a3e.json

The file name identifies the model file, the machine and everything else that the measurements depend on, so
the choice is stable until one of them changes. If the stored file is removed, both runners are benchmarked
again.
"""

import logging
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from dragoman.engines.default_weights import cache_folder, work_folder
from dragoman.engines.local import hardware
from dragoman.engines.local.gguf_model import LlamaModel, read_header
from dragoman.engines.local.hardware import MOST, count_readers, full_slots, numerics
from dragoman.engines.local.openvino.architectures import RECIPE, ModelShape, OpenVinoUnsupported
from dragoman.engines.local.options import LocalOptions, RunnerName

EVEN = 0.97
"""Share of the other runner's rate from which both count as equally fast: smaller differences are noise."""
NOISE = 0.1
"""Share by which rates vary with what else runs on the hardware. Where that decides, both runners are
benchmarked once more, and the higher rates count.
"""
HEAVY, LITTLE = 0.1, 256 << 20
"""Extra memory that a runner for one client may take: a share of the other runner's memory, or these
bytes.
"""
MANY = 8
"""Concurrent answers in the second measurement, besides one, if no other number is expected."""
_MOST_READERS = 32
"""Maximum concurrent answers in a benchmark; beyond it, a step's time grows linearly."""
_REQUESTS = ((256, 128), (30, 64))
"""Tokens of new prompt and of answer: a typical request of one client, and a short question, for which fast
prefill makes up for hardly any slower decoding.
"""
_SMALL = 64 << 20
"""Files below this size are not benchmarked: either runner is fast, and startup should be, too."""
_WIDER = 4.0
"""Memory that conversion may take, as a multiple of the file size."""
_LIMIT_S = 120.0
_BYTES_A_SECOND = 10 << 20
"""Time limit of a benchmark process, plus time to read the file at this rate."""
_END_S = 2.0
"""Seconds that the process may take to end after its reply."""
_MOMENT_S = 0.25
_SHARED = 0.25
"""Share of a core that other processes may use during a benchmark."""
_WAY = 4
"""Version of the way that runners compute; raising it invalidates stored measurements."""
_CHILD = (sys.executable, "-P", "-m", "dragoman.engines.local.runner_benchmark")
_NAMES = {"llamacpp": "llama.cpp", "openvino": "OpenVINO"}
_log = logging.getLogger("dragoman.engine")


CONTEXT = 192
"""Context length of the benchmark, in tokens."""


class BenchmarkOrder(Struct, frozen=True):
    runner: Literal["llamacpp", "openvino"]
    path: str
    options: LocalOptions
    readers: int


class RunnerMeasurement(Struct, frozen=True, tag=True):
    """Results of one runner's benchmark: tokens per second, and bytes."""

    one: float
    """Decode rate of a single answer."""
    many: float
    """Decode rate of as many concurrent answers as expected, in total."""
    prompt: float
    memory: int
    """Peak memory, without the KV cache."""
    others: float = 0.0
    """Cores that other processes used during the benchmark."""

    def seconds(self, asked: int, answered: int) -> float:
        """Return the seconds until a client has an answer of `answered` tokens to `asked` new ones."""
        return asked / self.prompt + answered / self.one

    def scaled(self, factor: float) -> "RunnerMeasurement":
        """Return the measurement with all rates multiplied by `factor`."""
        return replace(self, one=self.one * factor, many=self.many * factor, prompt=self.prompt * factor)

    def best(self, again: "RunnerMeasurement") -> "RunnerMeasurement":
        """Return the higher of both rates, as noise only lowers them, and the larger memory."""
        return RunnerMeasurement(
            max(self.one, again.one),
            max(self.many, again.many),
            max(self.prompt, again.prompt),
            max(self.memory, again.memory),
            max(self.others, again.others),
        )


class UnsupportedFile(Struct, frozen=True, tag=True):
    """Reply: the runner does not support the file."""

    why: str


class ConversionDone(Struct, frozen=True, tag=True):
    """Reply: OpenVINO's graph of the file has been written. As this takes memory, the benchmark runs in
    another process.
    """


class BenchmarkFailure(Struct, frozen=True, tag=True):
    why: str


Reply: TypeAlias = RunnerMeasurement | UnsupportedFile | ConversionDone | BenchmarkFailure
_replies: "msgspec.msgpack.Decoder[Reply]" = msgspec.msgpack.Decoder(Reply)


class RunnerComparison(Struct, frozen=True):
    readers: int
    """Concurrent answers in the second measurement."""
    llamacpp: RunnerMeasurement
    openvino: RunnerMeasurement | UnsupportedFile


class RunnerChoice(Struct, frozen=True):
    runner: RunnerName
    why: str


class _NotMeasured(Exception):
    """The benchmark was not possible; `runner`, or else the likelier one, is used, and nothing is stored."""

    def __init__(self, runner: RunnerName | None, why: str) -> None:
        super().__init__(why)
        self.runner = runner


def choose_runner(model: LlamaModel, shape: ModelShape, options: LocalOptions) -> RunnerChoice:
    """Select the runner for the expected concurrency. Raises OpenVinoUnsupported if OpenVINO does not support
    the file.
    """
    path, readers = model.path, count_readers(options)
    if path.stat().st_size < _SMALL or 0 < model.trained_context < CONTEXT:
        return RunnerChoice(
            "openvino", "OpenVINO, not benchmarked, because the model is small (--runner llamacpp)"
        )
    try:
        comparison = _look_up(path, options, min(readers, _MOST_READERS) if readers > 1 else MANY)
    except _NotMeasured as error:
        _log.warning("Did not benchmark the runners for %s: %s", path.name, error)
        runner = error.runner or _guess(path, options)
        return RunnerChoice(runner, f"{_NAMES[runner]}; not benchmarked, because {error}")
    if isinstance(comparison.openvino, UnsupportedFile):
        raise OpenVinoUnsupported(comparison.openvino.why)
    if comparison.openvino.memory > (free := hardware.free_memory()):
        why = (
            f"llama.cpp, because OpenVINO needs {_mb(comparison.openvino.memory)}"
            f" and only {_mb(free)} are free"
        )
        return RunnerChoice("llamacpp", why)
    return decide(
        comparison, comparison.openvino, readers, _count_kept_bytes(model.trained_context, shape, options)
    )


def decide(
    comparison: RunnerComparison, openvino: RunnerMeasurement, readers: int, kept: int = 0
) -> RunnerChoice:
    """Select a runner by its measurements. `kept` is the size of the KV cache, which is the same for both.

    For several clients OpenVINO is used if its total decode rate is at least as high. For one client, prefill
    counts as well, and OpenVINO is used only if neither a typical request nor a short question takes longer
    and it takes hardly more memory, so that a single user is never worse off than with llama.cpp.
    """
    llamacpp = comparison.llamacpp
    if readers == 1:
        fast = all(EVEN * openvino.seconds(*one) <= llamacpp.seconds(*one) for one in _REQUESTS)
        light = openvino.memory - llamacpp.memory <= max(LITTLE, HEAVY * (llamacpp.memory + kept))
    else:
        fast, light = openvino.many >= EVEN * llamacpp.many, True
    runner: RunnerName = "openvino" if fast and light else "llamacpp"
    less = " and less memory" if fast and not light else ""
    first, second = (openvino, llamacpp) if runner == "openvino" else (llamacpp, openvino)
    other: RunnerName = "llamacpp" if runner == "openvino" else "openvino"
    return RunnerChoice(
        runner,
        f"{_NAMES[runner]}, selected for {'one client' if readers == 1 else f'{readers} clients'}{less}: "
        f"decodes {_rate(first.one)} tokens/s for one, {_rate(first.many)} for {comparison.readers}, "
        f"prefills {_rate(first.prompt)}, takes {_mb(first.memory)}; {_NAMES[other]} {_rate(second.one)}, "
        f"{_rate(second.many)}, {_rate(second.prompt)}, {_mb(second.memory)} (--runner {other})",
    )


def _guess(path: Path, options: LocalOptions) -> RunnerName:
    """Return the runner that is likely faster. In all measurements (docs/figures.md), llama.cpp decoded
    4-bit weights faster for one client, and OpenVINO was faster otherwise.
    """
    from gguf import GGMLQuantizationType

    from dragoman.engines.local.openvino.tensors import LARGE, is_four_bits

    fours = {int(kind) for kind in GGMLQuantizationType if is_four_bits(kind)}
    kept = path.stat().st_size >= LARGE and any(tensor.kind in fours for tensor in read_header(path))
    return "llamacpp" if kept and count_readers(options) == 1 else "openvino"


def _count_kept_bytes(trained: int, shape: ModelShape, options: LocalOptions) -> int:
    """Return the maximum size of the KV cache, independent of the memory that happens to be free: the
    choice must not depend on that.
    """
    # A 16-bit key and value for each element of a head.
    token = shape.layers * shape.kv_heads * shape.head * 4
    return min(options.kv_memory or MOST, full_slots(options) * (options.context or trained or MOST) * token)


def _look_up(path: Path, options: LocalOptions, readers: int) -> RunnerComparison:
    """Return the stored measurements, or measure now."""
    folder = cache_folder() / "runners"
    file = folder / f"{path.stem}-{_key(path, options, readers)}.json"
    if known := _read(file):
        return known
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Servers that start at once do not disturb each other's benchmarks: the second finds the first one's
        # result.
        with work_folder(folder, "measure-") as work:
            if known := _read(file):
                return known
            comparison = _measure(path, options, readers)
            (work / file.name).write_bytes(msgspec.json.format(msgspec.json.encode(comparison), indent=1))
            (work / file.name).rename(file)
            return comparison
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise _NotMeasured(None, f"{folder} is not writable ({reason})") from None


def _read(file: Path) -> RunnerComparison | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=RunnerComparison)
    except (OSError, msgspec.DecodeError):
        return None


def _key(path: Path, options: LocalOptions, readers: int) -> str:
    return numerics(
        [path, *options.adapter_files],
        hardware.cpu_name(),
        options.threads or hardware.cores(),
        (options.kv_cache, options.deterministic, options.flash_attention, options.batch, readers, RECIPE),
        count_readers(options),
        _WAY,
        (version("openvino"), version("xllamacpp")),
    )


def _measure(path: Path, options: LocalOptions, readers: int) -> RunnerComparison:
    """Benchmark both runners, and once more if the result is close."""
    found = _measure_once(path, options, readers)
    if not _is_close(found, count_readers(options)):
        return found
    _log.info("Benchmarking both runners once more, as they are about equally fast")
    again = _measure_once(path, options, readers)
    if not isinstance(found.openvino, RunnerMeasurement) or not isinstance(again.openvino, RunnerMeasurement):
        return again
    llamacpp, openvino = found.llamacpp.best(again.llamacpp), found.openvino.best(again.openvino)
    return RunnerComparison(readers, llamacpp, openvino)


def _is_close(found: RunnerComparison, readers: int) -> bool:
    """Return whether noise could change the choice."""
    if isinstance(found.openvino, UnsupportedFile):
        return False
    slower, faster = (found.openvino.scaled(factor) for factor in (1 - NOISE, 1 + NOISE))
    return decide(found, slower, readers).runner != decide(found, faster, readers).runner


def _measure_once(path: Path, options: LocalOptions, readers: int) -> RunnerComparison:
    """Benchmark llama.cpp first, as it needs no conversion, then OpenVINO."""
    if hardware.free_memory() < _WIDER * path.stat().st_size:
        raise _NotMeasured("llamacpp", "there is too little free memory to benchmark OpenVINO")
    _check_cores(_used_by_others(), options)
    _log.info("Benchmarking both runners for %s, once; large files take longer", path.name)
    llamacpp = _ask(BenchmarkOrder("llamacpp", str(path), options, readers))
    if not isinstance(llamacpp, RunnerMeasurement):
        raise _NotMeasured("openvino", f"the benchmark of llama.cpp failed ({_reason(llamacpp)})")
    _check_cores(llamacpp.others, options)
    openvino = _ask(order := BenchmarkOrder("openvino", str(path), options, readers))
    if isinstance(openvino, ConversionDone):
        openvino = _ask(order)
    if not isinstance(openvino, RunnerMeasurement | UnsupportedFile):
        raise _NotMeasured("llamacpp", f"the benchmark of OpenVINO failed ({_reason(openvino)})")
    if isinstance(openvino, RunnerMeasurement):
        _check_cores(openvino.others, options)
    return RunnerComparison(readers, llamacpp, openvino)


def _ask(order: BenchmarkOrder) -> Reply:
    """Run a benchmark in a new process and return its reply."""
    from dragoman.engines.isolated import wire
    from dragoman.engines.isolated.engine import ChildProcess

    limit = _LIMIT_S + Path(order.path).stat().st_size / _BYTES_A_SECOND
    try:
        process = ChildProcess(_CHILD)
    except OSError as error:
        return BenchmarkFailure(error.strerror or type(error).__name__)
    try:
        process.link.settimeout(limit)
        process.link.sendall(wire.frame(order))
        return _replies.decode(wire.receive(process.link))
    except TimeoutError:
        process.kill()
        return BenchmarkFailure(f"it took more than {limit:.0f} seconds")
    except (EOFError, BrokenPipeError):
        return BenchmarkFailure(f"its process {process.end(_END_S)}")
    finally:
        process.link.close()
        process.end(_END_S)


def _used_by_others() -> float:
    """Return the cores in use while this process does nothing for a moment."""
    began, used = time.perf_counter(), hardware.used_seconds()
    time.sleep(_MOMENT_S)
    return (hardware.used_seconds() - used) / (time.perf_counter() - began)


def _check_cores(others: float, options: LocalOptions) -> None:
    """Raise `_NotMeasured` if cores are busy: runners are slowed down by that in different ways."""
    if (os.cpu_count() or 1) - others < (options.threads or hardware.cores()) - _SHARED:
        raise _NotMeasured(None, "the machine is busy")


def _reason(reply: Reply) -> str:
    return reply.why if isinstance(reply, UnsupportedFile | BenchmarkFailure) else "no measurement"


def _rate(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def _mb(count: int) -> str:
    return f"{count / 1e6:,.0f} MB"
