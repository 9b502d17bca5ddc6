"""What stands around calls: around each of them, around all together, and between two."""

from typing import Any, TypeAlias

from msgspec import Struct

from dragoman.dialects.declare import Section
from dragoman.prompt.differences import shared_end, shared_start, without_end

Span: TypeAlias = tuple[int, int]


class Bodies(Struct, frozen=True):
    """Answers without what begins and ends a turn. None: the template cannot write it."""

    one: str
    two: str | None
    """Two calls."""
    pair: str | None
    """One call with two arguments."""
    number: str | None
    """One call, whose argument is a number."""


class Frame(Struct, frozen=True):
    open: str
    close: str
    between: str = ""
    section_open: str = ""
    section_close: str = ""
    several: bool = False
    """Calls follow each other under one marker, with `between`."""

    def markers(self) -> dict[str, Any]:
        """As fields of a declaration."""
        opens, section, before = _spelling(self.open), None, ""
        if self.section_open.strip() and self.section_close.strip():
            section = Section(open=(self.section_open,), close=(self.section_close,))
        elif self.section_open.strip():
            # A section that nothing ends is no section: its marker may stand before a call.
            opens = (self.section_open + self.open, self.open)
        else:
            before = self.section_open
        return {
            "open": opens,
            "close": _spelling(self.close),
            "between": self.between,
            "before": before,
            "section": section,
        }


def frame(bodies: Bodies, one: Span, two: tuple[Span, Span] | None) -> Frame:
    """From where a call stands in an answer with one, and where both stand in an answer with two.

    `<s><c>A</c></s>` and `<s><c>A</c><c>B</c></s>` say that `<c>` is around each call and `<s>` around all.
    """
    lead, tail = bodies.one[: one[0]], bodies.one[one[1] :]
    if two is None or bodies.two is None:
        return Frame(lead, tail)
    middle = bodies.two[two[0][1] : two[1][0]]
    opened = shared_end(lead, middle)
    if not opened.strip():
        return Frame(lead, tail, middle, several=True)
    opened = lead if opened.strip() == lead.strip() else opened
    rest = without_end(middle, opened) if middle.endswith(opened) else middle.removesuffix(opened.strip())
    closed = shared_start(rest, tail)
    return Frame(opened, closed, rest[len(closed) :], without_end(lead, opened), tail[len(closed) :])


def _spelling(text: str) -> tuple[str, ...]:
    return (text,) if text.strip() else ()
