"""Tables for the terminal and for Markdown, and the files of a run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

OUT = Path(__file__).parent / "out"


class Table(msgspec.Struct, frozen=True):
    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def plain(self) -> str:
        widths = [max(map(len, column)) for column in zip(self.head, *self.rows, strict=True)]
        lines = [
            self._line(row, widths) for row in (self.head, ["-" * width for width in widths], *self.rows)
        ]
        return "\n".join(["", self.title, "", *lines, "", *self.notes])

    def markdown(self) -> str:
        marks = ["---", *("---:" for _ in self.head[1:])]
        lines = ["| " + " | ".join(row) + " |" for row in (self.head, marks, *self.rows)]
        return "\n".join([f"### {self.title}", "", *lines, "", *self.notes, ""])

    def _line(self, row: Sequence[str], widths: Sequence[int]) -> str:
        first, *others = zip(row, widths, strict=True)
        cells = [first[0].ljust(first[1]), *(text.rjust(width) for text, width in others)]
        return "  ".join(cells).rstrip()


def ratio(ours: float, theirs: float) -> str:
    """`ratio(30, 10)` is "3.00x"."""
    return f"{ours / theirs:.2f}x" if theirs else "-"


def keep(name: str, results: Any, tables: Sequence[Table]) -> None:
    """Prints the tables and writes `out/NAME.json` and `out/NAME.md`."""
    OUT.mkdir(exist_ok=True)
    (OUT / f"{name}.json").write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    (OUT / f"{name}.md").write_text("\n".join(table.markdown() for table in tables), encoding="utf-8")
    for table in tables:
        print(table.plain(), flush=True)
