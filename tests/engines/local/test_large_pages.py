"""What is filled comes into large pages, stays what it is, and grows by nothing."""

import asyncio
import ctypes
import mmap
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from dragoman.engines.local import engine_thread
from dragoman.engines.local.os_memory import LARGE, large_ranges, use_large_pages
from tests.engines.local.scripted import engine_over
from tests.engines.local.support import FakeRunner, job
from tests.support.wait import becomes_async

SIZE = 16 * LARGE
SMAPS = Path("/proc/self/smaps")


def _gives_large_pages() -> bool:
    filled = _filled()
    return sum(use_large_pages()) > 0 and _large(filled) > 0


def _filled() -> mmap.mmap:
    memory = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # The system may have large pages for everybody; this is to begin with small ones.
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    memory.write(bytes(range(256)) * (SIZE // 256))
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _told(memory: mmap.mmap, what: str) -> int:
    """Kibibytes, of the mapping in which this memory is."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for part in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", SMAPS.read_text(), flags=re.MULTILINE):
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", part)
        if bounds and int(bounds[1], 16) <= address + SIZE // 2 < int(bounds[2], 16):
            match = re.search(rf"^{what}: +(\d+)", part, re.MULTILINE)
            return int(match[1]) if match else 0
    return 0


def _large(memory: mmap.mmap) -> int:
    return _told(memory, "AnonHugePages")


pytestmark = pytest.mark.skipif(
    not (SMAPS.exists() and hasattr(mmap, "MADV_HUGEPAGE") and _gives_large_pages()),
    reason="THE SYSTEM HAS NO LARGE PAGES TO GIVE",
)


def test_what_is_filled_gets_large_pages_and_stays_what_it_is() -> None:
    memory = _filled()
    assert _large(memory) == 0
    assert sum(use_large_pages()) >= SIZE // LARGE - 1
    assert _large(memory) >= (SIZE - LARGE) >> 10
    assert memory[:] == bytes(range(256)) * (SIZE // 256)


def test_what_nobody_has_written_to_stays_empty() -> None:
    memory = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[SIZE // 2] = 1
    before = _told(memory, "Rss")
    for _ in use_large_pages():
        pass
    assert _told(memory, "Rss") == before


def test_whole_large_pages_of_private_memory_alone() -> None:
    lines = "\n".join(
        [
            "1ff000-601000 rw-p 00000000 00:00 0                      [heap]",
            "700000-7ff000 rw-p 00000000 00:00 0 ",
            "800000-c00000 r--p 00000000 00:00 0 ",
            "c00000-1000000 rw-s 00000000 00:00 0 ",
            "1000000-1400000 rw-p 00000000 fe:00 77                   /a/file",
            "1400000-1800000 rw-p 00000000 00:00 0",
        ]
    )
    assert [*large_ranges(lines)] == [(0x200000, 0x600000), (0x1400000, 0x1800000)]


def test_it_is_done_while_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[int] = []

    def use() -> Iterator[int]:
        for number in range(5):
            pieces.append(number)
            yield number

    async def main() -> None:
        monkeypatch.setattr(engine_thread, "use_large_pages", use)
        engine = engine_over(FakeRunner())
        try:
            steps = [step async for step in engine.generate(job(range(8), 4))]
            assert sum(len(step.ids) for step in steps) == 4
            await becomes_async(lambda: len(pieces) == 5)
        finally:
            await engine.stop()

    asyncio.run(main())
