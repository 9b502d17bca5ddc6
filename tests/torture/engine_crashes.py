"""`python -m tests.torture.engine_crashes`: an engine that is killed, crashes and hangs, a hundred times."""

import argparse
import asyncio
import statistics
import sys
import time

from dragoman.cli.own_engines import model_file
from dragoman.cli.served_engine import isolated
from dragoman.engines.isolated import IsolatedEngine
from dragoman.settings import Settings
from dragoman.types import Job, Sampling
from tests.support.crashes import KILLS, Crash, crash, isolated_server
from tests.torture.page import Row, page

STREAMS = 20
FREE = 5
"""Crashes in a minute that are healed at once. So each server has as many, and then comes another."""


def run(cycles: int = 100) -> list[Row]:
    loading = load_time()
    seen: list[Crash] = []
    while len(seen) < cycles:
        with isolated_server("--slots", "8", "--store", "none") as server:
            for _ in range(min(FREE, cycles - len(seen))):
                seen.append(crash(server, KILLS[len(seen) % len(KILLS)], STREAMS))
                print(f"\r{len(seen)} of {cycles} crashes", end="", file=sys.stderr, flush=True)
    told = [end for each in seen for end in each.ends]
    untold = sum(each.untold for each in seen)
    refused = sum(each.refused > 0 for each in seen)
    back = [each.back for each in seen]
    what = f"{cycles} crashes (kill, segfault, stop) with {STREAMS} streams"
    return [
        Row(f"{what}: each is told", f"{untold} untold", "0", untold == 0),
        _within("its streams are told", told, 1.0),
        _within("/ready is 503", [each.unready for each in seen], 1.0),
        Row("a new request gets a 503 meanwhile", f"{refused} of {cycles}", "all", refused == cycles),
        _within(f"it serves again (loading takes {loading:.2f} s)", back, loading + 1.0),
    ]


def load_time() -> float:
    """Seconds until a process that is begun has answered, with nobody else at work."""
    settings = Settings(model=str(model_file(Settings())), threads=1, context=1024, slots=8)
    times = []
    for _ in range(3):
        began = time.monotonic()
        asyncio.run(_answer_of(isolated(settings)))
        times.append(time.monotonic() - began)
    return statistics.median(times)


async def _answer_of(engine: IsolatedEngine) -> None:
    await engine.start()
    async for _ in engine.generate(Job(id="", prompt=(1,) * 36, sampling=Sampling(max_tokens=1))):
        pass
    engine.abandon()


def _within(what: str, times: list[float], most: float) -> Row:
    worst, usual = max(times), statistics.median(times)
    return Row(what, f"{usual:.2f} s, at most {worst:.2f} s", f"<= {most:.2f} s", worst <= most)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torture.engine_crashes", description=__doc__)
    parser.add_argument("--cycles", type=int, default=100, help="crashes in all [default: 100]")
    rows = run(parser.parse_args().cycles)
    print(page(rows, "the default model, one thread").plain())
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
