"""Weights in pages of 2 MiB.

A step of one answer reads all weights once. In the usual pages of 4 KiB that takes a quarter of a million
look-ups for each gigabyte, and in a virtual machine each of them costs twice. Most systems give large pages
only to who asks for them, and neither llama.cpp nor OpenVINO does. So what is filled already is put together
here, piece by piece: its bytes stay what they are. What nobody has written to is left alone, because a large
page would make memory of it. Where the system cannot do it, nothing happens.
"""

import ctypes
import mmap
import re
from collections.abc import Iterator
from pathlib import Path

LARGE = 2 << 20
PIECE = 8 * LARGE
"""So much is put together in one go, in some 20 ms."""
_SMALL = mmap.PAGESIZE
_COLLAPSE = 25
"""`MADV_COLLAPSE`: at once. Before Linux 6.1 the system does it in its own time."""
_MAPS = Path("/proc/self/maps")
_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_PRIVATE = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) rw-p 00000000 00:00 0\b", re.MULTILINE)


def use_large_pages() -> Iterator[int]:
    """Puts the memory that is filled now into large pages; how many there are, after each piece."""
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
    """Of private memory that belongs to no file, as far as it has whole large pages.

    >>> list(large_ranges("1ff000-601000 rw-p 00000000 00:00 0 \\n1ff000-601000 rw-p 00000000 fe:00 7 /a"))
    [(2097152, 6291456)]
    """
    for found in _PRIVATE.finditer(lines):
        start, end = int(found[1], 16), int(found[2], 16)
        start, end = -(-start // LARGE) * LARGE, end // LARGE * LARGE
        if start < end:
            yield start, end


def _is_filled(look: "ctypes._NamedFuncPointer", address: int) -> bool:
    told = (ctypes.c_ubyte * (LARGE // _SMALL))()
    failed = look(ctypes.c_void_p(address), ctypes.c_size_t(LARGE), told)
    return not failed and all(told)


def _collapse(advise: "ctypes._NamedFuncPointer", address: int) -> bool:
    where = ctypes.c_void_p(address), ctypes.c_size_t(LARGE)
    return not advise(*where, mmap.MADV_HUGEPAGE) and not advise(*where, _COLLAPSE)
