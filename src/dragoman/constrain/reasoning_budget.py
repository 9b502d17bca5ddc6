"""Budget of reasoning tokens: when it is used up, reasoning is closed in the model's own way.

llguidance can bound a lexeme by tokens, but is then slower and cannot join grammars, and an answer may have a
budget without a grammar. Therefore the budget wraps the matcher, which sees forced ids like all others.
"""

import codecs
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from msgspec import Struct

from dragoman.constrain.constraint import Constraint
from dragoman.constrain.grammar.lark_builder import LarkBuilder
from dragoman.dialects.declarations import Dialect
from dragoman.dialects.scan import MentionTracker
from dragoman.types import ForcedTokenMatcher, Matcher, PrecomputableMatcher


class BudgetMarkers(Struct, frozen=True):
    """Markers that open and close reasoning, and how its end is written."""

    opens: tuple[str, ...]
    closes: tuple[str, ...]
    end: str
    calls: tuple[str, ...] = ()
    """Openings of calls, which also end reasoning unless reasoning only mentions them."""


class BudgetSpec(Struct, frozen=True):
    markers: BudgetMarkers
    tokens: int
    starts_in_reasoning: bool


class ConstraintSpec(Struct, frozen=True):
    grammar: Constraint | None = None
    budget: BudgetSpec | None = None


MOST_DELAY = 8
"""Maximum number of ids after the budget if reasoning cannot end yet, for example inside a character."""
_SPECIAL = b"\xff"
"""Byte before the id of a special token in the bytes of an answer. It is never part of text."""


class MarkerTokenizer(Protocol):
    """The part of a tokenizer that a budget uses."""

    @property
    def pieces(self) -> Sequence[bytes]: ...

    @property
    def special_ids(self) -> Mapping[str, int]: ...

    def encode(self, text: str) -> list[int]: ...


class ReasoningBudget:
    """Reasoning budget for the answers of one model in one dialect."""

    def __init__(
        self,
        written: Dialect | BudgetMarkers,
        tokens: int,
        tokenizer: MarkerTokenizer,
        *,
        starts_in_reasoning: bool = False,
    ) -> None:
        """`written` is how the model writes reasoning."""
        markers = written if isinstance(written, BudgetMarkers) else _markers(written)
        self.recipe = BudgetSpec(markers, tokens, starts_in_reasoning)
        self.tokens = tokens
        self.starts_in_reasoning = starts_in_reasoning
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.special_ids.values())
        self._rules = LarkBuilder(tokenizer.special_ids)
        self.end = markers.end
        self.opens = tuple(map(self._bytes, markers.opens))
        self.closes = tuple(map(self._bytes, markers.closes))
        self.calls = tuple(map(self._bytes, markers.calls))

    @property
    def applies(self) -> bool:
        """Whether the dialect has reasoning."""
        return bool(self.end)

    def start(self, inner: Matcher | None = None) -> "BudgetMatcher":
        """Return a matcher for one answer, which may also have a grammar."""
        return BudgetMatcher(self, inner)

    def spell(self, id_: int) -> bytes:
        return _mark(id_) if id_ in self._special else self._tokenizer.pieces[id_]

    def closing_ids(self, before: bytes) -> list[int]:
        """Return the ids that end reasoning. Layout that is already there is not written twice."""
        end, layout = self.end, self.end[: len(self.end) - len(self.end.lstrip())]
        while layout and before.endswith(layout.encode()):
            end, layout = end[len(layout) :], ""
        ids: list[int] = []
        for piece in self._rules.pieces(end):
            ids += [piece] if isinstance(piece, int) else self._tokenizer.encode(piece)
        return ids

    def _bytes(self, marker: str) -> bytes:
        pieces = self._rules.pieces(marker)
        return b"".join(_mark(piece) if isinstance(piece, int) else piece.encode() for piece in pieces)


class BudgetMatcher:
    """A `Matcher` that counts the ids of reasoning and forces its end when the budget is used up."""

    def __init__(self, budget: ReasoningBudget, inner: Matcher | None) -> None:
        self._budget = budget
        self._inner = inner
        self._inside = budget.starts_in_reasoning and budget.applies
        self._left = budget.tokens
        self._delay = MOST_DELAY
        self._forced: list[int] = []
        self._tail = b""
        """Last bytes of the answer. Reasoning before them is recorded in `_margin`."""
        self._longest = max(map(len, (*budget.opens, *budget.closes, *budget.calls)), default=1)
        self._margin = MentionTracker()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._mentions = False
        """Whether only layout came after a call marker that is only mentioned; the next marker is then
        mentioned, too.
        """

    def precompute_mask(self) -> None:
        if isinstance(self._inner, PrecomputableMatcher):
            self._inner.precompute_mask()

    def forced_tokens(self, most: int) -> list[int]:
        return self._inner.forced_tokens(most) if isinstance(self._inner, ForcedTokenMatcher) else []

    def mask(self, row: Any) -> None:
        if self._inner is not None:
            self._inner.mask(row)
        if self._inside and self._left <= 0 and not self._forced and self._may_end(row):
            self._forced = self._budget.closing_ids(self._tail)
        if self._forced and self._inner is not None and not np.isfinite(row[self._forced[0]]):
            # The grammar decides what comes next.
            self._forced = []
        if self._forced:
            row[:] = -np.inf
            row[self._forced[0]] = 0.0

    def bitmask(self) -> Any:
        """Return the mask, or None if reasoning must end here, which depends on the row."""
        if self._forced or (self._inside and self._left <= 0):
            return None
        if self._inner is None:
            return np.zeros(0, np.uint32)
        words: Callable[[], Any] = getattr(self._inner, "bitmask", lambda: None)
        return words()

    def _may_end(self, row: Any) -> bool:
        """Whether reasoning may end here: not inside a character, and only if the grammar allows it."""
        first = self._budget.closing_ids(self._tail)[0]
        if _is_cut(self._tail) or not np.isfinite(row[first]):
            self._delay -= 1
            return self._delay < 0 and bool(np.isfinite(row[first]))
        return True

    def accept(self, id_: int) -> None:
        if self._inner is not None:
            self._inner.accept(id_)
        if self._forced and id_ == self._forced[0]:
            self._forced.pop(0)
        if self._inside:
            self._left -= 1
        output = self._budget.spell(id_)
        self._tail += output
        self._note(len(self._tail) - 4 * self._longest)
        marks = self._budget.closes if self._inside else self._budget.opens
        if any(self._has(mark, output) for mark in marks) or (self._inside and self._calls(output)):
            self._inside = not self._inside
            self._tail, self._margin, self._mentions = b"", MentionTracker(), False

    def _note(self, size: int) -> None:
        if size > 0:
            noted, self._tail = self._tail[:size], self._tail[size:]
            self._margin.note(self._decoder.decode(noted))
            self._mentions = self._mentions and not noted.strip()

    def _has(self, mark: bytes, output: bytes) -> bool:
        """Whether the last id completed the marker; more text may follow it in the same token."""
        return mark in self._tail[-(len(output) + len(mark) - 1) :]

    def _calls(self, output: bytes) -> bool:
        """Whether the last id began a call, by the rule that the parser uses."""
        for mark in self._budget.calls:
            if self._has(mark, output):
                self._note(self._tail.rindex(mark))
                is_call = mark.startswith(_SPECIAL) or not (self._mentions or self._margin.find_mention(""))
                if is_call:
                    return True
                self._note(len(mark))
                self._mentions = True
        return False

    @property
    def is_accepting(self) -> bool:
        return not self._forced and (self._inner is None or self._inner.is_accepting)

    @property
    def is_complete(self) -> bool:
        return self._inner is not None and not self._forced and self._inner.is_complete


class BudgetedConstraint:
    """Constraint of a job with a reasoning budget: `new_matcher()` returns a new matcher for each answer."""

    source = None
    """None, because no grammar text describes it: the end of reasoning depends on the output."""

    def __init__(
        self,
        budget: ReasoningBudget,
        constraint: Callable[[], Matcher] | None = None,
        recipe: ConstraintSpec | None = None,
    ) -> None:
        """`recipe` describes the constraint as data."""
        self._budget = budget
        self._constraint = constraint
        self.recipe = ConstraintSpec(recipe.grammar if recipe is not None else None, budget.recipe)

    def new_matcher(self) -> BudgetMatcher:
        return self._budget.start(self._constraint() if self._constraint is not None else None)


def _markers(dialect: Dialect) -> BudgetMarkers:
    thinking, channels = dialect.reasoning, dialect.channels
    if channels is not None and channels.written[0]:
        before, _, after = channels.written[0].partition("{body}")
        # The next block is opened as well: otherwise the model may open another reasoning block.
        return BudgetMarkers((before.strip(),), (*channels.ends, *channels.start), after + channels.start[0])
    if thinking is None:
        return BudgetMarkers((), (), "")
    sections = [shape.section.open for shape in dialect.calls if shape.section]
    begun = [*(shape.open for shape in dialect.calls), *sections] if thinking.ended_by_call else []
    opens, closes, calls = (
        tuple(dict.fromkeys(mark.strip() for group in groups for mark in group))
        for groups in ([thinking.open], [thinking.close, thinking.ended_by], begun)
    )
    return BudgetMarkers(opens, closes, thinking.close[0], calls)


def _mark(id_: int) -> bytes:
    return _SPECIAL + id_.to_bytes(4, "big") + _SPECIAL


def _is_cut(text: bytes) -> bool:
    """Whether the text ends inside a character."""
    for back in range(1, min(4, len(text)) + 1):
        byte = text[-back]
        if byte >= 0xC0 and byte != 0xFF:
            return back < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
        if byte < 0x80:
            return False
    return False
