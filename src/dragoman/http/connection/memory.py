"""Memory that goes back to the machine when a big request is over."""

import ctypes
import logging
import resource
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger("dragoman.http")

M_MMAP_THRESHOLD = -3
BIG_BLOCK = 1024 * 1024


def return_big_blocks() -> None:
    """Has the C library give every big block back at once.

    glibc does so only until the first one was freed; from then on it keeps blocks of that size for the next,
    in every thread: some requests of 16 MB and a server has 100 MB that it never uses again.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return  # Another C library, with ways of its own.
    if not mallopt(M_MMAP_THRESHOLD, BIG_BLOCK):
        logger.debug("The C library keeps its way with big blocks.")


def give_back() -> None:
    """Has the C library return what is free between what is not. It takes milliseconds: not on the loop.

    Each thread has places of its own for small blocks, and what was freed in them stays with the process.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def resident() -> int:
    """Bytes of memory that the process has, or the most it ever had where the system says only that."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
