"""What Ray Serve costs, and what a second replica brings: the same streams directly, and through a cluster.

Servers without a model. For what a token costs, one comes for every stream each 20 ms: directly from a
server, and from a replica behind Serve's HAProxy and the door. Told is the processor time of each of these
processes for one token, while tokens flow.

For what two replicas answer against one, requests are sent as soon as others are answered. The client, the
proxy and the door need the same two cores, so it matters what the engine costs. It is measured in three ways:

- An engine that is elsewhere, as on a GPU: 8 answers at a time, a step of 10 ms, and no processor time.
- An engine that computes here: 4 ms of processor time for each token, in a thread beside the event loop. So
  much the default model takes on such cores with 8 streams (docs/figures.md: about 500 tokens/s on two).
- None at all: what is answered is what the servers themselves can do, which is no use to anybody without a
  model. One replica leaves the second core to the client, the proxy and the door, so two cannot double it.

It needs `dragoman[ray]`, which `make ray` fetches: `build/ray/bin/python -m bench.ray`.
"""

import argparse
import json
import os
import statistics
import sys
import time
from contextlib import ExitStack

from msgspec import Struct

from bench import machine, stream
from bench.answers import read
from bench.client import Flight
from bench.errors import told
from bench.process import ROOT, Server, cpu_s
from bench.tables import Table, keep, ratio

MODULE = "bench.servers.upstreams"
ENVIRON = {
    "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
}
HOPS = {"proxy": b"bin/haproxy", "door": b"ray::ServeReplica:dragoman:Door", "replica": b"ray::ServeReplica"}
"""What a token passes, and how the processes are called; the first that fits."""
PACED = {"tokens": 16, "interval": 0.01, "slots": 8}
"""50 requests a second, and no more."""
COMPUTED = {"tokens": 16, "compute": 0.004, "slots": 8}
"""15 requests a second for one core that does nothing else."""
FREE = {"tokens": 64, "interval": 0.0, "slots": 64}
BOUNDS = {"an engine elsewhere": PACED, "an engine that computes here": COMPUTED, "no engine": FREE}
AT_ONCE = 32


class Options(Struct, frozen=True):
    levels: tuple[int, ...] = (8, 32)
    tokens: int = 128
    rounds: int = 5
    rated: int = 3
    """Rounds of what replicas answer."""
    seconds: float = 10.0
    """That such a round takes, about."""


QUICK = Options(tokens=64, rounds=2, rated=2, seconds=2.0)


class Round(Struct, frozen=True):
    first_ms: float
    """The median of all streams."""
    cpu_us: dict[str, float]
    """For one token, by hop."""


class Result(Struct, frozen=True):
    way: str
    streams: int
    rounds: list[Round]

    def first_ms(self) -> float:
        return statistics.median(each.first_ms for each in self.rounds)

    def cpu_us(self, *hops: str) -> float:
        return statistics.median(sum(each.cpu_us.get(hop, 0.0) for hop in hops) for each in self.rounds)


class Rate(Struct, frozen=True):
    """Requests a second, and the processor time of all hops for one of them."""

    bound: str
    replicas: int
    per_s: list[float]
    cpu_ms: list[dict[str, float]]

    def median(self) -> float:
        return statistics.median(self.per_s)

    def hop_ms(self, hop: str) -> float:
        return statistics.median(each.get(hop, 0.0) for each in self.cpu_ms)


def on_ray(name: str, replicas: int, options: dict[str, float]) -> Server:
    asked = ["dragoman", "serve", "--ray", "local", "--replicas", str(replicas), "--shutdown-grace", "1"]
    engine = ["--engine", f"{MODULE}:make", "--engine-args", json.dumps(options), "--store", "none"]
    return Server(name, [*asked, *engine], environ=ENVIRON)


def hop_cpu_s(server: Server) -> dict[str, float]:
    spent = dict.fromkeys(HOPS, 0.0)
    for pid, line in server.family():
        hop = next((hop for hop, called in HOPS.items() if called in line), None)
        if hop is not None:
            spent[hop] += cpu_s(pid)
    return spent


def own_cpu_s(server: Server) -> dict[str, float]:
    return {"replica": server.cpu_s()}


def measure(server: Server, streams: int, tokens: int) -> Round:
    spent = hop_cpu_s if server.name == "ray" else own_cpu_s
    flight = Flight(server.port, [stream.body(tokens)] * streams)
    flight.open()
    before = spent(server)
    answers = [stream.check(read(trace), tokens) for trace in flight.finish()]
    after, each = spent(server), streams * tokens / 1e6
    first = statistics.median(answer.ttft_s for answer in answers)
    return Round(first * 1e3, {hop: (after[hop] - cpu) / each for hop, cpu in before.items()})


def run_costs(options: Options) -> list[Result]:
    with ExitStack() as stack:
        direct = stack.enter_context(
            Server("direct", [MODULE, "--tokens", str(options.tokens)], environ=ENVIRON)
        )
        cluster = stack.enter_context(on_ray("ray", 1, {"tokens": options.tokens, "interval": 0.02}))
        servers = {"direct": direct, "through the proxy and the door": cluster}
        results = [Result(way, level, []) for level in options.levels for way in servers]
        for result in results:
            measure(servers[result.way], result.streams, options.tokens)  # warms up
        for number in range(options.rounds):
            print(f"ray: round {number + 1} of {options.rounds}", flush=True)
            for result in results:
                result.rounds.append(measure(servers[result.way], result.streams, options.tokens))
    return results


def run_rates(options: Options) -> list[Rate]:
    """One cluster after the other: two at a time would share what there is."""
    rates = []
    for bound, engine in BOUNDS.items():
        for replicas in (1, 2):
            rate, warm = Rate(bound, replicas, [], []), Rate("", 0, [], [])
            with on_ray(f"ray-{replicas}", replicas, engine) as server:
                _ask(server, 2 * AT_ONCE, int(engine["tokens"]), warm)
                requests = max(2 * AT_ONCE, int(options.seconds * warm.per_s[0]))
                for number in range(options.rated):
                    print(f"ray: {bound}, {replicas} replicas, round {number + 1}", flush=True)
                    _ask(server, requests, int(engine["tokens"]), rate)
            rates.append(rate)
    return rates


def _ask(server: Server, requests: int, tokens: int, rate: Rate) -> None:
    before, own, began = hop_cpu_s(server), time.process_time(), time.perf_counter()
    traces = Flight(server.port, [stream.body(tokens)] * requests, at_once=AT_ONCE).finish()
    seconds, own = time.perf_counter() - began, time.process_time() - own
    after = hop_cpu_s(server)
    for trace in traces:
        stream.check(read(trace), tokens)
    rate.per_s.append(requests / seconds)
    spent = {hop: (after[hop] - cpu) / requests * 1e3 for hop, cpu in before.items()}
    rate.cpu_ms.append({**spent, "client": own / requests * 1e3})


def costs(results: list[Result]) -> Table:
    rows = [
        (
            result.way,
            str(result.streams),
            *(f"{result.cpu_us(hop):.1f}" for hop in HOPS),
            f"{result.cpu_us('proxy', 'door'):.1f}",
            f"{result.first_ms():.0f}",
        )
        for result in results
    ]
    return Table(
        "A token through Ray Serve, scripted engine, 20 ms a step: CPU µs of each hop",
        ("way", "streams", *HOPS, "added before it", "first token p50, ms"),
        rows,
        [f"Medians of {len(results[0].rounds)} rounds. {machine.describe()}."],
    )


def rates_table(rates: list[Rate]) -> Table:
    one = {rate.bound: rate.median() for rate in rates if rate.replicas == 1}
    hops = (*HOPS, "client")
    rows = [
        (
            rate.bound,
            str(rate.replicas),
            f"{rate.median():.0f}",
            ratio(rate.median(), one[rate.bound]),
            *(f"{rate.hop_ms(hop):.1f}" for hop in hops),
        )
        for rate in rates
    ]
    return Table(
        f"Two replicas against one, {AT_ONCE} requests at once, and CPU ms of a request",
        ("with", "replicas", "requests/s", "of one", *hops),
        rows,
        [
            f"Medians of {len(rates[0].per_s)} rounds. {machine.describe()}.",
            "All of it runs on the same cores, the client too: where nothing else takes time, replicas get "
            "what the others leave.",
        ],
    )


def cli() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.ray", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a short run, for a first look")
    parser.add_argument("part", nargs="?", default="both", choices=["costs", "rates", "both"])
    asked = parser.parse_args()
    options = QUICK if asked.quick else Options()
    if asked.part != "rates":
        results = run_costs(options)
        keep("ray_costs", results, [costs(results)])
    if asked.part != "costs":
        rates = run_rates(options)
        keep("ray_rates", rates, [rates_table(rates)])


if __name__ == "__main__":
    sys.exit(told(cli))
