"""The tables and bars of `bench.serve`: medians over the rounds, and dragoman beside each peer."""

import statistics
from collections.abc import Callable, Iterator, Sequence

from bench.figures import First, Load, Visit
from bench.peers import OURS
from bench.ratios import Ratio
from bench.tables import Table, ratio


def _servers(visits: Sequence[Visit]) -> list[str]:
    return list(dict.fromkeys(visit.server for visit in visits))


def _median(visits: Sequence[Visit], server: str, of: Callable[[Visit], float]) -> float:
    return statistics.median(of(visit) for visit in visits if visit.server == server)


def _load(number: int, of: Callable[[Load], float]) -> Callable[[Visit], float]:
    return lambda visit: of(visit.loads[number])


def _first(number: int, of: Callable[[First], float]) -> Callable[[Visit], float]:
    return lambda visit: of(visit.firsts[number])


def tables(visits: Sequence[Visit], note: str) -> list[Table]:
    return [
        _load_table(visits, f"{note} `our tokens/s` is dragoman's rate over the peer's."),
        _first_table(visits, f"{note} `our wait` is dragoman's p50 over the peer's."),
        _process_table(visits, note),
    ]


def _ratio(visits: Sequence[Visit], server: str, of: Callable[[Visit], float]) -> str:
    if server == OURS or OURS not in _servers(visits):
        return ""
    return ratio(_median(visits, OURS, of), _median(visits, server, of))


def _load_table(visits: Sequence[Visit], note: str) -> Table:
    rows = []
    for number, load in enumerate(visits[0].loads):
        rate = _load(number, lambda load: load.tokens_per_s)
        steady = _load(number, lambda load: load.steady_per_s)
        p50 = _load(number, lambda load: load.first_p50_ms)
        p99 = _load(number, lambda load: load.first_p99_ms)
        for server in _servers(visits):
            figures = [f"{_median(visits, server, of):,.0f}" for of in (rate, steady, p50, p99)]
            rows.append([server, str(load.streams), *figures, _ratio(visits, server, rate)])
    head = (
        "server",
        "streams",
        "tokens/s",
        "steady",
        "first p50 ms",
        "first p99 ms",
        "our tokens/s",
    )
    return Table("A real model under load", head, rows, [note])


def _first_table(visits: Sequence[Visit], note: str) -> Table:
    rows = []
    for number, first in enumerate(visits[0].firsts):
        p50 = _first(number, lambda first: first.p50_ms)
        p99 = _first(number, lambda first: first.p99_ms)
        cached = _first(number, lambda first: first.cached_tokens / max(first.prompt_tokens, 1))
        for server in _servers(visits):
            figures = [f"{_median(visits, server, of):,.0f}" for of in (p50, p99)]
            share = f"{_median(visits, server, cached):.0%}"
            rows.append([server, first.case, *figures, share, _ratio(visits, server, p50)])
    head = ("server", "case", "p50 ms", "p99 ms", "cached", "our wait")
    return Table("Time to the first token after a long prefix", head, rows, [note])


def _process_table(visits: Sequence[Visit], note: str) -> Table:
    rows = []
    for server in _servers(visits):
        peak = _median(visits, server, lambda visit: visit.peak_mib)
        start = _median(visits, server, lambda visit: visit.start_s)
        rows.append([server, f"{peak:,.0f}", f"{start:.1f}"])
    return Table("The process", ("server", "peak memory, MiB", "start, s"), rows, [note])


def compared(visits: Sequence[Visit]) -> Iterator[Ratio]:
    """dragoman and each peer, visit by visit."""
    first = visits[0]
    kinds = [
        (f"{each.streams} streams", "tokens/s", _load(number, lambda load: load.tokens_per_s))
        for number, each in enumerate(first.loads)
    ]
    kinds += [
        (f"first token, {each.case}", "ms", _first(number, lambda first: first.p50_ms))
        for number, each in enumerate(first.firsts)
    ]
    kinds.append(("peak memory", "MiB", lambda visit: visit.peak_mib))
    servers = _servers(visits)
    for server in servers if OURS in servers else ():
        for key, unit, of in kinds if server != OURS else ():
            ours, theirs = _each(visits, OURS, of), _each(visits, server, of)
            yield Ratio(f"{key}, {server}", unit, ours, theirs, less_is_better=unit != "tokens/s")


def _each(visits: Sequence[Visit], server: str, of: Callable[[Visit], float]) -> list[float]:
    return [of(visit) for visit in visits if visit.server == server]


def load_bars(visits: Sequence[Visit]) -> list[tuple[str, int, float]]:
    return [
        (server, load.streams, _median(visits, server, _load(number, lambda load: load.tokens_per_s)))
        for number, load in enumerate(visits[0].loads)
        for server in _servers(visits)
    ]


def first_bars(visits: Sequence[Visit]) -> list[tuple[str, str, float]]:
    return [
        (server, first.case, _median(visits, server, _first(number, lambda first: first.p50_ms)))
        for number, first in enumerate(visits[0].firsts)
        for server in _servers(visits)
    ]
