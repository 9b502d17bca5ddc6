"""What this machine offers a process: cores and memory, as far as affinity and control groups let it."""

import math
import os
from pathlib import Path

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
    return frozenset(_told(source, "flags", "features").split())


def cpu_name(source: Path = _CPUINFO) -> str:
    """What the first processor of the list is called; empty where the system does not say."""
    return _told(source, "model name", "cpu part")


def _told(source: Path, *fields: str) -> str:
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
