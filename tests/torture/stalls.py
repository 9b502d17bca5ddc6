"""No request holds up the others: every route, with the largest bodies that it takes in each dimension.

A server in a process of its own asks its loop every 5 ms whether it is late. The greatest lag of each request
counts, of several tries the least, because a real stall repeats itself. On a machine that others use it is
what the server computed of that lag: the rest it waited for them.
"""

import os
from collections.abc import Iterator
from itertools import groupby
from random import Random

from bench.tables import Table, keep

from tests.attacks.frame import AttackedServer, attacked
from tests.torture.battery.case import Case
from tests.torture.battery.measured import Measurement, measured
from tests.torture.battery.table import cases, group
from tests.torture.battery.walked import Ladder, ladders
from tests.torture.page import Row, progress, scaled

MOST_MS = 50.0
MOST_MB = 256
"""Sixteen times the largest body."""
CONTEXT = 2**20
"""As much as models take: with less, large prompts would be refused before they cost anything."""
LISTED = 30
IDLE_LOAD = 1.0


def run(scale: float = 1.0, seed: int = 1) -> list[Row]:
    known = [Ladder(case.route, case.name, (case,)) for case in cases()]
    every = [*known, *ladders()]
    chosen = sorted(Random(seed).sample(range(len(every)), min(scaled(len(every), scale), len(every))))
    crowded = os.getloadavg()[0] > IDLE_LOAD
    with attacked(watched=True, context=CONTEXT) as server:
        seen = list(_seen(server, [every[at] for at in chosen], crowded))
    seen.sort(key=lambda one: -one.stall_ms(crowded=crowded))
    keep("stalls", seen, [_worst(seen)])
    return [*_groups(seen, crowded), _memory(seen), _answered(seen)]


def _seen(server: AttackedServer, chosen: list[Ladder], crowded: bool) -> Iterator[Measurement]:
    for number, ladder in enumerate(chosen):
        for case in ladder.rungs:
            measurement = _tried(server, case, crowded)
            yield measurement
            if measurement.status < 400:
                break
        progress(number + 1, len(chosen), "dimensions of requests")


def _tried(server: AttackedServer, case: Case, crowded: bool) -> Measurement:
    try:
        return measured(server, case, crowded=crowded)
    except AssertionError as error:
        return Measurement(case.route, case.name, 500, 0.0, 0.0, 0.0, 0.0, str(error)[:300])


def _groups(seen: list[Measurement], crowded: bool) -> Iterator[Row]:
    way = "computed" if crowded else "late"
    by_group = sorted(seen, key=lambda one: group(one.route))
    for name, members in groupby(by_group, key=lambda one: group(one.route)):
        measurements = list(members)
        worst = max(measurements, key=lambda one: one.stall_ms(crowded=crowded))
        most = worst.stall_ms(crowded=crowded)
        figure = f"{most:.0f} ms {way}: {worst.route}, {worst.name}"
        yield Row(
            f"no request stalls the loop: {name} ({len(measurements)} bodies)",
            figure,
            f"{MOST_MS:.0f} ms",
            most <= MOST_MS,
        )


def _memory(seen: list[Measurement]) -> Row:
    worst = max(seen, key=lambda one: one.memory_mb)
    figure = f"{worst.memory_mb:.0f} MiB: {worst.route}, {worst.name}"
    return Row("the most memory that one request takes", figure, f"{MOST_MB} MiB", worst.memory_mb <= MOST_MB)


def _answered(seen: list[Measurement]) -> Row:
    failed = [one for one in seen if not 100 <= one.status < 500]
    figure = f"{len(failed)} failed" + "".join(f": {one.route}, {one.name}" for one in failed[:1])
    return Row(f"all {len(seen)} bodies are answered or refused", figure, "0 failed", not failed)


def _worst(seen: list[Measurement]) -> Table:
    return Table(
        "the requests that held up the loop longest",
        ("lag ms", "computing ms", "status", "seconds", "MiB", "request", "where"),
        [
            [
                f"{one.lag_ms:.0f}",
                f"{one.busy_ms:.0f}",
                str(one.status),
                f"{one.seconds:.2f}",
                f"{one.memory_mb:.0f}",
                f"{one.route}: {one.name}",
                one.where.replace("|", "/")[:400],
            ]
            for one in seen[:LISTED]
        ],
        [f"probe every 5 ms; context of {CONTEXT:,} tokens"],
    )
