"""A download beside curl's: `python -m bench.download`, or `--quick` for a first look.

A small hub on this machine, in a process of its own, gives one file of random bytes. curl fetches it into a
file; dragoman fetches it into a cache and sums it up beside that. Both take turns, and what counts is the
middle of the rounds. The command's own start is shown apart: it is the same for small models and large ones.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct
from tests.support.hub import COMMIT, SmallHub, running

from bench import machine
from bench.errors import BenchError, told
from bench.tables import Table, keep, ratio
from dragoman.hub import parse_name, pull

FILE, NAME = "big-Q8_0.gguf", "hf:org/repo:Q8_0"


class Options(Struct, frozen=True):
    size: int = 1_000_000_000
    rounds: int = 5


QUICK = Options(size=200_000_000, rounds=3)


class Times(Struct, frozen=True):
    """Seconds of each round."""

    size: int
    curl: list[float]
    pull: list[float]
    command: list[float]


def give(size: int) -> None:
    """Be the hub until the parent is gone."""
    with running(SmallHub({FILE: os.urandom(size)})) as hub:
        # A hub knows its sums.
        hub.describe()
        print(hub.url, flush=True)
        sys.stdin.read()


@contextmanager
def hub_of(size: int) -> Iterator[str]:
    command = [sys.executable, "-m", "bench.download", "--hub", str(size)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.stdin.close()
            process.wait(10)


def measure(options: Options) -> Times:
    if shutil.which("curl") is None:
        raise BenchError("curl is not there.")
    times = Times(options.size, [], [], [])
    with hub_of(options.size) as url, tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "hf"
        os.environ |= {"HF_ENDPOINT": url, "HF_HOME": str(home)}
        os.environ.pop("HF_HUB_CACHE", None)
        address, file = f"{url}/org/repo/resolve/{COMMIT}/{FILE}", Path(folder) / "file"
        ways: list[tuple[list[float], Callable[[], object]]] = [
            (times.curl, lambda: subprocess.run(["curl", "-sSf", "-o", file, address], check=True)),
            (times.pull, fetch),
            (
                times.command,
                lambda: subprocess.run([*COMMAND, "pull", NAME], check=True, capture_output=True),
            ),
        ]
        for _ in range(options.rounds):
            for seconds, way in ways:
                began = time.perf_counter()
                way()
                seconds.append(time.perf_counter() - began)
                file.unlink(missing_ok=True)
                shutil.rmtree(home, ignore_errors=True)
    return times


COMMAND = (sys.executable, "-m", "dragoman")


def fetch() -> None:
    name = parse_name(NAME)
    assert name is not None
    pull(name)


def main(options: Options) -> None:
    times = measure(options)
    theirs = times.size / statistics.median(times.curl)
    ways = {
        "curl": times.curl,
        "dragoman, checked against the sum": times.pull,
        "all of `dragoman pull`": times.command,
    }
    rows = []
    for what, seconds in ways.items():
        rate = times.size / statistics.median(seconds)
        spread = f"{min(seconds):.2f} to {max(seconds):.2f} s"
        rows.append((what, f"{rate / 1e6:,.0f} MB/s", ratio(rate, theirs), spread))
    head = ("", "rate", "of curl's", "rounds")
    title = f"A download of {times.size / 1e6:,.0f} MB from a hub on this machine"
    keep("download", times, [Table(title, head, rows)])


def cli() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.download",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="200 MB")
    parser.add_argument("--hub", type=int, metavar="BYTES", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.hub:
        give(args.hub)
        return
    print(machine.describe(), flush=True)
    main(QUICK if args.quick else Options())


if __name__ == "__main__":
    sys.exit(told(cli))
