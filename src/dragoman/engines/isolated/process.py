"""The process of an engine: how it is begun and ended, and whether it is stuck."""

import fcntl
import os
import select
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_CERTAINLY_ALIVE = frozenset("RDt")
"""Wants to run, waits for a disk, or is held by a debugger."""


class Process:
    """Begun with a socket to us and a lifeline: when we are gone, however that came, it is gone as well."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str] | None = None) -> None:
        """`command` gets the numbers of two descriptors as its last words: the socket, and the lifeline.

        `environ` is its environment; by default this process's own.
        """
        self.link, theirs = socket.socketpair()
        held, self._lifeline = os.pipe()
        try:
            self._child = subprocess.Popen(
                [*command, str(theirs.fileno()), str(held)],
                pass_fds=(theirs.fileno(), held),
                env=environ,
                stdin=subprocess.DEVNULL,
                # What libraries print is no output of the server's.
                stdout=2,
            )
        finally:
            theirs.close()
            os.close(held)
        self._used = 0

    @property
    def pid(self) -> int:
        return self._child.pid

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self._child.kill()

    def end(self, patience: float) -> str:
        """Wait for its end, which may have to be hurried, and say how it came."""
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(patience)
        self.kill()
        code = self._child.wait()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        return f"was ended by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"

    def is_still(self) -> bool:
        """Whether nothing of it has run since the last call, or wants to. Not, where nobody can tell."""
        used, states = 0, set()
        try:
            for task in Path(f"/proc/{self.pid}/task").iterdir():
                # The name in parentheses may hold anything, so what follows the last one is read.
                fields = (task / "stat").read_text().rpartition(")")[2].split()
                states.add(fields[0])
                used += int(fields[11]) + int(fields[12])
        except (OSError, ValueError, IndexError):
            return False
        before, self._used = self._used, used
        return bool(states) and used == before and not states & _CERTAINLY_ALIVE


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def die_with(lifeline: int) -> None:
    """In the child: have the kernel kill this process when the parent's end of the pipe is closed.

    The pipe carries nothing, so the only thing that can happen on it is its end. Nothing of this process has
    to run for it, so it works as well when this process is stuck or stopped. Elsewhere than on Linux the
    signal is SIGIO, which also ends a process, but not one that is stopped.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:
        # It was too late to be told.
        os._exit(1)
