"""The operating system's memory pages of this process: those of mapped files, and large ones.

A mapped file counts as memory of the process as far as it was read, though the system may evict it at any
time. A converter of its weights, or a runtime that reorders them, creates a second copy. So the pages that
were read are released meanwhile, and there are never two full copies. What is read again comes from the
system's file cache.

A step of one answer reads all weights once. In the usual pages of 4 KiB that takes a quarter of a million
page-table lookups per gigabyte, and in a virtual machine each of them costs twice. Most systems use pages of
2 MiB only on request, and neither llama.cpp nor OpenVINO requests them. So memory that is filled is collapsed
into large pages here, chunk by chunk, without changing its contents. Memory that was never written is left
alone, because a large page would allocate it.

Where the system supports neither, nothing happens.
"""

import ctypes
import mmap
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MAPS = Path("/proc/self/maps")

# Pages of mapped files.

_EACH_S = 0.05


@contextmanager
def read_pages_given_back(file: Path) -> Iterator[None]:
    """Release a mapped file's pages repeatedly while the block runs, and once more at the end."""
    ended = threading.Event()

    def work() -> None:
        while not ended.wait(_EACH_S):
            give_back(file)

    thread = threading.Thread(target=work, name="dragoman-mapped", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        give_back(file)


def give_back(file: Path) -> None:
    """Release the pages of a mapped file; no effect where the system does not list its mappings."""
    if not hasattr(mmap, "MADV_DONTNEED"):
        return
    try:
        advise = ctypes.CDLL(None).madvise
        lines = _MAPS.read_text().splitlines()
    except (OSError, AttributeError):
        return
    for start, end in _ranges(lines, str(file.resolve())):
        advise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


def _ranges(lines: list[str], file: str) -> Iterator[tuple[int, int]]:
    """Yield the address ranges of a file that are mapped read-only: written pages would be lost.

    >>> list(_ranges(["10-2f r--s 00000000 fe:00 77 /a b"], "/a b"))
    [(16, 47)]
    """
    for line in lines:
        where, rights, *rest = line.split(maxsplit=5)
        if len(rest) == 4 and rest[3] == file and "w" not in rights:
            start, end = (int(number, 16) for number in where.split("-"))
            yield start, end


# Large pages.

LARGE = 2 << 20
PIECE = 8 * LARGE
"""Bytes that are collapsed at once, in about 20 ms."""
_SMALL = mmap.PAGESIZE
_COLLAPSE = 25
"""`MADV_COLLAPSE`, which collapses at once. Before Linux 6.1 the kernel does it later."""
_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_PRIVATE = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) rw-p 00000000 00:00 0\b", re.MULTILINE)


def use_large_pages() -> Iterator[int]:
    """Collapse the filled memory into large pages; yield their number after each chunk."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    try:
        library = ctypes.CDLL(None)
        advise, look = library.madvise, library.mincore
        if "[never]" in _ENABLED.read_text():
            return
        lines = _MAPS.read_text()
    except (OSError, AttributeError):
        return
    for start, end in large_ranges(lines):
        for piece in range(start, end, PIECE):
            yield sum(
                _collapse(advise, address)
                for address in range(piece, min(piece + PIECE, end), LARGE)
                if _is_filled(look, address)
            )


def large_ranges(lines: str) -> Iterator[tuple[int, int]]:
    """Yield the whole large pages within private anonymous memory.

    >>> list(large_ranges("1ff000-601000 rw-p 00000000 00:00 0 \\n1ff000-601000 rw-p 00000000 fe:00 7 /a"))
    [(2097152, 6291456)]
    """
    for match in _PRIVATE.finditer(lines):
        start, end = int(match[1], 16), int(match[2], 16)
        start, end = -(-start // LARGE) * LARGE, end // LARGE * LARGE
        if start < end:
            yield start, end


def _is_filled(look: "ctypes._NamedFuncPointer", address: int) -> bool:
    array = (ctypes.c_ubyte * (LARGE // _SMALL))()
    failed = look(ctypes.c_void_p(address), ctypes.c_size_t(LARGE), array)
    return not failed and all(array)


def _collapse(advise: "ctypes._NamedFuncPointer", address: int) -> bool:
    where = ctypes.c_void_p(address), ctypes.c_size_t(LARGE)
    return not advise(*where, mmap.MADV_HUGEPAGE) and not advise(*where, _COLLAPSE)
