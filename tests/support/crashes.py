"""A real server whose engine is in a process of its own, to be killed with answers under way."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from msgspec import Struct, field

from tests.support.engines import RUNNER
from tests.support.own_server import address

STORY = {"messages": [{"role": "user", "content": "Tell me a very long story."}]}
KILLS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP)


class Server(Struct):
    url: str
    pid: int
    log: Path

    @property
    def engine(self) -> int | None:
        """The process of the engine that is there now."""
        tasks = Path(f"/proc/{self.pid}/task").iterdir()
        pids = (int(pid) for task in tasks for pid in (task / "children").read_text().split())
        return next(pids, None)


@contextmanager
def isolated_server(*flags: str) -> Iterator[Server]:
    """`dragoman serve --isolate-engine`, ready; it must end well."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        command = [sys.executable, "-m", "dragoman", "serve", "--isolate-engine", "--runner", RUNNER]
        command += ["--port", "0", *flags]
        command += ["--data-dir", folder, "--threads", "1", "--context", "1024", "--shutdown-grace", "0"]
        with log.open("w") as file, subprocess.Popen(command, stdout=file, stderr=file) as process:
            try:
                yield Server(address(process, log), process.pid, log)
            finally:
                process.terminate()
                process.wait()
        assert process.returncode in (0, -signal.SIGTERM), log.read_text()


class Crash(Struct):
    """What was seen of one crash; all in seconds after it."""

    ends: list[float] = field(default_factory=list)
    """When each stream that was under way, or waited, was told."""
    untold: int = 0
    """Streams that ended without an error."""
    unready: float = 0.0
    refused: float = 0.0
    """When a new request was refused with a 503; 0 if none was."""
    back: float = 0.0
    """When a request was answered again."""


def crash(server: Server, number: signal.Signals, streams: int) -> Crash:
    """Kill the engine while so many answers are under way."""
    return asyncio.run(_crash(server, number, streams))


async def _crash(server: Server, number: signal.Signals, streams: int) -> Crash:
    seen, pid = Crash(), server.engine
    assert pid is not None
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
        begun = asyncio.Event()
        running = [asyncio.create_task(_stream(client, begun)) for _ in range(streams)]
        await begun.wait()
        began = time.monotonic()
        os.kill(pid, number)
        # Whoever is slower than the restart may miss it.
        while (await client.get("/ready")).status_code == 200 and server.engine in (pid, None):
            await asyncio.sleep(0.01)
        seen.unready = time.monotonic() - began
        if (await _ask(client)) == 503:
            seen.refused = time.monotonic() - began
        for value in await asyncio.gather(*running):
            seen.untold += value is None
            seen.ends += [] if value is None else [value - began]
        # Not too often: looking takes processor time from what is looked for.
        while (await client.get("/ready")).status_code != 200:
            await asyncio.sleep(0.05)
        while await _ask(client) != 200:
            await asyncio.sleep(0.05)
        seen.back = time.monotonic() - began
    return seen


async def _ask(client: httpx.AsyncClient) -> int:
    return (await client.post("/v1/chat/completions", json={**STORY, "max_tokens": 1})).status_code


async def _stream(client: httpx.AsyncClient, begun: asyncio.Event) -> float | None:
    """When the client was told that the engine failed; None if it never was."""
    body = {**STORY, "stream": True, "max_tokens": 900, "ignore_eos": True}
    async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        if reply.status_code == 503:
            return time.monotonic()
        async for line in reply.aiter_lines():
            if '"error"' in line:
                return time.monotonic()
            if '"content":"' in line and '"content":""' not in line:
                begun.set()
    return None
