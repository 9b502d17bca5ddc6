"""A scripted runner with pages, which are lists of ids."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dragoman.engines.local.runner import StepRows
from dragoman.engines.local.scheduler import Scheduler
from dragoman.engines.sampling import Logits, RowChanges
from dragoman.engines.sampling.batched import SamplingBatch
from dragoman.engines.sampling.logits_processors import apply
from dragoman.engines.sampling.sampler import draw, logprob
from dragoman.types import Sampling, TokenLogprob
from tests.engines.local.scripted import ScriptedRunner
from tests.engines.local.support import Desk

NOTHING = -1


class FakePagedRunner(ScriptedRunner):
    """It insists that no page is written while another sequence may read it."""

    decode_kv_differs = False

    def __init__(self, *, pages: int = 64, page: int = 4, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.page = page
        self.pages = pages
        self.held = [[NOTHING] * page for _ in range(pages)]
        self.copies: list[tuple[int, int]] = []

    def check(self, rows: StepRows) -> None:
        """A page that is written in this step is in the table of one sequence only."""
        written = {
            (slot, rows.tables[slot][position // self.page])
            for slot, position in zip(rows.slots, rows.positions, strict=True)
        }
        for slot, page in written:
            others = [table for other, table in rows.tables.items() if other != slot]
            assert not any(page in table for table in others)

    def write(self, rows: StepRows, number: int) -> Sequence[int]:
        table, position = rows.tables[rows.slots[number]], rows.positions[number]
        self.held[table[position // self.page]][position % self.page] = rows.tokens[number]
        return [self.held[table[index // self.page]][index % self.page] for index in range(position + 1)]

    def forget_all(self) -> None:
        self.held = [[NOTHING] * self.page for _ in range(self.pages)]

    def copy_page(self, source: int, target: int) -> None:
        self.copies.append((source, target))
        self.held[target] = list(self.held[source])


class FlyingRunner(FakePagedRunner):
    """One that chooses ids itself, and tells them when it is asked: rows may stand for what it chose."""

    batches_adapters = True

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self._rows: Logits = np.zeros((0, self.vocabulary), np.float32)
        self._chosen: list[int] = []
        self.unseen = 0
        """Steps whose ids nobody has asked for; and the most there ever were."""
        self.most_unseen = 0
        self.told: list[list[int]] = []
        """The tokens of each step as they were told: below zero where nobody knew them."""

    def step(self, rows: StepRows) -> Logits:
        self.told.append(rows.tokens)
        rows.tokens = [self._chosen[~token] if token < 0 else token for token in rows.tokens]
        self._rows = super().step(rows)
        return self._rows

    def choose(self, drawn: SamplingBatch) -> "PendingIds":
        items: list[tuple[int, TokenLogprob | None]] = []
        for index, row in enumerate(drawn.rows):
            asked, rules = drawn.asked[index], drawn.row_changes.get(index, RowChanges([]))
            id_ = drawn.known.get(index)
            if id_ is None:
                id_ = _choose(self._rows[row].copy(), asked, rules, drawn.uniforms[index])
            report = None if asked.logprobs is None else logprob(self._rows[row], id_, asked.logprobs)
            items.append((id_, report))
        self._chosen = [max(id_, 0) for id_, _ in items]
        self.unseen += 1
        self.most_unseen = max(self.most_unseen, self.unseen)
        return PendingIds(self, items)


class PendingIds:
    def __init__(self, runner: FlyingRunner, told: list[tuple[int, TokenLogprob | None]]) -> None:
        self._runner = runner
        self._told = told

    def wait(self) -> list[tuple[int, TokenLogprob | None]]:
        self._runner.unseen -= 1
        return self._told


def _choose(row: Logits, asked: Sampling, rules: RowChanges, uniform: float) -> int:
    apply(row, rules.changes)
    if rules.bitmask is not None and rules.bitmask.size:
        bits = np.unpackbits(rules.bitmask.view(np.uint8), bitorder="little")[: row.size]
        row[: bits.size][bits == 0] = -np.inf
        row[bits.size :] = -np.inf
    if row.max() == -np.inf:
        return -1
    return int(row.argmax()) if asked.temperature <= 0 else draw(row, asked, uniform)


class PagedDesk(Desk):
    """A scheduler over pages, driven by hand."""

    runner: FakePagedRunner  # type: ignore[assignment]

    kind = FakePagedRunner

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
        self.runner = self.kind(**runner)
        self.scheduler = Scheduler(self.runner, batch=batch, chunk=chunk, guesses=guesses, drafter=drafter)


class FlyingDesk(PagedDesk):
    runner: FlyingRunner
    kind = FlyingRunner
