"""What this machine offers a process, and how the embedded engine is cut to it."""

import math
import os
import platform
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from ctypes.util import find_library
from hashlib import blake2b
from pathlib import Path
from typing import Literal, TypeAlias

from msgspec import Struct

from dragoman.engines.local import binding
from dragoman.engines.local.model import Model, check_file, list_parts
from dragoman.engines.local.options import LocalOptions
from dragoman.engines.model_files import digest_samples
from dragoman.errors import SettingsError

# Cores and memory, as far as affinity and control groups let it.


_CPUS = Path("/sys/devices/system/cpu")
_GROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")
_CPUINFO = Path("/proc/cpuinfo")
_STAT = Path("/proc/stat")
_FALLBACK_MEMORY = 4 << 30


def cores() -> int:
    """Physical cores this process may use. Two threads on one core's two faces gain nothing in arithmetic."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    physical = {_core(cpu) for cpu in allowed}
    return max(1, min(len(physical), _quota()))


def cpu_flags(source: Path = _CPUINFO) -> frozenset[str]:
    """What the first processor of the list can do; empty where the system does not say."""
    return frozenset(_read_value(source, "flags", "features").split())


def cpu_name(source: Path = _CPUINFO) -> str:
    """What the first processor of the list is called; empty where the system does not say."""
    return _read_value(source, "model name", "cpu part")


def _read_value(source: Path, *fields: str) -> str:
    try:
        lines = source.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    line = next((line for line in lines if line.lower().startswith(fields)), "")
    return line.partition(":")[2].strip()


def used_seconds() -> float:
    """Processor time that everybody has had, and what a hypervisor gave to others; 0 if nobody can tell."""
    try:
        user, nice, system, _idle, _waiting, *others = map(int, _STAT.read_text().split("\n")[0].split()[1:9])
    except (OSError, ValueError):
        return 0.0
    return (user + nice + system + sum(others)) / os.sysconf("SC_CLK_TCK")


def free_memory() -> int:
    """Bytes that can be taken without pushing anything out."""
    return min(_system_memory(), _group_memory())


def _core(cpu: int) -> tuple[str, str]:
    topology = _CPUS / f"cpu{cpu}" / "topology"
    try:
        return (topology / "physical_package_id").read_text(), (topology / "core_id").read_text()
    except OSError:
        return "", str(cpu)


def _quota() -> int:
    """How many whole cores the control group's quota amounts to."""
    try:
        quota, period = (_GROUP / "cpu.max").read_text().split()
        return math.ceil(int(quota) / int(period))
    except (OSError, ValueError):
        return 1 << 16


def _system_memory() -> int:
    try:
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return _FALLBACK_MEMORY


def _whole_memory() -> int:
    """What there is in all, whoever has it just now; 0 where the system does not say."""
    try:
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0
    try:
        return min(whole, int((_GROUP / "memory.max").read_text()))
    except (OSError, ValueError):
        return whole


def _let_go() -> int:
    """Bytes of files that the group gives back when needed; a model that was just read is of them."""
    try:
        lines = (_GROUP / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)


def _group_memory() -> int:
    try:
        limit = int((_GROUP / "memory.max").read_text())
        used = int((_GROUP / "memory.current").read_text())
        return max(0, limit - used + _let_go())
    except (OSError, ValueError):
        return 1 << 62


# Graphics processors, whether or not the installed llama.cpp can use them, and which of its builds could.


GpuKind: TypeAlias = Literal["cuda", "rocm", "vulkan", "metal"]
_NVIDIA, _AMD, _ROCM = Path("/proc/driver/nvidia/gpus"), Path("/dev/kfd"), Path("/opt/rocm/.info/version")
_RENDERERS = Path("/dev/dri")
_ASK_S = 10.0


class Gpu(Struct, frozen=True):
    kind: GpuKind
    name: str
    version: tuple[int, ...] = ()
    """Of CUDA or ROCm, as far as the driver has it."""


def find_gpus() -> list[Gpu]:
    """The best way to each kind that this machine has; nothing is loaded for it."""
    if sys.platform == "darwin":
        return [Gpu("metal", platform.processor() or platform.machine())]
    found = [*_find_nvidia(), *_find_amd()]
    return found or [*_find_vulkan()]


def _find_nvidia() -> Iterator[Gpu]:
    said = _ask("nvidia-smi")
    version = re.search(r"CUDA Version:\s*(\d+)\.(\d+)", said)
    names = [line.partition(",")[0] for line in _ask("nvidia-smi", *_NAMES).splitlines()]
    if not names:
        names = [_read_value(file, "model") for file in _NVIDIA.glob("*/information")]
    for name in filter(None, map(str.strip, names)):
        yield Gpu("cuda", name, (int(version[1]), int(version[2])) if version else ())


_NAMES = ("--query-gpu=name", "--format=csv,noheader")


def _find_amd() -> Iterator[Gpu]:
    found = re.findall(r"Marketing Name:\s*(.*Radeon.*|.*Instinct.*)", _ask("rocminfo"))
    if found or _AMD.exists():
        try:
            version = tuple(int(part) for part in _ROCM.read_text().split("-")[0].strip().split("."))
        except (OSError, ValueError):
            version = ()
        yield Gpu("rocm" if version else "vulkan", found[0].strip() if found else "an AMD GPU", version)


def _find_vulkan() -> Iterator[Gpu]:
    names = re.findall(r"deviceName\s*=\s*(.+)", _ask("vulkaninfo", "--summary"))
    real = [name.strip() for name in names if "llvmpipe" not in name]
    if real or (any(_RENDERERS.glob("renderD*")) and find_library("vulkan")):
        yield Gpu("vulkan", real[0] if real else "a GPU with Vulkan")


def _ask(*command: str) -> str:
    """What a program says; nothing where it is not there, or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S, errors="replace")
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


# A name for all that decides the answers to a request: it changes when they may, and not otherwise.


def numerics(files: Iterable[Path], *facts: object) -> str:
    """Of files with weights, and of what computes with them. Kernels are chosen by what the CPU can do."""
    found = blake2b(repr((facts, sorted(cpu_flags()))).encode(), digest_size=6)
    for file in files:
        found.update(digest_samples(file))
    return found.hexdigest()


# How many slots of how many tokens: what the model was trained for, as far as memory goes.


# Memory for keys and values is taken and touched at once, so a small model must not grab it all.
MOST = 2 << 30
_SLOTS = (32, 16, 8, 4, 2, 1)
# Conversations with tools need room; below this, fewer slots are better than shorter ones.
_ROOM = 2048
# Who is alone needs few, for what his tools ask beside him, and long ones.
_OWN_SLOTS, _OWN_ROOM = 4, 8192
_GRAIN = 256
# What four bits and their scales become as int8, and how much of the memory that may be.
_WIDER, _LITTLE = 2, 0.25
# Of four bits, in the count of llama.cpp: Q4_1 and Q4_K; Q4_0.
_WITH_OFFSETS, _WITHOUT_OFFSETS = (3, 12), 2
# Weights that take more of the free memory than this are better mapped: the system can drop them then.
_MUCH = 0.75


class Size(Struct, frozen=True):
    slots: int
    context: int
    threads: int


def size_for(model: Model, options: LocalOptions) -> Size:
    tokens = memory_for(options.kv_memory) // max(1, model.token_bytes)
    most, room = full_slots(options), _ROOM if count_readers(options) > 1 else _OWN_ROOM
    slots, context = divide(tokens, model.trained_context, options.slots, options.context, most, room)
    half = 2 if options.kv_cache == "int8" else 1
    check_memory(slots * context * model.token_bytes // half, f"{slots} slots of {context} tokens")
    return Size(slots, context, options.threads or cores())


def pages_for(page: int, page_bytes: int, trained: int, options: LocalOptions) -> tuple[int, int, int]:
    """Slots, context and pages, where slots share the memory: one may take what the others leave."""
    pages = max(1, memory_for(options.kv_memory) // page_bytes)
    context = options.context or max(page, min(trained, pages * page))
    slots, full = options.slots or _SLOTS[0], full_slots(options)
    each = -(-context // page)
    check_memory(each * page_bytes, f"A context of {context} tokens")
    return slots, context, max(each, min(pages, full * each))


def check_context(asked: int | None, trained: int) -> None:
    """A model that never saw a position writes nonsense there."""
    if asked is not None and 0 < trained < asked:
        message = (
            f"`context` is {asked}, but this model was made for {trained} tokens; set {trained} or less."
        )
        raise SettingsError(message, param="context")


def check_memory(needed: int, what: str) -> None:
    """What is not there would only be missed later, when the system ends the process for it."""
    free = free_memory()
    if needed > free:
        raise SettingsError(
            f"{what} would take {needed / (1 << 30):.1f} GiB for keys and values, and {free / (1 << 30):.1f}"
            " are free; set fewer `slots`, a shorter `context`, or `kv_cache` to int8.",
            param="context",
        )


def memory_for(asked: int | None) -> int:
    """Bytes for keys and values: as many as were asked for, or a share of what is free."""
    return asked or min(free_memory() // 4, MOST)


def read_model(path: Path, options: LocalOptions) -> Model:
    """For llama.cpp to compute with. What fits is read into memory, but not where a GPU has it in its own."""
    size = sum(part.stat().st_size for part in list_parts(path) if part.exists())
    on_gpu = options.gpu_layers != 0 and bool(binding.load().gpus())
    return Model(path, gpu_layers=options.gpu_layers, mapped=on_gpu or size > free_memory() * _MUCH)


def count_readers(options: LocalOptions) -> int:
    """How many read at once: as was said, or as many as there are to be slots, or one."""
    return options.readers or options.slots or 1


def takes_wide(path: Path, options: LocalOptions) -> bool:
    """Whether OpenVINO has weights of four bits as int8: for several readers, where memory is no matter, and
    where they have offsets, which take a second product. Without those a lone answer would lose more by it
    than many win.

    For one reader they are read as fast as they are computed with, and the memory is his own.
    """
    if count_readers(options) == 1 or _WIDER * path.stat().st_size > _whole_memory() * _LITTLE:
        return False
    kinds = Counter(tensor.kind for tensor in check_file(path))
    return sum(kinds[kind] for kind in _WITH_OFFSETS) >= kinds[_WITHOUT_OFFSETS]


def full_slots(options: LocalOptions) -> int:
    """Slots that there is memory for when all are full, if there is as much."""
    return options.slots or (_SLOTS[0] if count_readers(options) > 1 else _OWN_SLOTS)


def divide(
    tokens: int,
    trained: int,
    slots: int | None,
    context: int | None,
    most: int = _SLOTS[0],
    room: int = _ROOM,
) -> tuple[int, int]:
    """Share out `tokens` of memory: `divide(90_000, 8192, None, None)` is 32 slots of 2560."""
    wanted = context or min(trained, room)
    if slots is None:
        slots = next((count for count in _SLOTS if count <= most and count * wanted <= tokens), 1)
    if context is None:
        context = max(_GRAIN, min(trained, tokens // slots // _GRAIN * _GRAIN))
    return slots, context
