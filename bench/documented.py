"""The ratios that documents state, and the commands that measure them: docs/figures.toml.

`python -m bench.check` holds them against what is measured, and with `--write` writes them anew;
`python -m tools.docgen` makes the tables of docs/figures.md of them.
"""

import datetime
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

FILE = Path(__file__).parent.parent / "docs" / "figures.toml"
HEAD = """\
# The ratios that docs/figures.md and README.md state, each with the command that measures it.
#
# `make figures-check` (python -m bench.check) runs the quick form of each command and says which ratio is off
# by more than a factor of 1.5. `python -m bench.check --full --write` runs the full forms and writes what
# came out into this file; then `python -m tools.docgen` writes the tables of docs/figures.md.
#
# A command:
# - bench, arguments, quick: `python -m bench.BENCH ARGUMENTS` is its full form, with QUICK instead its quick
#   one. One without `quick` has no form that is over in a few minutes.
# - needs: what must be there to run it: paths from the root, "module:NAME" or "gpu".
# - table: the table `figures-TABLE` of docs/figures.md has its ratios; "" for those that are told in words.
# - rounds, hardware, commit, date: how it was measured last.
# A ratio:
# - name: its row in the table. key: how the command calls it in bench/out/BENCH.ratios.json.
# - ratio: the median over the rounds, above 1 where dragoman is ahead; least, most: of the rounds.
# - ours, theirs: the medians of each, in `unit`.
"""


class Figure(Struct, kw_only=True, forbid_unknown_fields=True):
    name: str
    key: str
    ratio: float
    least: float | None = None
    most: float | None = None
    ours: float | None = None
    theirs: float | None = None
    unit: str = ""


class Command(Struct, kw_only=True, forbid_unknown_fields=True):
    table: str
    bench: str
    arguments: str = ""
    quick: str | None = None
    needs: list[str] = []
    rounds: int
    hardware: str
    commit: str
    date: datetime.date
    figures: list[Figure]


class Documented(Struct, forbid_unknown_fields=True):
    command: list[Command]


def read(file: Path = FILE) -> list[Command]:
    return msgspec.toml.decode(file.read_bytes(), type=Documented).command


def write(commands: Sequence[Command], file: Path = FILE) -> None:
    file.write_text("\n".join([HEAD, *map(_table, commands)]), encoding="utf-8")


def _table(command: Command) -> str:
    rows = [f"  {{ {', '.join(_fields(figure))} }}," for figure in command.figures]
    return "\n".join(["[[command]]", *_fields(command), "figures = [", *rows, "]", ""])


def _fields(struct: Command | Figure) -> Iterator[str]:
    """What a struct has, but for its rows, as TOML: strings and lists of strings are written as in JSON."""
    for name in struct.__struct_fields__:
        value = getattr(struct, name)
        if isinstance(value, datetime.date):
            yield f"{name} = {value.isoformat()}"
        elif name != "figures" and value not in (None, []):
            whole = isinstance(value, float) and value.is_integer()
            yield f"{name} = {int(value) if whole else msgspec.json.encode(value).decode()}"
