"""A person at a terminal: a pty, a program of its own behind it, and keys that are pressed."""

import os
import pty
import select
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

CTRL_C = "\x03"
PATIENCE_S = 30


class Terminal:
    def __init__(self, offset: int, process: int) -> None:
        self._place, self._process, self._seen = offset, process, b""
        self.ended = False

    def see(self, text: str) -> str:
        """What stands on the screen up to that text, which is waited for."""
        wanted, deadline = text.encode(), time.monotonic() + PATIENCE_S
        while wanted not in self._seen:
            left = deadline - time.monotonic()
            if left < 0 or not select.select([self._place], [], [], left)[0]:
                raise TimeoutError(f"no {text!r} in {self._seen!r}")
            self._seen += os.read(self._place, 65536)
        before, _, self._seen = self._seen.partition(wanted)
        return before.decode()

    def press(self, keys: str) -> None:
        os.write(self._place, keys.encode())

    def interrupt(self, text: str) -> None:
        """Press Ctrl-C till the text is seen: readline may miss one that comes between two keys."""
        while text.encode() not in self._seen:
            self.press(CTRL_C)
            while text.encode() not in self._seen and select.select([self._place], [], [], 0.5)[0]:
                self._seen += os.read(self._place, 65536)
        self.see(text)

    def end(self) -> int:
        """The exit code of the program, once it has left."""
        with suppress(OSError):
            while select.select([self._place], [], [], PATIENCE_S)[0] and os.read(self._place, 65536):
                pass
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            process, status = os.waitpid(self._process, os.WNOHANG)
            if process:
                self.ended = True
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        raise TimeoutError("the program does not leave")


@contextmanager
def terminal(command: Sequence[str], variables: Mapping[str, str]) -> Iterator[Terminal]:
    """A terminal in which this program runs, with these variables besides those that are there."""
    process, offset = pty.fork()
    if process == 0:
        os.execvpe(command[0], list(command), {**os.environ, "TERM": "xterm", **variables})
    person = Terminal(offset, process)
    try:
        yield person
    finally:
        if not person.ended:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        os.close(offset)
