"""The server under test: `dragoman serve` as a subprocess, started as a person starts it."""

import asyncio
import json
import os
import re
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import httpx
from bench.process import ROOT, free_port
from msgspec import Struct

from tests.soak.fault import Fault
from tests.soak.files import make_command

TORCH = ROOT / "build" / "torch"
START_S, STOP_S = 120.0, 30.0


_PROBE = re.compile(r'"path":"/(health|ready|metrics)","status":200')


class Resources(Struct):
    """What the server process holds."""

    resident: int
    descriptors: int
    threads: int


class Server:
    """Starts and stops the subprocess, always on the same port and with the same folder."""

    def __init__(self, runner: str, folder: Path, flags: Sequence[str] = ()) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / "log"
        self._command = [*make_command(runner, folder), "--port", str(port), *flags]
        self._environ = dict(os.environ)
        if runner == "torch":
            paths = [os.environ.get("PYTHONPATH", ""), str(TORCH)]
            self._environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        self._process: subprocess.Popen[bytes] | None = None
        self._log_read = 0

    async def start(self) -> None:
        """Start it, and return when it is ready."""
        with self.log.open("ab") as file:
            self._process = subprocess.Popen(self._command, stdout=file, stderr=file, env=self._environ)
        async with httpx.AsyncClient(verify=False) as client:
            for _ in range(int(START_S / 0.1)):
                self.check()
                try:
                    if (await client.get(f"{self.url}/ready", timeout=5)).status_code == 200:
                        return
                except httpx.HTTPError:
                    pass
                await asyncio.sleep(0.1)
        raise Fault("server", f"it was not ready after {START_S:.0f} s")

    async def stop(self) -> None:
        """Send SIGTERM; raises a `Fault` if it does not end well and in time."""
        process = self._running
        process.send_signal(signal.SIGTERM)
        try:
            status = await asyncio.to_thread(process.wait, STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise Fault("server", f"it was there {STOP_S:.0f} s after SIGTERM") from None
        if status not in (0, -signal.SIGTERM):
            raise Fault("server", f"it ended with status {status} after SIGTERM")

    def kill(self) -> None:
        """End it in any state, or do nothing if it has ended."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def check(self) -> None:
        """Raises a `Fault` if it has ended by itself."""
        if (status := self._running.poll()) is not None:
            raise Fault("server", f"it has ended with status {status}")

    @property
    def _running(self) -> "subprocess.Popen[bytes]":
        assert self._process is not None
        return self._process

    def measure(self) -> Resources:
        process = Path(f"/proc/{self._running.pid}")
        try:
            resident, threads = (process / "statm").read_text().split()[1], len(os.listdir(process / "task"))
            descriptors = len(os.listdir(process / "fd"))
        except OSError:
            # It is being restarted.
            return Resources(0, 0, 0)
        return Resources(int(resident) * os.sysconf("SC_PAGE_SIZE"), descriptors, threads)

    async def count_unfinished(self) -> int:
        """Requests that run or wait, as /metrics says."""
        async with httpx.AsyncClient(verify=False) as client:
            text = (await client.get(f"{self.url}/metrics", timeout=30)).text
        names = ("dragoman_answers_running{", "dragoman_answers_waiting{")
        counts = [line.rsplit(" ", 1)[1] for line in text.splitlines() if line.startswith(names)]
        return int(sum(map(float, counts)))

    async def find_model(self) -> str:
        """The name of the default model."""
        async with httpx.AsyncClient(verify=False) as client:
            return str((await client.get(f"{self.url}/v1/models", timeout=30)).json()["data"][0]["id"])

    def read_errors(self) -> list[str]:
        """New lines of level error or worse since the last call."""
        with self.log.open("rb") as file:
            file.seek(self._log_read)
            text = file.read()
        whole = text.rpartition(b"\n")[0]
        self._log_read += len(whole)
        return [line for line in whole.decode(errors="replace").splitlines() if _is_error(line)]

    def read_log(self, count: int) -> list[str]:
        """The last lines of the log, without those of successful probes."""
        text = self.log.read_bytes()[-1_000_000:] if self.log.exists() else b""
        lines = text.decode(errors="replace").splitlines()
        return [line for line in lines if not _PROBE.search(line)][-count:]


def _is_error(line: str) -> bool:
    try:
        result = json.loads(line)
    except ValueError:
        return False
    return isinstance(result, dict) and result.get("level") in ("error", "critical")
