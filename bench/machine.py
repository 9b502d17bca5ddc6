"""What a run is made on. A figure without it says little."""

import os
import platform
from pathlib import Path


def cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def hardware() -> str:
    return f"{len(cores())} cores of {_processor()}, Python {platform.python_version()}"


def describe() -> str:
    return f"{hardware()}, load {os.getloadavg()[0]:.1f} before"


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
