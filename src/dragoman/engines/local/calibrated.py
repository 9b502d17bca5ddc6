"""Which runner is taken for a file on this machine: both are tried once, and what was found is kept.

    ~/.cache/dragoman/runners/SmolLM2-135M-Instruct.Q4_1-0c7b1f2d9a3e.json

The name stands for the file, the machine and all else that the figures depend on. So the choice stays as it
is until one of them changes; without that file both are measured again.
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

from dragoman.engines.local import machine
from dragoman.engines.local.machine import MOST, count_readers, full_slots, numerics
from dragoman.engines.local.model import Model, read_header
from dragoman.engines.local.openvino.family import RECIPE, NotForOpenVino, Shape
from dragoman.engines.local.options import LocalOptions, RunnerName
from dragoman.engines.weights import cache_folder, work_folder

EVEN = 0.97
"""Of the other's rate. What is closer than that is noise."""
SLOW = 0.85
"""Of the other's rate for one answer. What writes less is not for one reader, however fast it reads."""
HEAVY, LITTLE = 0.1, 256 << 20
"""Of the other's memory, and bytes. What takes more than that beyond the other is not for one reader."""
MANY = 8
"""Readers that both are told for, beside one, where nobody has asked for another number."""
_MOST_READERS = 32
"""More are not tried: from there on, a step takes longer by what is added to it."""
_ASKED, _ANSWERED = 256, 128
"""Tokens of what one reader asks that are not known yet, and of the answer."""
_SMALL = 64 << 20
"""Below that many bytes a file is not measured: either runner is fast, and a start should be."""
_WIDER = 4.0
"""Memory that conversion may take, in sizes of the file."""
_LIMIT_S = 120.0
_BYTES_A_SECOND = 10 << 20
"""A process gets so long, and longer by what it has to read."""
_END_S = 2.0
"""A process that has said what it had to say gets so long to end."""
_MOMENT_S = 0.25
_SHARED = 0.25
"""Of a core may go to others while both are measured."""
_WAY = 3
"""Another number for another way to compute with either: what was found before says nothing then."""
_CHILD = (sys.executable, "-P", "-m", "dragoman.engines.local.measuring")
_NAMES = {"llamacpp": "llama.cpp", "openvino": "OpenVINO"}
_log = logging.getLogger("dragoman.engine")


CONTEXT = 192
"""Tokens of a sequence that is measured."""


class Order(Struct, frozen=True):
    runner: Literal["llamacpp", "openvino"]
    path: str
    options: LocalOptions
    readers: int


class Measured(Struct, frozen=True, tag=True):
    """Tokens a second, and bytes."""

    one: float
    """Of an answer by itself."""
    many: float
    """Of as many answers as there are readers, together."""
    prompt: float
    memory: int
    """The most it had, without keys and values."""
    others: float = 0.0
    """Cores that were used by others meanwhile."""

    @property
    def seconds(self) -> float:
        """That one reader waits for all of an answer."""
        return _ASKED / self.prompt + _ANSWERED / self.one


class RunnerRefused(Struct, frozen=True, tag=True):
    """The runner cannot run the file, today or later."""

    why: str


class Converted(Struct, frozen=True, tag=True):
    """Made OpenVINO's form of the file, which takes memory: what it takes to run shows in another process."""


class Failed(Struct, frozen=True, tag=True):
    why: str


Reply: TypeAlias = Measured | RunnerRefused | Converted | Failed
_replies: "msgspec.msgpack.Decoder[Reply]" = msgspec.msgpack.Decoder(Reply)


class Measurements(Struct, frozen=True):
    readers: int
    """How many there are in the figures for many."""
    llamacpp: Measured
    openvino: Measured | RunnerRefused


class RunnerChoice(Struct, frozen=True):
    runner: RunnerName
    why: str


class _Uncertain(Exception):
    """It could not be measured; then this runner is taken, or the likelier one, and nothing is kept."""

    def __init__(self, runner: RunnerName | None, why: str) -> None:
        super().__init__(why)
        self.runner = runner


def choose_runner(model: Model, shape: Shape, options: LocalOptions) -> RunnerChoice:
    """The runner for as many readers as are expected. Raises NotForOpenVino if that cannot run the file."""
    path, readers = model.path, count_readers(options)
    if path.stat().st_size < _SMALL or 0 < model.trained_context < CONTEXT:
        return RunnerChoice(
            "openvino", "OpenVINO, not measured, because the model is small (--runner llamacpp)"
        )
    try:
        found = _look_up(path, options, min(readers, _MOST_READERS) if readers > 1 else MANY)
    except _Uncertain as error:
        _log.warning("Runners were not compared for %s: %s.", path.name, error)
        runner = error.runner or _guess(path, options)
        return RunnerChoice(runner, f"{_NAMES[runner]}; not compared, because {error}")
    if isinstance(found.openvino, RunnerRefused):
        raise NotForOpenVino(found.openvino.why)
    if found.openvino.memory > (free := machine.free_memory()):
        why = f"llama.cpp, because OpenVINO needs {_mb(found.openvino.memory)}, and {_mb(free)} are free"
        return RunnerChoice("llamacpp", why)
    return decide(found, found.openvino, readers, _count_kept_bytes(model.trained_context, shape, options))


def decide(found: Measurements, openvino: Measured, readers: int, kept: int = 0) -> RunnerChoice:
    """`kept` are the bytes of keys and values, which either runner takes.

    OpenVINO is taken where it is at least as fast for so many readers, and for one reader only where it takes
    hardly more memory and writes hardly more slowly: who runs a model for himself gets no less than from
    llama.cpp. He waits for his prompt to be read, too; of many readers most are being written to.
    """
    llamacpp = found.llamacpp
    if readers == 1:
        fast = EVEN * openvino.seconds <= llamacpp.seconds and openvino.one >= SLOW * llamacpp.one
        light = openvino.memory - llamacpp.memory <= max(LITTLE, HEAVY * (llamacpp.memory + kept))
    else:
        fast, light = openvino.many >= EVEN * llamacpp.many, True
    runner: RunnerName = "openvino" if fast and light else "llamacpp"
    less = " and less memory" if fast and not light else ""
    first, second = (openvino, llamacpp) if runner == "openvino" else (llamacpp, openvino)
    other: RunnerName = "llamacpp" if runner == "openvino" else "openvino"
    return RunnerChoice(
        runner,
        f"{_NAMES[runner]}, chosen for {'one reader' if readers == 1 else f'{readers} readers'}{less}: "
        f"it writes {_rate(first.one)} tokens/s for one, {_rate(first.many)} for {found.readers}, "
        f"reads {_rate(first.prompt)}, takes {_mb(first.memory)}; {_NAMES[other]} {_rate(second.one)}, "
        f"{_rate(second.many)}, {_rate(second.prompt)}, {_mb(second.memory)} (--runner {other})",
    )


def _guess(path: Path, options: LocalOptions) -> RunnerName:
    """Which is likelier to be faster. One reader's four bits were written faster by llama.cpp for every file
    that was measured (docs/figures.md), and all else by OpenVINO."""
    from gguf import GGMLQuantizationType

    from dragoman.engines.local.openvino.tensors import LARGE, is_four_bits

    fours = {int(kind) for kind in GGMLQuantizationType if is_four_bits(kind)}
    kept = path.stat().st_size >= LARGE and any(tensor.kind in fours for tensor in read_header(path))
    return "llamacpp" if kept and count_readers(options) == 1 else "openvino"


def _count_kept_bytes(trained: int, shape: Shape, options: LocalOptions) -> int:
    """Most bytes of keys and values, whatever is free just now: the choice must not depend on that."""
    # A key and a value of 16 bits for each number of a head.
    token = shape.layers * shape.kv_heads * shape.head * 4
    return min(options.kv_memory or MOST, full_slots(options) * (options.context or trained or MOST) * token)


def _look_up(path: Path, options: LocalOptions, readers: int) -> Measurements:
    """What is known, or else what is measured now."""
    folder = cache_folder() / "runners"
    file = folder / f"{path.stem}-{_key(path, options, readers)}.json"
    if known := _read(file):
        return known
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Servers that start at once do not disturb each other's figures: the second finds the first one's.
        with work_folder(folder, "measure-") as work:
            if known := _read(file):
                return known
            found = _measure(path, options, readers)
            (work / file.name).write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))
            (work / file.name).rename(file)
            return found
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise _Uncertain(None, f"{folder} cannot be written ({reason})") from None


def _read(file: Path) -> Measurements | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=Measurements)
    except (OSError, msgspec.DecodeError):
        return None


def _key(path: Path, options: LocalOptions, readers: int) -> str:
    return numerics(
        [path, *options.adapter_files],
        machine.cpu_name(),
        options.threads or machine.cores(),
        (options.kv_cache, options.deterministic, options.flash_attention, options.batch, readers, RECIPE),
        count_readers(options),
        _WAY,
        (version("openvino"), version("xllamacpp")),
    )


def _measure(path: Path, options: LocalOptions, readers: int) -> Measurements:
    """llama.cpp first: it has no need to convert anything."""
    if machine.free_memory() < _WIDER * path.stat().st_size:
        raise _Uncertain("llamacpp", "there is too little free memory to try OpenVINO")
    _check_cores(_used_by_others(), options)
    _log.info("Both runners are measured for %s, once: it takes seconds, more for a large file.", path.name)
    llamacpp = _ask(Order("llamacpp", str(path), options, readers))
    if not isinstance(llamacpp, Measured):
        raise _Uncertain("openvino", f"llama.cpp could not be tried ({_reason(llamacpp)})")
    _check_cores(llamacpp.others, options)
    openvino = _ask(order := Order("openvino", str(path), options, readers))
    if isinstance(openvino, Converted):
        openvino = _ask(order)
    if not isinstance(openvino, Measured | RunnerRefused):
        raise _Uncertain("llamacpp", f"OpenVINO could not be tried ({_reason(openvino)})")
    if isinstance(openvino, Measured):
        _check_cores(openvino.others, options)
    return Measurements(readers, llamacpp, openvino)


def _ask(order: Order) -> Reply:
    """What a process says that is begun for it, and is gone then."""
    from dragoman.engines.isolated import wire
    from dragoman.engines.isolated.engine import Process

    limit = _LIMIT_S + Path(order.path).stat().st_size / _BYTES_A_SECOND
    try:
        process = Process(_CHILD)
    except OSError as error:
        return Failed(error.strerror or type(error).__name__)
    try:
        process.link.settimeout(limit)
        process.link.sendall(wire.frame(order))
        return _replies.decode(wire.receive(process.link))
    except TimeoutError:
        process.kill()
        return Failed(f"it took more than {limit:.0f} seconds")
    except (EOFError, BrokenPipeError):
        return Failed(f"its process {process.end(_END_S)}")
    finally:
        process.link.close()
        process.end(_END_S)


def _used_by_others() -> float:
    """Cores, in a moment in which we do nothing."""
    began, used = time.perf_counter(), machine.used_seconds()
    time.sleep(_MOMENT_S)
    return (machine.used_seconds() - used) / (time.perf_counter() - began)


def _check_cores(others: float, options: LocalOptions) -> None:
    """Where threads have to wait for a core, figures say little: runners suffer from it in different ways."""
    if (os.cpu_count() or 1) - others < (options.threads or machine.cores()) - _SHARED:
        raise _Uncertain(None, "the machine is busy with other things")


def _reason(reply: Reply) -> str:
    return reply.why if isinstance(reply, RunnerRefused | Failed) else "it was not measured"


def _rate(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def _mb(count: int) -> str:
    return f"{count / 1e6:,.0f} MB"
