"""A server as a process of its own: started, waited for, measured from outside, stopped."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from bench.errors import BenchError

ROOT = Path(__file__).parent.parent
LOGS = Path(__file__).parent / "out" / "logs"
START_LIMIT_S = 120.0
STOP_LIMIT_S = 15.0
POLL_S = 0.05


class Server:
    """`with Server("bare", ["bench.servers.bare"]) as server:` serves on `server.port` inside."""

    def __init__(
        self,
        name: str,
        module: Sequence[str],
        *,
        core: int | None = None,
        python: str = sys.executable,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.port = free_port()
        self.model = ""
        self.start_s = 0.0
        """From the start of the process to its first answer."""
        self._module = module
        self._core = core
        self._python = python
        self._environ = os.environ | (environ or {})

    def __enter__(self) -> "Server":
        LOGS.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        self._log = LOGS / f"{self.name}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [self._python, "-m", *self._module, "--port", str(self.port)],
                cwd=ROOT,
                env=self._environ,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        if self._core is not None:
            os.sched_setaffinity(self._process.pid, {self._core})
        try:
            self.model = self._wait()
            self.start_s = time.monotonic() - began
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def cpu_s(self) -> float:
        """Processor time of all its threads so far, user and system."""
        return cpu_s(self._process.pid)

    def family_cpu_s(self, without: str) -> float:
        """The same with all its children, but for those whose name has `without` in it."""
        return sum(cpu_s(pid) for pid, _ in _family(self._process.pid, without.encode()))

    def family(self) -> Iterator[tuple[int, bytes]]:
        """Itself and all its children, each with its command line."""
        return _family(self._process.pid)

    def peak_mib(self) -> float:
        """The most memory it ever had at once."""
        status = Path(f"/proc/{self._process.pid}/status").read_text(encoding="ascii")
        peak = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
        return int(peak.split()[1]) / 1024

    def _wait(self) -> str:
        """Its model's name, as soon as that can be asked."""
        until = time.monotonic() + START_LIMIT_S
        while time.monotonic() < until:
            if self._process.poll() is not None:
                break
            try:
                response = httpx.get(f"http://127.0.0.1:{self.port}/v1/models", timeout=5.0)
            except httpx.TransportError:
                time.sleep(POLL_S)
                continue
            if response.status_code == 200:
                model: dict[str, Any] = response.json()["data"][0]
                # A server may answer while it loads its model.
                if model.get("status", {}).get("value", "loaded") == "loaded":
                    return str(model["id"])
            time.sleep(POLL_S)
        raise BenchError(f"{self.name} did not start; its last words:\n{self._last_words()}")

    def _last_words(self) -> str:
        return "\n".join(self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])

    def _stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def running(commands: Mapping[str, Sequence[str]]) -> Iterator[list[Server]]:
    """All servers at once, to take turns. One that is not asked costs nothing."""
    with ExitStack() as stack:
        servers = []
        for name, command in commands.items():
            print(f"starting {name}", flush=True)
            servers.append(stack.enter_context(Server(name, command)))
        yield servers


def cpu_s(pid: int) -> float:
    # The clock of another process (clock_getcpuclockid): to the nanosecond, where /proc counts in 10 ms.
    return time.clock_gettime((~pid << 3) | 2)


def _family(pid: int, without: bytes | None = None) -> Iterator[tuple[int, bytes]]:
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
        if without is not None and without in line:
            return
        tasks = [each.read_text(encoding="ascii") for each in Path(f"/proc/{pid}/task").glob("*/children")]
    except (FileNotFoundError, ProcessLookupError):
        # It has ended meanwhile.
        return
    yield pid, line
    for child in " ".join(tasks).split():
        yield from _family(int(child), without)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
