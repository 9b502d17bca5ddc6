"""Terminal output: tables, sizes, a progress line."""

import sys
import unicodedata
from collections.abc import Iterable, Sequence
from typing import TextIO

from dragoman.logs import Colorizer


def size(count: float) -> str:
    """Format bytes: `size(92_000_000)` is `92 MB`."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def visible(text: str) -> str:
    """Remove control characters: output of a model or server must not move the cursor or set the title."""
    return (
        text
        if text.isprintable()
        else "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]], paint: Colorizer) -> str:
    """Format a table with columns as wide as needed; columns of numbers are flush right."""
    body = [list(map(visible, row)) for row in rows]
    widths = [max(len(row[i]) for row in [list(head), *body]) for i in range(len(head))]
    right = [
        bool(body) and all(row[i][:1].isdigit() or row[i] in ("", "-") for row in body)
        for i in range(len(head))
    ]

    def line(row: Sequence[str]) -> str:
        cells = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True))
        return "  ".join(cells).rstrip()

    return "\n".join([paint("dim", line(head)), *map(line, body)])


class Progress:
    """A terminal line that is overwritten; silent if the stream is not a terminal."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._on = self._stream.isatty()
        self._shown = False

    def say(self, text: str) -> None:
        if self._on:
            self._stream.write(f"\r\x1b[K{text}")
            self._stream.flush()
            self._shown = True

    def clear(self) -> None:
        if self._shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._shown = False
