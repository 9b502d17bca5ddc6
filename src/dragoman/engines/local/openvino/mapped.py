"""Pages of a file of weights that were read, and are needed no more.

A file that is mapped counts as memory of the process as far as it was read, though the system may take that
back at any time. Whoever makes something else of it, a converter of its numbers or the runtime of its order,
has a second copy. So what was read is given back meanwhile, and there are never two of everything. What is
read once more comes from the system's cache of files.
"""

import ctypes
import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_EACH_S = 0.05
_MAPS = Path("/proc/self/maps")


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
