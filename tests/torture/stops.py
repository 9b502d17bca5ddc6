"""Signals at any moment: while a model is converted or loaded, with answers running, with clients that leave.

A process that was told to stop has done so when its status is 0, nothing of it is left running, and nothing
that it had half made is taken for whole later.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

from msgspec import Struct

from dragoman.engines.default_weights import default_model
from tests.support.own_server import address
from tests.support.tiny_gguf import write_tiny
from tests.support.wire import ask, request
from tests.torture.page import Row, progress, scaled

STOPS, AT_ONCE = 1_000, 3
STAGES = {
    "loading": 3,
    "converting": 2,
    "idle": 1,
    "streams": 6,
    "leaving": 6,
    "vectors": 1,
    "constrained": 2,
}
"""When the signal comes, and how often of these."""
SIGNALS = {signal.SIGINT: 5, signal.SIGTERM: 5, signal.SIGHUP: 1}
FLAGS = {("--runner", "openvino"): 6, ("--runner", "llamacpp"): 5, ("--isolate-engine",): 3}
REAL = 0.05
"""The share of those that convert the real model, which takes seconds."""
TWICE = 0.2
"""The share of those who cannot wait and send it again."""
PATIENCE_S = 60.0
MOST_S = 3.0
LEFT_S = 2.0
MARK = "STOPS_MARK"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string"}},
    "required": ["a"],
    "additionalProperties": False,
}
CHAT, EMBEDDINGS = "/v1/chat/completions", "/v1/embeddings"


class Case(Struct, frozen=True):
    stage: str
    flags: tuple[str, ...]
    number: signal.Signals
    twice: bool
    real: bool
    seed: int

    @property
    def words(self) -> str:
        again = " twice" if self.twice else ""
        return f"{self.number.name}{again}, {self.stage}, {' '.join(self.flags)}{', real model' * self.real}"


class Stop(Struct):
    case: Case
    status: int
    seconds: float
    left: int
    """Processes that were still there a moment later."""
    halves: int
    """Converted models that have a name and are not whole."""
    log: str = ""


def draw(chance: Random) -> Case:
    [stage] = chance.choices(list(STAGES), list(STAGES.values()))
    [flags] = chance.choices(list(FLAGS), list(FLAGS.values()))
    [number] = chance.choices(list(SIGNALS), list(SIGNALS.values()))
    real = stage == "converting" and chance.random() < REAL
    if stage == "converting":
        flags = ("--runner", "openvino")
    return Case(stage, flags, number, chance.random() < TWICE, real, chance.randrange(2**32))


class Stops:
    """`cache` has the models converted; who converts gets an empty one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tiny = write_tiny(folder / "tiny.gguf")
        self._cache = folder / "cache"
        # So that nobody who is to be stopped in another stage has to convert first.
        self._ready = self.usual_start()

    def usual_start(self) -> float:
        """Seconds from where signals are taken to where requests are."""
        with self._begun(
            Case("idle", ("--runner", "openvino"), signal.SIGTERM, False, False, 0), "first"
        ) as first:
            began = _takes_signals(first)
            address(first, self._folder / "first")
            first.terminate()
            return time.monotonic() - began

    def stop(self, case: Case) -> Stop:
        name = uuid.uuid4().hex
        chance = Random(case.seed)
        with self._begun(case, name) as process:
            _takes_signals(process)
            try:
                asyncio.run(self._disturb(case, process, self._folder / name, chance))
                began = time.monotonic()
                _send(process, case, chance)
                status = process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                status = 9
        log = (self._folder / name).read_text() if status else ""
        (self._folder / name).unlink()
        return Stop(case, status, time.monotonic() - began, _left(name), self._halves(name), log)

    def _begun(self, case: Case, name: str) -> "subprocess.Popen[bytes]":
        cache = self._folder / f"cache-{name}" if case.stage == "converting" else self._cache
        environ = {**os.environ, "DRAGOMAN_CACHE": str(cache), MARK: name}
        model = default_model() if case.real else self._tiny
        command = [sys.executable, "-m", "dragoman", "serve", str(model), *case.flags, "--port", "0"]
        command += ["--shutdown-grace", "0", "--data-dir", str(self._folder / "data"), "--threads", "2"]
        with (self._folder / name).open("w") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, env=environ)

    async def _disturb(
        self, case: Case, process: "subprocess.Popen[bytes]", log: Path, chance: Random
    ) -> None:
        """Returns when the signal is to come."""
        if case.stage in ("loading", "converting"):
            await asyncio.sleep(chance.random() * self._ready * (5 if case.real else 1))
            return
        url = await asyncio.to_thread(address, process, log)
        clients = [asyncio.create_task(_client(url, case, chance)) for _ in range(chance.randrange(1, 5))]
        if case.stage != "idle":
            await asyncio.sleep(chance.random() * 0.3)
        for client in clients:
            # Those who are left behind hang up when the loop ends, which is just before the signal.
            client.cancel()

    def _halves(self, name: str) -> int:
        number = 0
        for folder in (self._folder / f"cache-{name}").glob("openvino/*-*"):
            if not folder.name.startswith("convert-"):
                number += not all(
                    (folder / f"openvino_model.{kind}").stat().st_size for kind in ("xml", "bin")
                )
        subprocess.run(["rm", "-rf", str(self._folder / f"cache-{name}")], check=True)
        return number


async def _client(url: str, case: Case, chance: Random) -> None:
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": "ab " * chance.randrange(1, 20)}]}
    body = {**fields, "stream": True, "max_tokens": 100, "ignore_eos": True}
    path = CHAT
    if case.stage == "vectors":
        path, body = EMBEDDINGS, {"input": ["ab " * 30] * 64}
    elif case.stage == "constrained":
        form = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": SCHEMA}}
        body = {**fields, "stream": True, "max_tokens": 100, "response_format": form}
    patience = chance.random() * 0.2 if case.stage == "leaving" else None
    while case.stage != "idle":
        with suppress(OSError):
            await ask(url, request(url, path, body), patience=patience)


def _takes_signals(process: "subprocess.Popen[bytes]") -> float:
    """When it does: before, Python is not there yet, and a signal is the system's to act on."""
    bit = 1 << (signal.SIGTERM - 1)
    while process.poll() is None:
        fields = dict(
            line.split(":", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines()
        )
        if int(fields.get("SigCgt", "0"), 16) & bit:
            break
        time.sleep(0.002)
    return time.monotonic()


def _send(process: "subprocess.Popen[bytes]", case: Case, chance: Random) -> None:
    process.send_signal(case.number)
    if case.twice:
        with suppress(subprocess.TimeoutExpired):
            process.wait(chance.random() * 0.4)
        process.send_signal(case.number)


def _left(name: str) -> int:
    """How many of its processes are there after a while."""
    mark, until = f"{MARK}={name}".encode(), time.monotonic() + LEFT_S
    while time.monotonic() < until:
        if not (number := sum(_has(process, mark) for process in Path("/proc").glob("[0-9]*"))):
            return 0
        time.sleep(0.1)
    return number


def _has(process: Path, mark: bytes) -> bool:
    try:
        return mark in (process / "environ").read_bytes().split(b"\0")
    except OSError:
        return False


def run(scale: float = 1.0, seed: int = 1) -> list[Row]:
    chance, count = Random(seed), scaled(STOPS, scale)
    # A shell has its background jobs ignore one of them, and `nohup` another; they would hand that on.
    before = {number: signal.signal(number, signal.default_int_handler) for number in SIGNALS}
    try:
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(AT_ONCE) as pool:
            stops = Stops(Path(folder))
            done = list[Stop]()
            for stop in pool.map(stops.stop, [draw(chance) for _ in range(count)]):
                done.append(stop)
                progress(len(done), count, "stops")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return rows(done)


def rows(done: list[Stop]) -> list[Row]:
    for stop in done:
        if stop.status or stop.left or stop.halves:
            print(json.dumps([stop.case.words, stop.status, stop.left, stop.halves, stop.log[-400:]]))
    other = Counter(_named(stop.status) for stop in done if stop.status)
    times = sorted(stop.seconds for stop in done)
    p99, left, halves = times[99 * len(times) // 100], sum(s.left for s in done), sum(s.halves for s in done)
    what = f"{len(done):,} stops by a signal, at any moment"
    seen = ", ".join(f"{count} x {name}" for name, count in other.items()) or "all"
    return [
        Row(f"{what}: exit status 0, and no core", seen, "all", not other),
        Row(
            f"{what}: how long they take",
            f"p99 {p99:.1f} s, the last {times[-1]:.1f} s",
            f"{MOST_S:g} s",
            p99 <= MOST_S,
        ),
        Row(f"{what}: processes that are left", f"{left}", "0", not left),
        Row(f"{what}: models half converted that have a name", f"{halves}", "0", not halves),
    ]


def _named(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"status {status}"
