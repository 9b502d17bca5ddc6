"""Whether documented ratios are true: `python -m bench.check`, or with names of modules: `... stream serve`.

Runs the quick form of each command of docs/figures.toml, one after the other, and compares. It exits with 1
if a ratio is off by more than a factor of 1.5, or if a command fails. What needs something that is not here
is named and left out. With `--full` the full forms are run, and with `--write` the rows get what came out:
that is for a machine on which nothing else runs.
"""

import argparse
import datetime
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from bench import documented, machine, ratios
from bench.documented import Command, Figure
from bench.errors import BenchError, told
from bench.process import LOGS, ROOT
from bench.ratios import Ratio
from bench.tables import Table

FACTOR = 1.5
"""So far a measured ratio may be from the documented one, in either direction."""
GPU = Path("/dev/nvidia0")


class Outcome(Struct, frozen=True):
    """What became of one documented ratio."""

    command: Command
    figure: Figure
    found: Ratio | None = None
    why: str = ""
    """Why nothing was measured."""
    failed: bool = False

    @property
    def is_off(self) -> bool:
        if self.found is None:
            return self.failed
        return not 1 / FACTOR <= self.found.median / self.figure.ratio <= FACTOR

    @property
    def row(self) -> tuple[str, ...]:
        figure, ratio = self.figure, self.found
        name = f"{self.command.bench}: {figure.key}", f"{figure.ratio:.2f}x"
        if ratio is None:
            return *name, "", "", f"FAILED: {self.why}" if self.failed else self.why
        spread = f"{min(ratio.rounds):.2f} to {max(ratio.rounds):.2f}" if len(ratio.rounds) > 1 else ""
        off = max(ratio.median / figure.ratio, figure.ratio / ratio.median)
        return *name, f"{ratio.median:.2f}x", spread, f"OFF by {off:.2f}" if self.is_off else "true"


def check(command: Command, *, full: bool) -> list[Outcome]:
    """Its ratios, after it was run. A quick form need not have all of them."""
    arguments = command.arguments if full else command.quick
    lacking = [need for need in command.needs if not is_here(need)]
    why, failed = "", False
    fields: Mapping[str, Ratio] = {}
    if lacking:
        why = f"needs {', '.join(lacking)}"
    elif arguments is None:
        why = "has no quick form"
    else:
        try:
            fields = run(command.bench, arguments)
            why, failed = "is not in the quick form", full
        except BenchError as error:
            why, failed = str(error), True
    return [
        Outcome(command, figure, fields[figure.key])
        if figure.key in fields
        else Outcome(command, figure, why=why, failed=failed)
        for figure in command.figures
    ]


def is_here(need: str) -> bool:
    kind, _, name = need.rpartition(":")
    if kind == "module":
        return find_spec(name) is not None
    return GPU.exists() if need == "gpu" else (ROOT / need).exists()


def run(name: str, arguments: str) -> Mapping[str, Ratio]:
    """The ratios that a command writes."""
    command, log = ["-m", f"bench.{name}", *shlex.split(arguments)], LOGS / f"check-{name}.log"
    print(f"check: python {shlex.join(command)}", end="", flush=True)
    LOGS.mkdir(parents=True, exist_ok=True)
    ratios.file_of(name).unlink(missing_ok=True)
    began = time.monotonic()
    with log.open("wb") as output:
        done = subprocess.run(
            [sys.executable, *command], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, check=False
        )
    print(f" ({time.monotonic() - began:.0f} s)", flush=True)
    if done.returncode or not ratios.file_of(name).exists():
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "it said nothing")
        raise BenchError(f"{last} (all of it is in {log.relative_to(ROOT)})")
    return ratios.read(name)


def update(command: Command, outcomes: Sequence[Outcome], commit: str) -> Command:
    """The command with what was measured; as it was, if not all of its ratios were."""
    result = [outcome.found for outcome in outcomes if outcome.found is not None]
    if len(result) < len(command.figures):
        return command
    return replace(
        command,
        rounds=max(len(one.rounds) for one in result),
        hardware=machine.hardware(),
        commit=commit,
        date=datetime.date.today(),
        figures=[_measured(figure, one) for figure, one in zip(command.figures, result, strict=True)],
    )


def _measured(figure: Figure, ratio: Ratio) -> Figure:
    several = len(ratio.rounds) > 1
    return replace(
        figure,
        ratio=_short(ratio.median),
        least=_short(min(ratio.rounds)) if several else None,
        most=_short(max(ratio.rounds)) if several else None,
        ours=_short(statistics.median(ratio.ours)),
        theirs=_short(statistics.median(ratio.theirs)),
        unit=ratio.unit,
    )


def _short(value: float) -> float:
    """Three digits, and all of those before the point: 1234.5 is 1234, 0.12345 is 0.123."""
    return float(round(value)) if abs(value) >= 1000 else float(f"{value:.3g}")


def _commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    if git("status", "--porcelain", "--untracked-files=no"):
        raise BenchError("--write notes the commit that was measured: commit what has changed first.")
    return git("rev-parse", "--short=8", "HEAD").strip()


def table(outcomes: Sequence[Outcome]) -> Table:
    off = sum(outcome.is_off for outcome in outcomes)
    measured = sum(outcome.found is not None for outcome in outcomes)
    notes = [f"{measured} of {len(outcomes)} were measured; {off} are off or failed. {machine.describe()}."]
    head = ("ratio", "documented", "measured", "rounds", "")
    return Table("Documented ratios", head, [outcome.row for outcome in outcomes], notes)


def cli() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("only", nargs="*", metavar="BENCH", help="the modules to run [default: all]")
    parser.add_argument("--full", action="store_true", help="run the full forms")
    parser.add_argument("--write", action="store_true", help="write what came out into docs/figures.toml")
    args = parser.parse_args()
    commands = documented.read()
    if strange := set(args.only) - {command.bench for command in commands}:
        raise BenchError(f"docs/figures.toml has no command of bench.{min(strange)}.")
    commit = _commit() if args.write else ""
    outcomes: list[Outcome] = []
    for number, command in enumerate(commands):
        if not args.only or command.bench in args.only:
            outcomes += (result := check(command, full=args.full))
            if args.write:
                commands[number] = update(command, result, commit)
                documented.write(commands)
    print(table(outcomes).plain(), flush=True)
    if (busy := os.getloadavg()[0] - len(machine.cores())) > 0:
        print(f"More was to do than the cores can, by {busy:.1f}: ratios say little beside other work.")
    if any(outcome.failed for outcome in outcomes):
        raise BenchError("A command failed, or lacks a ratio.")
    if not args.write and (off := sum(outcome.is_off for outcome in outcomes)):
        raise BenchError(f"{off} documented ratios are not true here.")


if __name__ == "__main__":
    sys.exit(told(cli))
