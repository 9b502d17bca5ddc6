"""How rows are laid out for paged attention, so that the bits of a row depend on its own sequence alone.

Matrix products give a row the same bits whatever is beside it, but on some machines only from a number of
rows on: from five on a CPU with AMX. That number is measured at startup, and a step is padded to at least
that many.
Attention has three kernels, which add up in different orders:
- A chunk of several rows goes through tiles. Its bits do not depend on where it begins or ends, but they are
  not those of a single row. So a chunk of a prompt has at least two rows: a single one gets a padding row
  behind it, whose keys and values are overwritten by the next token.
- A chunk of one row is computed by one thread for each head. So each row of an answer is such a chunk, and a
  draft token too: the keys and values of all rows are in their pages before attention begins.
- If there are fewer of those than threads, and no others, they are divided among the threads, and the parts
  added. To avoid this, such a step gets an empty chunk: it counts as one that goes through tiles, and costs
  nothing.

Everything computed row by row does not depend on other rows anyway.
"""

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dragoman.engines.local.runner import StepRows

READ = "read_rows"
"""Optional input of graphs: the number of rows to compute, if not also the padding behind them."""
_NO_TOKEN = 0
_FEW, _EVEN = 64, 16
"""Up to `_FEW` rows each number of rows is used as it is; above, it is rounded up to a multiple of
`_EVEN`.
"""


class Layout:
    """Layout of steps. `unread` is a page for the keys and values of padding rows."""

    def __init__(self, page: int, unread: int) -> None:
        self.least = 0
        """Minimum rows of a step."""
        self._page = page
        self._unread = unread

    def of(self, rows: StepRows) -> tuple[dict[str, NDArray[Any]], NDArray[np.intp]]:
        """Return the inputs of the graph, and the indices of the requested rows in its output."""
        tokens, positions = np.array(rows.tokens, np.int64), np.array(rows.positions, np.int64)
        indices = np.arange(len(tokens))
        if all(rows.is_answer):
            # Each row is a chunk, as in most steps: nothing has to be grouped.
            sizes, tables = np.ones(len(tokens), np.intp), [rows.tables[slot] for slot in rows.slots]
        else:
            tokens, positions, sizes, tables = self._pieces(rows, tokens, positions, indices)
        read = max(len(tokens), self.least)
        if (more := max(self.least - len(tokens), _until_even(len(tokens)))) > 0:
            sizes = np.append(sizes, more)
            tokens = np.append(tokens, [_NO_TOKEN] * more)
            positions = np.append(positions, np.arange(more))
            tables.append([self._unread])
        inputs = self._inputs(tokens, positions, sizes, tables)
        return {**inputs, READ: np.array([read])}, indices

    def _pieces(
        self, rows: StepRows, tokens: NDArray[Any], positions: NDArray[Any], indices: NDArray[np.intp]
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.intp], list[Sequence[int]]]:
        """Group rows into chunks: returns tokens, positions, chunk sizes and page tables. `places` is
        shifted by added rows.
        """
        slots, array = np.array(rows.slots), np.array(rows.is_answer)
        first = np.concatenate(([True], (slots[1:] != slots[:-1]) | array[1:]))
        begins = np.flatnonzero(first)
        sizes = np.diff(begins, append=len(tokens))
        tables = [rows.tables[slot] for slot in slots[begins].tolist()]
        if (lone := begins[(sizes == 1) & ~array[begins]]).size:
            sizes[np.searchsorted(begins, lone)] = 2
            tokens = np.insert(tokens, lone + 1, _NO_TOKEN)
            positions = np.insert(positions, lone + 1, positions[lone] + 1)
            indices += np.searchsorted(lone, indices)
        return tokens, positions, sizes, tables

    def _inputs(
        self, tokens: NDArray[Any], positions: NDArray[Any], sizes: NDArray[Any], tables: list[Sequence[int]]
    ) -> dict[str, NDArray[Any]]:
        """Return the inputs of paged attention: where each chunk begins, its cached length, and its pages."""
        ends = sizes.cumsum()
        # Chunks are few, and short lists are faster than arrays.
        begins, past = [0, *ends.tolist()], positions[ends - sizes].tolist()
        longest = positions[ends - 1].tolist()
        used = [
            self._first(table, last // self._page + 1) for table, last in zip(tables, longest, strict=True)
        ]
        if begins[-1] == len(sizes):
            # All are single rows: add the empty chunk.
            begins.append(begins[-1])
            past.append(0)
            used.append([])
        return {
            "input_ids": tokens,
            "position_ids": positions,
            "past_lens": np.array(past, np.int32),
            "subsequence_begins": np.array(begins, np.int32),
            "block_indices_begins": np.array([0, *accumulate(map(len, used))], np.int32),
            "block_indices": np.array([*chain.from_iterable(used)], np.int32),
            "max_context_len": np.array(max(longest) + 1, np.int32),
        }

    def _first(self, table: Sequence[int], count: int) -> Sequence[int]:
        """Return the first pages of a sequence. A padding row may need one page more than it has."""
        return table[:count] if len(table) >= count else [*table, self._unread]


def _until_even(rows: int) -> int:
    """Return the rows to add, so that few distinct numbers occur: for each, the runtime prepares code and
    memory.

    >>> _until_even(64), _until_even(65), _until_even(80)
    (0, 15, 0)
    """
    return -rows % _EVEN if rows > _FEW else 0
