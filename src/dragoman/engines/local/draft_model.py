"""A draft model: a smaller model with the same vocabulary that proposes the next tokens.

The large model verifies all draft tokens in one pass (see `speculation.py`), which takes little longer than
computing one token. Whatever the draft proposes, the answer is the same; only the number of tokens per step
changes.

The draft model has a few slots of its own. Each call gets all ids of a sequence so far: the draft model
truncates what differs in its slot and prefills what is missing. So it needs no notice of answers that end,
are cancelled, preempted or moved; slots of sequences that are gone are simply reused.
"""

import logging
import time
from collections.abc import Sequence as Ordered
from pathlib import Path

import numpy as np

from dragoman.engines.local.gguf_model import LlamaTokenizer
from dragoman.engines.local.hardware import check_memory, cores, read_model
from dragoman.engines.local.kv_cache import common_prefix_length
from dragoman.engines.local.llamacpp import LlamaRunner
from dragoman.engines.local.options import LocalOptions
from dragoman.engines.local.runner import SlotRunner, StepFailed, StepInterrupted, StepRows
from dragoman.engines.local.sequence import Sequence
from dragoman.engines.protocol import Tokenizer
from dragoman.engines.sampling import Ids, Logits
from dragoman.errors import ModelFileError

PLACES = 4
"""Sequences that the draft model serves at once. With more, the rows without draft tokens dominate a step."""
READ_ROWS = 128
"""Tokens that the draft model prefills before one step; the other sequences wait meanwhile."""
_UNLIKE = 128
"""Tokens by which the vocabularies may differ in length; usually padding."""
_LEARNING = 0.3
_log = logging.getLogger("dragoman.engine")


class _DraftSlot:
    """One slot of the draft model and the ids computed in it."""

    __slots__ = ("ids", "index", "length", "sequence", "used")

    def __init__(self, index: int, context: int) -> None:
        self.index = index
        self.ids: Ids = np.zeros(context, np.int32)
        self.length = 0
        self.sequence: Sequence | None = None
        self.used = 0

    def add_to(self, rows: StepRows, tokens: Ordered[int], wanted: bool) -> None:
        """Add rows that compute these tokens next; `wanted`: whether the logits of the last one are
        needed.
        """
        outputs = [False] * (len(tokens) - 1) + [wanted]
        rows.extend(self.index, self.length, tokens, outputs, outcome=True)
        rows.adapters[self.index] = ()
        self.ids[self.length : self.length + len(tokens)] = tokens
        self.length += len(tokens)


class Drafter:
    """Draft tokens from a draft model. For the engine thread only."""

    def __init__(self, runner: SlotRunner, vocabulary: int, bytes: int = 0) -> None:
        self._runner = runner
        self.bytes = bytes
        """Size of its weights and KV cache."""
        self._vocabulary = min(vocabulary, runner.vocabulary)
        self._places = [_DraftSlot(index, runner.context) for index in range(runner.slots)]
        self._clock = 0
        self._failed = False
        self.seconds = 0.0
        """Duration of the last drafting; 0 if it was still in prefill."""
        self.one_guess = 0.0
        """Recent duration of drafting one token for each sequence."""

    @property
    def slots(self) -> int:
        return len(self._places)

    def guess(self, sequences: Ordered[Sequence], known: Ordered[Ids], count: int) -> list[list[int]] | None:
        """Return draft tokens after the known ids of each sequence; none for those still in prefill.

        Returns None if the sequences do not fit.
        """
        self.seconds = 0.0
        if (
            self._failed
            or len(sequences) > self.slots
            or any(ids.size + count > self._runner.context for ids in known)
        ):
            return None
        # It takes no media: their rows are replaced by an arbitrary id.
        known = [np.minimum(ids, self._vocabulary - 1) for ids in known]
        self._clock += 1
        began = time.perf_counter()
        items: list[list[int]] = [[] for _ in sequences]
        positions = [self._place(one, ids) for one, ids in zip(sequences, known, strict=True)]
        order = sorted(range(len(positions)), key=lambda at: positions[at].index)
        try:
            self._guess([positions[at] for at in order], [known[at] for at in order],
                        [items[at] for at in order], count)  # fmt: skip
        except (StepFailed, StepInterrupted):
            _log.warning("The draft model failed to compute a step; speculative decoding with it is disabled")
            self._failed = True
            return None
        if all(items):
            self.seconds = time.perf_counter() - began
            self.one_guess += _LEARNING * (self.seconds / count - self.one_guess)
        return items

    def _guess(
        self, positions: list[_DraftSlot], known: Ordered[Ids], items: list[list[int]], count: int
    ) -> None:
        rows, ready = StepRows(), []
        for slot, ids, guesses in zip(positions, known, items, strict=True):
            tokens = ids[slot.length : slot.length + READ_ROWS // len(positions)].tolist()
            is_last = slot.length + len(tokens) == ids.size
            slot.add_to(rows, tokens, is_last)
            if is_last:
                ready.append((slot, guesses))
        logits = self._runner.step(rows)
        if ready:
            self._choose(logits, ready)
        for _ in range(count - 1 if ready else 0):
            rows = StepRows()
            for slot, guesses in ready:
                slot.add_to(rows, guesses[-1:], True)
            self._choose(self._runner.step(rows), ready)

    def _choose(self, logits: Logits, ready: list[tuple[_DraftSlot, list[int]]]) -> None:
        """Append the likeliest token of each."""
        for row, (_, guesses) in zip(logits[:, : self._vocabulary].argmax(axis=1), ready, strict=True):
            guesses.append(int(row))

    def _place(self, sequence: Sequence, known: Ids) -> _DraftSlot:
        """Return the sequence's own slot, else the free one with the longest common prefix, or unused for
        longest.
        """
        mine = [draft_slot for draft_slot in self._places if draft_slot.sequence is sequence]
        free = [place for place in self._places if place.used < self._clock]
        slot = mine[0] if mine else max(free, key=lambda one: (_shared(one, known), -one.used))
        slot.sequence, slot.used = sequence, self._clock
        # The last token is computed again: its logits are needed.
        self._cut(slot, min(_shared(slot, known), known.size - 1))
        return slot

    def _cut(self, slot: _DraftSlot, length: int) -> None:
        if length < slot.length:
            self._runner.truncate(slot.index, length)
            slot.length = length

    def close(self) -> None:
        self._runner.close()


def _shared(slot: _DraftSlot, known: Ids) -> int:
    return common_prefix_length(slot.ids[: slot.length], known)


def open_draft(path: Path, options: LocalOptions, tokenizer: Tokenizer, name: str, context: int) -> Drafter:
    """Open a draft model. Raises ModelFileError or SettingsError if it does not fit this model."""
    model = read_model(path, options)
    if not model.rewinds:
        raise ModelFileError(
            f"{path.name} has layers whose state cannot be truncated; it cannot be a draft model."
        )
    check_vocabulary(LlamaTokenizer(model).pieces, tokenizer.pieces, path.name, name)
    count = min(PLACES, options.slots or PLACES)
    length = min(context, model.trained_context or context)
    kept = count * length * model.token_bytes
    check_memory(kept, f"{count} sequences of {length} tokens of the draft model")
    runner = LlamaRunner(
        model,
        slots=count,
        context=length,
        batch=READ_ROWS,
        threads=options.threads or cores(),
        flash_attention=options.flash_attention,
    )
    weights = sum(part.stat().st_size for part in model.parts)
    return Drafter(runner, len(tokenizer.pieces), weights + kept)


def check_vocabulary(draft: Ordered[bytes], target: Ordered[bytes], draft_name: str, name: str) -> None:
    """Raise ModelFileError unless each id is the same token in both vocabularies."""
    advice = "choose a draft model of the same model family"
    if abs(len(draft) - len(target)) > _UNLIKE:
        counts = f"{len(draft)} tokens and {len(target)}"
        raise ModelFileError(f"{draft_name} and {name} do not share a vocabulary ({counts}); {advice}.")
    for token, (one, other) in enumerate(zip(draft, target, strict=False)):
        if one != other:
            which = f"token {token} is {one[:20]!r} in one and {other[:20]!r} in the other"
            raise ModelFileError(f"{draft_name} and {name} do not share a vocabulary: {which}; {advice}.")
