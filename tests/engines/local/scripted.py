"""What the two scripted runners have in common: they compute nothing, but remember everything."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dragoman.engines.local import LocalEngine, LocalOptions
from dragoman.engines.local.runner import StepFailed, StepInterrupted, StepRows
from dragoman.engines.protocol import ModelCard
from dragoman.engines.sampling import Logits
from dragoman.types import Adapters

VOCABULARY = 101
END = 100


def following(tokens: Sequence[int], adapters: Adapters = (), recalls: int | None = None) -> int:
    """The id that comes after `tokens`: all of them decide, in their order, or only the newest `recalls`."""
    value = sum(sum(map(ord, name)) * int(16 * scale) for name, scale in adapters)
    for token in tokens[-recalls:] if recalls else tokens:
        value = (value * 31 + token + 7) % 1_000_003
    return value % END


def expected(
    prompt: Sequence[int], count: int, adapters: Adapters = (), recalls: int | None = None
) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(following(tokens, adapters, recalls))
    return tokens[len(prompt) :]


def row_of(best: int) -> Logits:
    """Logits whose maximum is at `best`, falling off with the distance."""
    return -np.abs(np.arange(VOCABULARY, dtype=np.float32) - best)


def vector_of(prompt: Sequence[int]) -> list[float]:
    """Its length is one, and every id turns it."""
    angle = following(prompt) / END
    return [float(np.cos(angle)), float(np.sin(angle))]


class ScriptedRunner(ABC):
    """What a sequence reads decides what comes next, so that its answers show any mistake in the contents."""

    wants_equal_chunks = False
    prefill_block = 1
    block_stats = None
    adapters: tuple[str, ...] = ("red", "blue")
    batches_adapters = False
    interruptible = True

    def __init__(
        self,
        *,
        slots: int = 4,
        context: int = 64,
        rows: int = 64,
        extra: int = 8,
        pass_rows: int = 0,
        recalls: int | None = None,
    ) -> None:
        self.slots = slots
        self.context = context
        self.vocabulary = VOCABULARY
        self.max_rows = rows + slots
        self.max_outputs = slots + extra
        self.step_overhead_rows = pass_rows
        self.recalls = recalls
        self.steps: list[StepRows] = []
        self.step_adapters: list[Adapters] = []
        self.before_step: Callable[[], None] = lambda: None
        self.failing = False
        self.interrupted = False
        self.resets = self.rebuilds = 0
        self.closed = False

    def warm_up(self) -> None:
        assert self.steps == []

    def step(self, rows: StepRows) -> Logits:
        assert 0 < len(rows) <= self.max_rows
        assert sum(rows.outputs) <= self.max_outputs
        self.check(rows)
        self.interrupted = False
        self.before_step()
        if self.interrupted:
            raise StepInterrupted
        self.steps.append(rows)
        chosen = rows.adapters
        assert self.batches_adapters or len(set(chosen.values())) == 1
        self.step_adapters.append(next(iter(chosen.values())))
        items = []
        for number, output in enumerate(rows.outputs):
            held = self.write(rows, number)
            if output:
                items.append(row_of(following(held, chosen[rows.slots[number]], self.recalls)))
        if self.failing:
            raise StepFailed("as told")
        return np.array(items, np.float32).reshape(len(items), self.vocabulary)

    def read_adapter(self, name: str, path: Path) -> Callable[[], None]:
        raise NotImplementedError

    def drop_adapter(self, name: str) -> None:
        self.adapters = tuple(other for other in self.adapters if other != name)

    @abstractmethod
    def check(self, rows: StepRows) -> None:
        """Insist on what must hold of a step before anything of it is written."""

    @abstractmethod
    def write(self, rows: StepRows, number: int) -> Sequence[int]:
        """Put one row's id where it belongs; all ids that its sequence holds then."""

    def interrupt(self) -> None:
        self.interrupted = True

    def reset(self) -> None:
        self.resets += 1

    def rebuild(self) -> None:
        self.rebuilds += 1
        self.forget_all()

    @abstractmethod
    def forget_all(self) -> None:
        """All memory is as it was at first."""

    def embed(self, prompts: Sequence[Sequence[int]]) -> Iterator[list[float] | None]:
        for prompt in prompts:
            yield None
            yield vector_of(prompt)

    def close(self) -> None:
        self.closed = True


class NoTokenizer:
    pieces = (b"",) * VOCABULARY
    special_ids: dict[str, int] = {}  # noqa: RUF012
    bos_id = None
    eos_id = None
    end_ids = frozenset({END})
    add_bos = False
    infill = None

    def encode(self, text: str) -> list[int]:
        return []


def engine_over(runner: Any, options: LocalOptions | None = None) -> LocalEngine:
    card = ModelCard(name="fake", max_model_len=runner.context)
    return LocalEngine(runner, NoTokenizer(), card, options or LocalOptions(batch=32, chunk=8))
