"""Large photos of many clients at once, the whole way: `python -m bench.photos`.

The default model with a random projector behind `dragoman serve`. While four answers are written, 32 clients
send a photo of twelve million pixels each, all of them different: each is read, decoded in a process of its
own, made small and encoded. What counts is for how long the answers stand still, what memory all processes of
the server have at most, and what of it they still have when everybody has gone.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from base64 import b64encode
from io import BytesIO
from pathlib import Path

import httpx
import numpy as np
from msgspec import Struct
from PIL import Image

from bench import machine
from bench.errors import told
from bench.process import Server
from bench.sight import TEXT, spread, write_projector
from bench.tables import OUT, Table, keep
from dragoman.engines.default_weights import default_model

SIZE = (4000, 3000)
IDLE_S = 65
"""After which processes that decode have ended."""


class Options(Struct, frozen=True):
    photos: int = 32
    speakers: int = 4
    tokens: int = 1500


QUICK = Options(photos=4, tokens=300)


class Figures(Struct):
    gaps_ms: list[float]
    alone_ms: list[float]
    photo_mb: float
    seconds: float
    """From the first photo that was sent to the last one that was answered."""
    before_mb: float
    most_mb: float
    after_mb: float
    idle_mb: float


def photo(seed: int) -> bytes:
    """Something like one: large shapes, and grain."""
    chance = np.random.default_rng(seed)
    shapes = Image.fromarray(chance.integers(0, 256, (30, 40, 3), np.uint8)).resize(SIZE)
    grain = Image.fromarray(chance.integers(0, 256, (750, 1000, 3), np.uint8)).resize(SIZE)
    written = BytesIO()
    Image.blend(shapes, grain, 0.15).save(written, "JPEG", quality=85)
    return written.getvalue()


def body(photo: bytes) -> bytes:
    """Made beforehand: what clients have to do is done elsewhere, where servers are used."""
    url = f"data:image/jpeg;base64,{b64encode(photo).decode()}"
    part = {"type": "image_url", "image_url": {"url": url}}
    asked = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 4, "ignore_eos": True}
    return json.dumps(asked).encode()


def resident_mb(server: Server) -> float:
    """Of the server and its decoders, without what they share counted twice."""
    total = 0
    for pid, _ in server.family():
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue
        total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total * 1024 / 1e6


class Guests:
    """Those who read, those who show photos, and who looks at the memory."""

    def __init__(self, server: Server, client: httpx.AsyncClient) -> None:
        self._server = server
        self._client = client
        self.most_mb = 0.0
        self.through = asyncio.Event()

    async def read(self, number: int, tokens: int, begun: asyncio.Event) -> tuple[list[float], list[float]]:
        """Between two tokens: before photos come, and from then on until all were answered."""
        pair: tuple[list[float], list[float]] = [], []
        asked = {"prompt": f"{number} {TEXT}", "max_tokens": tokens, "ignore_eos": True, "stream": True}
        last = 0.0
        async with self._client.stream("POST", "/v1/completions", json=asked) as reply:
            async for line in reply.aiter_lines():
                if self.through.is_set():
                    break
                if line.startswith("data: {"):
                    now = time.perf_counter()
                    if last:
                        pair[begun.is_set()].append(1000 * (now - last))
                    last = now
        return pair

    async def show(self, body: bytes) -> None:
        reply = await self._client.post("/v1/chat/completions", content=body)
        reply.raise_for_status()

    async def watch(self) -> None:
        while True:
            self.most_mb = max(self.most_mb, await asyncio.to_thread(resident_mb, self._server))
            await asyncio.sleep(0.25)


async def measure(server: Server, options: Options, photos: list[bytes]) -> Figures:
    headers = {"content-type": "application/json"}
    url, limits = f"http://127.0.0.1:{server.port}", httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=None, headers=headers, limits=limits) as client:
        guests, begun = Guests(server, client), asyncio.Event()
        # Once before: what is begun at first use is there then.
        await guests.show(body(photo(0)))
        bodies = [body(each) for each in photos]
        before = resident_mb(server)
        watching = asyncio.create_task(guests.watch())
        reading = [
            asyncio.create_task(guests.read(number, options.tokens, begun))
            for number in range(options.speakers)
        ]
        await asyncio.sleep(3)
        begun.set()
        began = time.perf_counter()
        await asyncio.gather(*map(guests.show, bodies))
        seconds = time.perf_counter() - began
        guests.through.set()
        gaps = await asyncio.gather(*reading)
        watching.cancel()
    after = resident_mb(server)
    await asyncio.sleep(IDLE_S)
    return Figures(
        [gap for pair in gaps for gap in pair[1]],
        [gap for result in gaps for gap in result[0]],
        sum(map(len, photos)) / len(photos) / 1e6,
        seconds,
        before,
        guests.most_mb,
        after,
        resident_mb(server),
    )


def tables(figures: Figures, options: Options) -> list[Table]:
    pauses = [
        [f"{options.speakers} answers by themselves", *spread(figures.alone_ms)],
        [f"the same beside {options.photos} photos of {figures.photo_mb:.1f} MB", *spread(figures.gaps_ms)],
    ]
    memory = [
        ["before, one photo was seen", f"{figures.before_mb:.0f}"],
        ["at most", f"{figures.most_mb:.0f}"],
        ["when all were answered", f"{figures.after_mb:.0f}"],
        [f"{IDLE_S} s later", f"{figures.idle_mb:.0f}"],
    ]
    notes = [f"All photos were answered after {figures.seconds:.1f} s.", machine.describe()]
    return [
        Table("Between two tokens, ms", ["what", "median, p99, p99.9", "longest"], pauses, notes),
        Table("Memory of the server and its decoders, MB", ["when", "MB"], memory),
    ]


def cli() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.photos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="a first look")
    options = QUICK if parser.parse_args().quick else Options()
    OUT.mkdir(exist_ok=True)
    projector = write_projector(OUT / "mmproj-sight.gguf")
    photos = [photo(number + 1) for number in range(options.photos)]
    command = ["dragoman", "serve", str(default_model()), "--mmproj", str(projector), "--runner", "llamacpp"]
    command += ["--slots", str(options.speakers + 4), "--context", "2048", "--log-level", "warning"]
    command += ["--threads", str(os.cpu_count())]
    with Server("photos", command) as server:
        figures = asyncio.run(measure(server, options, photos))
    keep("photos", figures, tables(figures, options))


if __name__ == "__main__":
    sys.exit(told(cli))
