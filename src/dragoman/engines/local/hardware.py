"""The hardware available to this process, and the engine size that fits it."""

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
from dragoman.engines.local.gguf_model import LlamaModel, check_file, list_parts
from dragoman.engines.local.options import LocalOptions
from dragoman.engines.model_files import digest_samples
from dragoman.errors import SettingsError

# Cores and memory, within CPU affinity and control groups.


_CPUS = Path("/sys/devices/system/cpu")
_GROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")
_CPUINFO = Path("/proc/cpuinfo")
_STAT = Path("/proc/stat")
_FALLBACK_MEMORY = 4 << 30


def cores() -> int:
    """Return the physical cores this process may use. Two hyperthreads of a core gain nothing in
    arithmetic.
    """
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    physical = {_core(cpu) for cpu in allowed}
    return max(1, min(len(physical), _quota()))


def cpu_flags(source: Path = _CPUINFO) -> frozenset[str]:
    """Return the features of the first CPU listed; empty if the system does not list them."""
    return frozenset(_read_value(source, "flags", "features").split())


def cpu_name(source: Path = _CPUINFO) -> str:
    """Return the name of the first CPU listed; empty if the system does not list it."""
    return _read_value(source, "model name", "cpu part")


def _read_value(source: Path, *fields: str) -> str:
    try:
        lines = source.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    line = next((line for line in lines if line.lower().startswith(fields)), "")
    return line.partition(":")[2].strip()


def used_seconds() -> float:
    """Return the CPU time used by all processes, and stolen by a hypervisor; 0 if unknown."""
    try:
        user, nice, system, _idle, _waiting, *others = map(int, _STAT.read_text().split("\n")[0].split()[1:9])
    except (OSError, ValueError):
        return 0.0
    return (user + nice + system + sum(others)) / os.sysconf("SC_CLK_TCK")


def free_memory() -> int:
    """Return the bytes that can be allocated without evicting anything."""
    return min(_system_memory(), _group_memory())


def _core(cpu: int) -> tuple[str, str]:
    topology = _CPUS / f"cpu{cpu}" / "topology"
    try:
        return (topology / "physical_package_id").read_text(), (topology / "core_id").read_text()
    except OSError:
        return "", str(cpu)


def _quota() -> int:
    """Return the control group's CPU quota, rounded up to whole cores."""
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
    """Return the total memory, free or not; 0 if the system does not report it."""
    try:
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0
    try:
        return min(whole, int((_GROUP / "memory.max").read_text()))
    except (OSError, ValueError):
        return whole


def _let_go() -> int:
    """Return the bytes of cached files that the group can drop, such as a model that was just read."""
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


# GPUs, whether or not the installed llama.cpp can use them.


GpuKind: TypeAlias = Literal["cuda", "rocm", "vulkan", "metal"]
_NVIDIA, _AMD, _ROCM = Path("/proc/driver/nvidia/gpus"), Path("/dev/kfd"), Path("/opt/rocm/.info/version")
_RENDERERS = Path("/dev/dri")
_ASK_S = 10.0


class Gpu(Struct, frozen=True):
    kind: GpuKind
    name: str
    version: tuple[int, ...] = ()
    """Version of CUDA or ROCm that the driver supports."""


def find_gpus() -> list[Gpu]:
    """Find the GPUs of this machine with the best API for each; loads no library."""
    if sys.platform == "darwin":
        return [Gpu("metal", platform.processor() or platform.machine())]
    gpus = [*_find_nvidia(), *_find_amd()]
    return gpus or [*_find_vulkan()]


def _find_nvidia() -> Iterator[Gpu]:
    text = _ask("nvidia-smi")
    version = re.search(r"CUDA Version:\s*(\d+)\.(\d+)", text)
    names = [line.partition(",")[0] for line in _ask("nvidia-smi", *_NAMES).splitlines()]
    if not names:
        names = [_read_value(file, "model") for file in _NVIDIA.glob("*/information")]
    for name in filter(None, map(str.strip, names)):
        yield Gpu("cuda", name, (int(version[1]), int(version[2])) if version else ())


_NAMES = ("--query-gpu=name", "--format=csv,noheader")


def _find_amd() -> Iterator[Gpu]:
    matches = re.findall(r"Marketing Name:\s*(.*Radeon.*|.*Instinct.*)", _ask("rocminfo"))
    if matches or _AMD.exists():
        try:
            version = tuple(int(part) for part in _ROCM.read_text().split("-")[0].strip().split("."))
        except (OSError, ValueError):
            version = ()
        yield Gpu("rocm" if version else "vulkan", matches[0].strip() if matches else "an AMD GPU", version)


def _find_vulkan() -> Iterator[Gpu]:
    names = re.findall(r"deviceName\s*=\s*(.+)", _ask("vulkaninfo", "--summary"))
    real = [name.strip() for name in names if "llvmpipe" not in name]
    if real or (any(_RENDERERS.glob("renderD*")) and find_library("vulkan")):
        yield Gpu("vulkan", real[0] if real else "a GPU with Vulkan")


def _ask(*command: str) -> str:
    """Return the output of a program; empty if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S, errors="replace")
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


# A digest of everything that decides the answers to a request: it changes when they may, and only then.


def numerics(files: Iterable[Path], *facts: object) -> str:
    """Digest files of weights and facts about how they are computed. Kernels depend on the CPU's features."""
    result = blake2b(repr((facts, sorted(cpu_flags()))).encode(), digest_size=6)
    for file in files:
        result.update(digest_samples(file))
    return result.hexdigest()


# The number and length of slots: up to what the model was trained for, as memory allows.


# Maximum default size of the KV cache. It is allocated and touched at once, so a small model must not take
# all memory.
MOST = 2 << 30
_SLOTS = (32, 16, 8, 4, 2, 1)
# Minimum context for conversations with tools; rather have fewer slots than shorter ones.
_ROOM = 2048
# Slots and minimum context for one client, whose tools may send a few requests at the same time.
_OWN_SLOTS, _OWN_ROOM = 4, 8192
_GRAIN = 256
# Growth of 4-bit weights with scales as int8, and the share of the total memory that these may take.
_WIDER, _LITTLE = 2, 0.25
# Types of 4-bit weights in llama.cpp: with offsets (Q4_1 and Q4_K), and without (Q4_0).
_WITH_OFFSETS, _WITHOUT_OFFSETS = (3, 12), 2
# Weights that take more of the free memory than this are mapped: then the system can evict them.
_MUCH = 0.75


class EngineSize(Struct, frozen=True):
    slots: int
    context: int
    threads: int


def size_for(model: LlamaModel, options: LocalOptions) -> EngineSize:
    tokens = memory_for(options.kv_memory) // max(1, model.token_bytes)
    most, room = full_slots(options), _ROOM if count_readers(options) > 1 else _OWN_ROOM
    slots, context = split_kv_memory(
        tokens, model.trained_context, options.slots, options.context, most, room
    )
    half = 2 if options.kv_cache == "int8" else 1
    check_memory(slots * context * model.token_bytes // half, f"{slots} slots of {context} tokens")
    return EngineSize(slots, context, options.threads or cores())


def pages_for(page: int, page_bytes: int, trained: int, options: LocalOptions) -> tuple[int, int, int]:
    """Return slots, context and pages, where slots share the memory: one may use what the others leave."""
    pages = max(1, memory_for(options.kv_memory) // page_bytes)
    context = options.context or max(page, min(trained, pages * page))
    slots, full = options.slots or _SLOTS[0], full_slots(options)
    each = -(-context // page)
    check_memory(each * page_bytes, f"A context of {context} tokens")
    return slots, context, max(each, min(pages, full * each))


def check_context(asked: int | None, trained: int) -> None:
    """Raise SettingsError if the context is longer than the model was trained for: it generates nonsense
    there.
    """
    if asked is not None and 0 < trained < asked:
        message = (
            f"`context` is {asked}, but this model was trained for {trained} tokens; set {trained} or less."
        )
        raise SettingsError(message, param="context")


def check_memory(needed: int, what: str) -> None:
    """Raise SettingsError if the KV cache does not fit; otherwise the system would kill the process later."""
    free = free_memory()
    if needed > free:
        raise SettingsError(
            f"{what} would take {needed / (1 << 30):.1f} GiB for the KV cache, and {free / (1 << 30):.1f} GiB"
            " are free; set fewer `slots`, a shorter `context`, or `kv_cache` to int8.",
            param="context",
        )


def memory_for(asked: int | None) -> int:
    """Return the size of the KV cache: as requested, or a share of the free memory."""
    return asked or min(free_memory() // 4, MOST)


def read_model(path: Path, options: LocalOptions) -> LlamaModel:
    """Open a model for llama.cpp. It is read into memory if it fits; on a GPU it is mapped, as the weights
    are copied there.
    """
    size = sum(part.stat().st_size for part in list_parts(path) if part.exists())
    on_gpu = options.gpu_layers != 0 and bool(binding.load().gpus())
    return LlamaModel(path, gpu_layers=options.gpu_layers, mapped=on_gpu or size > free_memory() * _MUCH)


def count_readers(options: LocalOptions) -> int:
    """Return the expected concurrency: the setting, else the number of slots, else one."""
    return options.readers or options.slots or 1


def widens_to_int8(path: Path, options: LocalOptions) -> bool:
    """Whether OpenVINO converts 4-bit weights to int8: for several clients, if memory is plentiful, and if
    most have offsets, which take a second product. Without offsets a single answer would lose more than many
    gain.

    For one client the weights are read as fast as they are computed with, and memory is not spent on them.
    """
    if count_readers(options) == 1 or _WIDER * path.stat().st_size > _whole_memory() * _LITTLE:
        return False
    kinds = Counter(tensor.kind for tensor in check_file(path))
    return sum(kinds[kind] for kind in _WITH_OFFSETS) >= kinds[_WITHOUT_OFFSETS]


def full_slots(options: LocalOptions) -> int:
    """Return the slots whose full context should fit in memory."""
    return options.slots or (_SLOTS[0] if count_readers(options) > 1 else _OWN_SLOTS)


def split_kv_memory(
    tokens: int,
    trained: int,
    slots: int | None,
    context: int | None,
    most: int = _SLOTS[0],
    room: int = _ROOM,
) -> tuple[int, int]:
    """Divide `tokens` of memory into slots: `split_kv_memory(90_000, 8192, None, None)` is 32 slots of
    2560.
    """
    wanted = context or min(trained, room)
    if slots is None:
        slots = next((count for count in _SLOTS if count <= most and count * wanted <= tokens), 1)
    if context is None:
        context = max(_GRAIN, min(trained, tokens // slots // _GRAIN * _GRAIN))
    return slots, context
