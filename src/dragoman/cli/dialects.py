"""List the dialects: how model families write reasoning and tool calls, with examples."""

import argparse
import shutil
import sys
from typing import TYPE_CHECKING

import msgspec

from dragoman.cli.terminal import table, visible
from dragoman.logs import Colorizer

if TYPE_CHECKING:
    from dragoman.dialects.declarations import Dialect

SUMMARY = "list how model families write reasoning and tool calls"
EXAMPLE = """\
examples:
  dragoman dialects                 all of them
  dragoman dialects hermes          one, with an example
  dragoman dialects --examples      all of them, with examples
  dragoman dialects --json          for machines

The example is an answer with reasoning, text, and a call get_weather(city="Paris"), as models write it.
"""
NARROWEST = 12
"""Columns narrower than this are left out."""


def add(parser: argparse.ArgumentParser) -> None:
    parser.usage = "dragoman dialects [NAME] [flags]"
    parser.add_argument("name", metavar="NAME", nargs="?", help="dialect, or another server's name for it")
    parser.add_argument("--examples", action="store_true", help="show an example answer in each dialect")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    from dragoman.cli.parse import dialect_of
    from dragoman.dialects.describe import describe_dialect
    from dragoman.dialects.registry import list_dialects

    chosen = [dialect_of(args.name)] if args.name else list(list_dialects().values())
    examples = args.examples or args.name is not None
    if args.json:
        rows = [describe_dialect(dialect, examples=examples) for dialect in chosen]
        shown = rows[0] if args.name else rows
        print(msgspec.json.format(msgspec.json.encode(shown), indent=2).decode())
    elif examples:
        print("\n\n".join(page(dialect) for dialect in chosen))
    else:
        print(listing(chosen, Colorizer(sys.stdout)))
    return 0


def page(dialect: "Dialect") -> str:
    """Format one dialect with its example."""
    from dragoman.dialects.describe import parts_of, write_example

    paint = Colorizer(sys.stdout)
    items = [("models", dialect.models), ("has", ", ".join(["text", *parts_of(dialect)]))]
    items += [("aliases", " ".join(dialect.aliases))] if dialect.aliases else []
    lines = [f"  {paint('dim', name.ljust(8))} {text}" for name, text in items]
    spoken = ["    " + line for line in visible(write_example(dialect)).split("\n")]
    return "\n".join([paint("bold", dialect.name), *lines, "", *spoken])


def listing(chosen: "list[Dialect]", paint: Colorizer) -> str:
    """Format the table; on a terminal its last columns are cut to fit."""
    from dragoman.dialects.describe import parts_of

    head = ["name", "has", "models", "aliases"]
    rows = [[one.name, ", ".join(parts_of(one)), one.models, " ".join(one.aliases)] for one in chosen]
    if sys.stdout.isatty():
        head, rows = fit_width(head, rows, shutil.get_terminal_size().columns)
    return table(head, rows, paint)


def fit_width(head: list[str], rows: list[list[str]], width: int) -> tuple[list[str], list[list[str]]]:
    """Fit columns to a width; the last two share the characters that the first two leave."""
    fixed = sum(max(len(row[position]) for row in [head, *rows]) + 2 for position in (0, 1))
    each = (width - fixed - 2) // 2
    if each >= NARROWEST:
        return head, [[*row[:2], _cut(row[2], each), _cut(row[3], each)] for row in rows]
    left = width - fixed
    if left >= NARROWEST:
        return head[:3], [[*row[:2], _cut(row[2], left)] for row in rows]
    return head[:2], [row[:2] for row in rows]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
