"""A scripted runner with pages, which are lists of ids."""

from collections.abc import Sequence
from typing import Any

from dragoman.engines.local.runner import Rows
from dragoman.engines.local.scheduler import Scheduler
from tests.engines.local.scripted import ScriptedRunner
from tests.engines.local.support import Desk

NOTHING = -1


class FakePagedRunner(ScriptedRunner):
    """It insists that no page is written while another sequence may read it."""

    rereads = False

    def __init__(self, *, pages: int = 64, page: int = 4, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.page = page
        self.pages = pages
        self.held = [[NOTHING] * page for _ in range(pages)]
        self.copies: list[tuple[int, int]] = []

    def check(self, rows: Rows) -> None:
        """A page that is written in this step is in the table of one sequence only."""
        written = {
            (slot, rows.tables[slot][position // self.page])
            for slot, position in zip(rows.slots, rows.positions, strict=True)
        }
        for slot, page in written:
            others = [table for other, table in rows.tables.items() if other != slot]
            assert not any(page in table for table in others)

    def write(self, rows: Rows, number: int) -> Sequence[int]:
        table, position = rows.tables[rows.slots[number]], rows.positions[number]
        self.held[table[position // self.page]][position % self.page] = rows.tokens[number]
        return [self.held[table[place // self.page]][place % self.page] for place in range(position + 1)]

    def copy_page(self, source: int, target: int) -> None:
        self.copies.append((source, target))
        self.held[target] = list(self.held[source])


class PagedDesk(Desk):
    """A scheduler over pages, driven by hand."""

    runner: FakePagedRunner  # type: ignore[assignment]

    def __init__(
        self,
        *,
        batch: int = 32,
        chunk: int = 8,
        guesses: int = 0,
        drafter: Any = None,
        **runner: Any,
    ) -> None:
        super().__init__()
        self.runner = FakePagedRunner(**runner)
        self.scheduler = Scheduler(self.runner, batch=batch, chunk=chunk, guesses=guesses, drafter=drafter)
