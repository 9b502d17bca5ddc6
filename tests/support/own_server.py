"""`dragoman serve` in a process of its own, with a real model, as a person would start it."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct

from tests.support.engines import RUNNER


class RunningServer(Struct):
    url: str
    process: "subprocess.Popen[bytes]"
    log: Path

    @property
    def resident(self) -> float:
        """Bytes of memory that it has now."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def served(*flags: str) -> Iterator[RunningServer]:
    """Ready to be asked; it is ended with the block."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        command = [sys.executable, "-m", "dragoman", "serve", "--port", "0", "--data-dir", folder]
        command += ["--runner", RUNNER, *flags]
        with log.open("w") as file, subprocess.Popen(command, stdout=file, stderr=file) as process:
            try:
                yield RunningServer(address(process, log), process, log)
            finally:
                process.send_signal(signal.SIGTERM)
                process.wait()


def address(process: "subprocess.Popen[bytes]", log: Path) -> str:
    """Where it listens, which it tells when it is ready."""
    while process.poll() is None:
        for line in log.read_text().splitlines():
            if line.split()[:1] == ["api"]:
                return line.split()[1].removesuffix("/v1")
        time.sleep(0.05)
    raise AssertionError(log.read_text())
