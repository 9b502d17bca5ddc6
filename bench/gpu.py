"""What dragoman costs on a GPU: random weights in an engine, with HTTP before them and without.

The server has its engine in another process, as with `dragoman serve` on a GPU, and the client has one of
its own. The jobs that came by HTTP are then given to a second engine of the same kind, with nothing before
it. Only steps in which every stream gets a token count. `--engine transformers` has one engine, in the
server's process.
"""

import argparse
import asyncio
import gc
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import get_args

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from bench import machine, ratios
from bench.drive import KINDS, drive
from bench.errors import BenchError, told
from bench.figures import Load
from bench.gpu_watch import Pace, WatchedApart, WatchedEngine, open_apart, open_torch, open_transformers
from bench.ratios import Ratio
from bench.servers.llama import SHAPES, Shape, make
from bench.tables import Table, keep
from dragoman.engines.local import LocalEngine, LocalOptions
from dragoman.engines.local.options import WeightKind
from dragoman.http.server import background
from dragoman.settings import Settings
from dragoman.types import Job

HTTP, ALONE = "HTTP", "no server"
ENGINES = ("torch", "transformers")


class Options(Struct, frozen=True):
    streams: int = 256
    tokens: int = 640
    rounds: int = 3
    shape: str = "1b"
    engine: str = "torch"
    weights: WeightKind = "auto"
    guesses: int = LocalOptions().guesses
    deterministic: bool = False


class Round(Struct, frozen=True):
    kind: str
    way: str
    pace: Pace
    load: Load | None
    """As the client saw it."""


def body(tokens: int, kind: str) -> str:
    asked = {
        "messages": [{"role": "user", "content": "What is the answer?"}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(asked | KINDS[kind])


def over_http(engine: WatchedEngine | WatchedApart, port: int, options: Options, kind: str) -> Round:
    engine.watch.clear()
    command = [sys.executable, "-m", "bench.gpu_client", str(port), str(options.streams)]
    done = subprocess.run([*command, body(options.tokens, kind)], stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise BenchError("The client failed; see above.")
    load = msgspec.json.decode(done.stdout, type=Load)
    return Round(kind, HTTP, engine.watch.pace(options.streams), load)


def alone(engine: WatchedEngine, options: Options, kind: str, jobs: Sequence[Job]) -> Round:
    """What came by HTTP last, once more."""
    engine.watch.clear()
    asyncio.run(drive(engine, jobs))
    return Round(kind, ALONE, engine.watch.pace(options.streams), None)


def settings_of(options: Options, folder: Path) -> Settings:
    return Settings(
        model=str(folder),
        runner="torch",
        slots=options.streams,
        context=1024,
        weights=options.weights,
        guesses=options.guesses,
        deterministic=options.deterministic,
        isolate_engine=True,
    )


def run(options: Options, folder: Path, device: str) -> list[Round]:
    make(folder, SHAPES[options.shape], device)
    print("gpu: loading", flush=True)
    engine: WatchedEngine
    apart = None
    if options.engine == "torch":
        settings = settings_of(options, folder)
        engine, apart = open_torch(settings), open_apart(settings)
    else:
        engine = open_transformers(str(folder), options.streams, device)
    # As a server does: what is there now stays.
    gc.collect()
    gc.freeze()
    rounds = []
    with background(engine if apart is None else apart.engine, Settings(port=0)) as url:
        port = int(url.rpartition(":")[2])
        for kind in KINDS:
            for number in range(options.rounds + 1):
                heard = apart or engine
                pair = [over_http(heard, port, options, kind)]
                jobs = [replace(job, id=f"{job.id}-{kind}-{number}") for job in heard.watch.jobs]
                pair.append(alone(engine, options, kind, jobs))
                rates = ", ".join(f"{one.way} {one.pace.tokens_per_s:,.0f} tokens/s" for one in pair)
                print(f"gpu: {kind}, round {number} of {options.rounds}: {rates}", flush=True)
                # The first warms up.
                rounds += pair if number else []
    if isinstance(engine, LocalEngine):
        engine.close()
    return rounds


def table(rounds: Sequence[Round], shape: Shape, where: str, engine: str) -> Table:
    rows = [_row(rounds, kind, way) for kind in KINDS for way in (HTTP, ALONE)]
    head = ("sampling", "driven by", "tokens/s", "step ms", "event loop ms", "of a step", "server ms", "kept")
    streams, count = rounds[0].pace.streams, len(rounds) // len(rows)
    notes = [
        f"Random weights: {shape}. Median of {count} rounds. {where}.",
        "`event loop ms` is the processor time of the event loop beside the engine for one step, `server ms`"
        " that of the server's in its own process; `kept` is the rate over that without a server.",
    ]
    return Table(f"{streams} streams on a GPU, by {engine}", head, rows, notes)


def _row(rounds: Sequence[Round], kind: str, way: str) -> list[str]:
    def median(of: Callable[[Pace], float], way: str = way) -> float:
        return statistics.median(of(each.pace) for each in rounds if (each.kind, each.way) == (kind, way))

    def rate(way: str) -> float:
        return median(lambda pace: pace.tokens_per_s, way)

    return [
        kind,
        way,
        f"{rate(way):,.0f}",
        f"{median(lambda pace: pace.step_ms):.1f}",
        f"{median(lambda pace: pace.loop_ms):.2f}",
        f"{median(lambda pace: pace.loop_share):.1%}",
        f"{median(lambda pace: pace.server_ms):.2f}" if way == HTTP else "",
        f"{rate(way) / rate(ALONE):.1%}" if way == HTTP else "",
    ]


def compared(rounds: Sequence[Round]) -> Iterator[Ratio]:
    """What is left of the rate behind HTTP."""
    for kind in KINDS:
        ours, alone = (
            [each.pace.tokens_per_s for each in rounds if (each.kind, each.way) == (kind, way)]
            for way in (HTTP, ALONE)
        )
        yield Ratio(kind, "tokens/s", ours, alone)


def describe(device: str) -> str:
    import torch
    import transformers

    name = torch.cuda.get_device_name() if device == "cuda" else device
    return f"{name}, torch {torch.__version__}, transformers {transformers.__version__}, {machine.describe()}"


def main(options: Options) -> None:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    where = describe(device)
    with tempfile.TemporaryDirectory() as folder:
        rounds = run(options, Path(folder), device)
    engine = f"{options.engine}, weights {options.weights}, up to {options.guesses} guesses"
    engine += ", deterministic" if options.deterministic else ""
    keep("gpu", rounds, [table(rounds, SHAPES[options.shape], where, engine)])
    ratios.write("gpu", compared(rounds))


def cli() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--streams", type=int, default=256, help="streams at the same time [default: 256]")
    parser.add_argument("--tokens", type=int, default=640, help="tokens of an answer [default: 640]")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each way [default: 3]")
    parser.add_argument("--engine", choices=ENGINES, default="torch", help="what computes [default: torch]")
    parser.add_argument("--shape", choices=SHAPES, default="1b", help="shape of the model [default: 1b]")
    parser.add_argument("--weights", choices=get_args(WeightKind), default="auto", help="as `dragoman serve`")
    parser.add_argument("--guesses", type=int, default=Options().guesses, help="most guesses in a step")
    parser.add_argument("--deterministic", action="store_true", help="as `dragoman serve`")
    parser.add_argument("--check", action="store_true", help="compare what is computed, and measure nothing")
    args = parser.parse_args()
    if args.check:
        from bench.gpu_check import check

        check()
        return
    main(
        Options(
            args.streams,
            args.tokens,
            args.rounds,
            args.shape,
            args.engine,
            args.weights,
            args.guesses,
            args.deterministic,
        )
    )


if __name__ == "__main__":
    sys.exit(told(cli))
