"""Which prompts an upstream has seen lately, so that one that begins alike goes where that is known."""

from collections import OrderedDict
from collections.abc import Sequence

from dragoman.types import Job

BLOCK = 32
"""Ids that are remembered as one. A beginning that is shorter is not worth going after."""
MOST_BLOCKS = 1024
"""Of one prompt."""
MOST_KEPT = 64 * 1024


def blocks_of(job: Job) -> list[int]:
    """A number for each beginning of the prompt; equal beginnings have equal numbers."""
    seen, blocks = hash((job.adapters, job.cache_salt)), []
    for start in range(0, min(len(job.prompt) - BLOCK + 1, BLOCK * MOST_BLOCKS), BLOCK):
        seen = hash((seen, job.prompt[start : start + BLOCK]))
        blocks.append(seen)
    return blocks


class Prefixes:
    def __init__(self, most: int = MOST_KEPT) -> None:
        self._most = most
        self._kept: OrderedDict[int, None] = OrderedDict()

    def known(self, blocks: Sequence[int]) -> int:
        """How many blocks from the beginning on have been there."""
        return next((place for place, block in enumerate(blocks) if block not in self._kept), len(blocks))

    def add(self, blocks: Sequence[int]) -> None:
        # The beginning last: it is shared most, and must not go before what follows it.
        for block in reversed(blocks):
            self._kept[block] = None
            self._kept.move_to_end(block)
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)

    def clear(self) -> None:
        self._kept.clear()
