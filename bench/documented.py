"""The ratios that documents state, as rows of docs/figures.toml.

`python -m bench.check` holds them against what is measured, and with `--write` writes them anew;
`python -m tools.docgen` makes the tables of docs/figures.md of them.
"""

import datetime
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

FILE = Path(__file__).parent.parent / "docs" / "figures.toml"
HEAD = """\
# The ratios that docs/figures.md and README.md state, each with the command that measures it.
#
# `make figures-check` (python -m bench.check) runs the quick form of each and says which is off by more than
# a factor of 1.5. `python -m bench.check --full --write` runs the full forms and writes what came out in here;
# then `python -m tools.docgen` writes the tables of docs/figures.md.
#
# name: the row of a table in docs/figures.md.
# bench, arguments, quick: `python -m bench.BENCH ARGUMENTS` is the full form, with QUICK instead the quick
#   one. A row without `quick` has no form that is over in a few minutes.
# needs: what must be there to run it: a path from the root, "module:NAME", or "gpu".
# key: which of the ratios that the command writes into bench/out/BENCH.ratios.json.
# ratio: the median over the rounds; above 1 dragoman is ahead. least, most: of the rounds.
"""


class Figure(Struct, kw_only=True, forbid_unknown_fields=True):
    name: str
    bench: str
    arguments: str = ""
    quick: str | None = None
    needs: list[str] = []
    key: str
    unit: str = ""
    ours: float | None = None
    theirs: float | None = None
    ratio: float
    least: float | None = None
    most: float | None = None
    rounds: int
    hardware: str
    commit: str
    date: datetime.date


class Figures(Struct, forbid_unknown_fields=True):
    figure: list[Figure]


def read(file: Path = FILE) -> list[Figure]:
    return msgspec.toml.decode(file.read_bytes(), type=Figures).figure


def write(figures: Sequence[Figure], file: Path = FILE) -> None:
    file.write_text("\n".join([HEAD, *map(_row, figures)]), encoding="utf-8")


def _row(figure: Figure) -> str:
    """A table of TOML with flat values: strings and lists of strings are written as in JSON."""
    plain = {name: getattr(figure, name) for name in figure.__struct_fields__}
    said = {name: value for name, value in plain.items() if value is not None and value != []}
    lines = [f"{name} = {_value(value)}" for name, value in said.items() if value != "" or name == "quick"]
    return "\n".join(["[[figure]]", *lines, ""])


def _value(value: object) -> str:
    return str(value) if isinstance(value, datetime.date) else msgspec.json.encode(value).decode()
