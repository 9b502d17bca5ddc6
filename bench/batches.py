"""A batch beside the engine that answers it: `python -m bench.batches`, or `--quick` for a first look.

The engine has no model: it says so many tokens at a fixed pace, to so many at a time. First it is given the
jobs of all lines by itself, as fast as it takes them; then a server answers the same lines as a batch, from
the file that was uploaded to the file that can be fetched. What a batch costs shows as the part of the
engine's own rate that is missing, and as memory, which must not grow with the lines.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from bench import machine
from bench.errors import told
from bench.tables import Table, keep
from dragoman.engines.protocol import JobHandle, ModelCard
from dragoman.engines.scripted import CHATML, ScriptedEngine, say
from dragoman.http.app import App
from dragoman.http.upkeep import resident
from dragoman.settings import Settings
from dragoman.types import Job, Sampling, Sink, Step

NAME, PATH = "paced", "/v1/chat/completions"
LOOK_S = 0.05


class Options(Struct, frozen=True):
    lines: int = 10_000
    slots: int = 32
    tokens: int = 32
    interval: float = 0.02
    """Seconds from one token to the next."""


QUICK = Options(lines=1_000)


class Rates(Struct, frozen=True):
    lines: int
    engine_per_s: float
    batch_per_s: float
    tenth_mb: float
    """Memory when a tenth of the lines was done."""
    end_mb: float

    @property
    def part(self) -> float:
        return self.batch_per_s / self.engine_per_s


class PacedEngine(ScriptedEngine):
    """Jobs are not kept, as they are for tests."""

    def __init__(self, options: Options) -> None:
        card = ModelCard(name=NAME, max_model_len=4096, templates={"default": CHATML}, slots=options.slots)
        super().__init__(say("x" * (options.tokens - 1)), card=card, interval=options.interval)

    def submit(self, job: Job, sink: Sink) -> JobHandle:
        handle = super().submit(job, sink)
        self.jobs.clear()
        return handle


async def by_itself(options: Options) -> float:
    """Answers a second, of the engine alone."""
    engine, left, flying = PacedEngine(options), options.lines, 0
    loop = asyncio.get_running_loop()
    over = loop.create_future()
    sampling, prompt = Sampling(max_tokens=options.tokens), tuple(b"say something")

    def begin() -> None:
        engine.submit(Job(id="1", prompt=prompt, sampling=sampling), sink)

    def begin_soon() -> None:
        """Not in the midst of a step, where an engine does not expect new jobs."""
        nonlocal left, flying
        left, flying = left - 1, flying + 1
        loop.call_soon(begin)

    def sink(step: Step) -> None:
        nonlocal flying
        if step.finish is not None:
            flying -= 1
            if left:
                begin_soon()
            elif not flying:
                over.set_result(None)

    began = time.perf_counter()
    for _ in range(min(options.slots, options.lines)):
        begin_soon()
    await over
    return options.lines / (time.perf_counter() - began)


def lines_of(options: Options) -> Iterator[bytes]:
    for number in range(options.lines):
        messages = [{"role": "user", "content": f"Say something of {number}."}]
        body = {"model": NAME, "messages": messages}
        yield (
            json.dumps({"custom_id": str(number), "method": "POST", "url": PATH, "body": body}).encode()
            + b"\n"
        )


async def as_batch(options: Options, folder: str) -> tuple[float, float, float]:
    """Lines a second of a batch, and megabytes when a tenth of it was done, and at its end."""
    app = App(PacedEngine(options), Settings(data_dir=folder, store="memory", files_dir=folder))
    batches = app.host.batches
    await app.host.start()

    def put(path: Path) -> str:
        with path.open("wb") as file:
            file.writelines(lines_of(options))
        return "file-1"

    batch = await batches.create("openai", "", PATH, put)
    while batch.status == "validating":
        await asyncio.sleep(LOOK_S)
        batch = await batches.get("openai", "", batch.id)
    began, tenth = time.perf_counter(), 0.0
    while batch.status in ("in_progress", "finalizing"):
        await asyncio.sleep(LOOK_S)
        batch = await batches.get("openai", "", batch.id)
        if not tenth and batch.completed * 10 >= options.lines:
            tenth = resident() / 2**20
    seconds, end = time.perf_counter() - began, resident() / 2**20
    assert (batch.status, batch.completed) == ("completed", options.lines), batch
    await app.host.stop()
    return options.lines / seconds, tenth, end


def measure(options: Options) -> Rates:
    engine = asyncio.run(by_itself(options))
    with tempfile.TemporaryDirectory() as folder:
        batch, tenth, end = asyncio.run(as_batch(options, folder))
    return Rates(options.lines, engine, batch, tenth, end)


def main(options: Options) -> None:
    rates = measure(options)
    row = (
        f"{rates.lines:,} lines",
        f"{rates.engine_per_s:.1f}/s",
        f"{rates.batch_per_s:.1f}/s",
        f"{100 * rates.part:.1f} %",
        f"{rates.tenth_mb:.0f} MB",
        f"{rates.end_mb:.0f} MB",
    )
    head = ("", "the engine alone", "as a batch", "of its rate", "memory at a tenth", "at the end")
    pace = f"{options.interval * 1000:g} ms"
    note = f"{options.slots} answers at a time, {options.tokens} tokens each, one each {pace}."
    keep("batches", rates, [Table("A batch beside its engine", head, [row], [note])])


def cli() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.batches",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="1,000 lines")
    args = parser.parse_args()
    print(machine.describe(), flush=True)
    main(QUICK if args.quick else Options())


if __name__ == "__main__":
    sys.exit(told(cli))
