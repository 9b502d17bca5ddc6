"""A runner with pages that computes nothing: pages are lists of ids, and what a sequence reads decides."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dragoman.engines.choosing.arrays import Logits
from dragoman.engines.local.runner import Rows, StepFailed
from dragoman.engines.local.scheduler import Scheduler
from dragoman.types import Adapters
from tests.engines.local.support import VOCABULARY, Desk, following, row_of

NOTHING = -1


class FakePagedRunner:
    """It insists that no position is written twice with another id while somebody may read it."""

    equal_pieces = False
    adapters: tuple[str, ...] = ("red", "blue")

    def __init__(
        self, *, slots: int = 4, context: int = 64, pages: int = 64, page: int = 4, rows: int = 64
    ) -> None:
        self.slots = slots
        self.context = context
        self.vocabulary = VOCABULARY
        self.max_rows = rows + slots
        self.max_outputs = slots + 8
        self.page = page
        self.pages = pages
        self.held = [[NOTHING] * page for _ in range(pages)]
        self.steps: list[Rows] = []
        self.copies: list[tuple[int, int]] = []
        self.failing = False

    def warm_up(self) -> None:
        pass

    def step(self, rows: Rows, adapters: Adapters) -> Logits:
        assert 0 < len(rows) <= self.max_rows
        self._check_apart(rows)
        self.steps.append(rows)
        found = []
        for token, position, slot, output in zip(
            rows.tokens, rows.positions, rows.slots, rows.outputs, strict=True
        ):
            table = rows.tables[slot]
            self.held[table[position // self.page]][position % self.page] = token
            if output:
                found.append(row_of(following(self._read(table, position + 1), adapters)))
        if self.failing:
            raise StepFailed("as told")
        return np.array(found, np.float32).reshape(len(found), self.vocabulary)

    def copy_page(self, source: int, target: int) -> None:
        self.copies.append((source, target))
        self.held[target] = list(self.held[source])

    def interrupt(self) -> None:
        pass

    def embed(self, prompts: Sequence[Sequence[int]]) -> Iterator[list[float] | None]:
        yield from ()

    def close(self) -> None:
        pass

    def _check_apart(self, rows: Rows) -> None:
        """A page that is written in this step is in the table of one sequence only."""
        written = {
            (slot, rows.tables[slot][position // self.page])
            for slot, position in zip(rows.slots, rows.positions, strict=True)
        }
        for slot, page in written:
            others = [table for other, table in rows.tables.items() if other != slot]
            assert not any(page in table for table in others)

    def _read(self, table: Sequence[int], length: int) -> list[int]:
        return [self.held[table[place // self.page]][place % self.page] for place in range(length)]


class PagedDesk(Desk):
    """A scheduler over pages, driven by hand."""

    runner: FakePagedRunner  # type: ignore[assignment]

    def __init__(self, *, batch: int = 32, chunk: int = 8, **runner: Any) -> None:
        super().__init__()
        self.runner = FakePagedRunner(**runner)
        self.scheduler = Scheduler(self.runner, batch=batch, chunk=chunk)
