"""The pages of memory that this process has of the system: what was read of a file, and large ones.

A file that is mapped counts as memory of the process as far as it was read, though the system may take that
back at any time. Whoever makes something else of it, a converter of its numbers or the runtime of its order,
has a second copy. So what was read is given back meanwhile, and there are never two of everything. What is
read once more comes from the system's cache of files.

A step of one answer reads all weights once. In the usual pages of 4 KiB that takes a quarter of a million
look-ups for each gigabyte, and in a virtual machine each of them costs twice. Most systems give pages of
2 MiB only to who asks for them, and neither llama.cpp nor OpenVINO does. So what is filled already is put
together here, piece by piece: its bytes stay what they are. What nobody has written to is left alone, because
a large page would make memory of it.

Where the system cannot do either, nothing happens.
"""

import ctypes
import mmap
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MAPS = Path("/proc/self/maps")

# What was read of a file.

_EACH_S = 0.05


@contextmanager
def read_pages_given_back(file: Path) -> Iterator[None]:
    """Again and again, and once more at the end."""
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
    """Where the system does not say what is mapped, nothing is given back."""
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
    """Of what is only read: what was written there would be lost.

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
"""So much is put together in one go, in some 20 ms."""
_SMALL = mmap.PAGESIZE
_COLLAPSE = 25
"""`MADV_COLLAPSE`: at once. Before Linux 6.1 the system does it in its own time."""
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
