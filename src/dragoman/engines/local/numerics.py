"""A name for all that decides the answers to a request: it changes when they may, and not otherwise."""

import os
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

from dragoman.engines.local import machine

# Gigabytes are not read for a name: of a file its size counts, and some of its contents all over it.
_SAMPLES, _SAMPLE = 64, 1 << 14


def numerics(files: Iterable[Path], *facts: object) -> str:
    """Of files with weights, and of what computes with them. Kernels are chosen by what the CPU can do."""
    found = blake2b(repr((facts, sorted(machine.cpu_flags()))).encode(), digest_size=6)
    for file in files:
        found.update(_sampled(file))
    return found.hexdigest()


def _sampled(file: Path) -> bytes:
    found = blake2b(digest_size=16)
    with file.open("rb") as data:
        size = os.fstat(data.fileno()).st_size
        found.update(str(size).encode())
        for number in range(_SAMPLES):
            data.seek(max(0, size - _SAMPLE) * number // (_SAMPLES - 1))
            found.update(data.read(_SAMPLE))
    return found.digest()
