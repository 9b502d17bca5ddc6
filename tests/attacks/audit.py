"""Writes down what a process asks of the system: which files, which processes, whom it connects to."""

import os
import sys
from pathlib import Path

STARTS = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty"}
ASKS = {"socket.connect", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname", "urllib.Request"}
TOUCHES = {"open", "import", "os.listdir", "os.scandir", "os.remove", "os.rename", "os.mkdir", "os.truncate",
           "os.chmod", "os.link", "os.symlink", "sqlite3.connect", "ctypes.dlopen"}  # fmt: skip
OWN = ("open ('/proc/self/statm'", "ctypes.dlopen (None,)")
"""What a server does each second by itself: it looks at its own memory, and gives some back."""
WATCHED = STARTS | ASKS | TOUCHES | {"socket.bind"}


def audit(file: Path) -> None:
    """From now on, for ever: a hook cannot be taken away."""
    # By its number, so that writing is not itself an event.
    number = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def hook(event: str, args: tuple[object, ...]) -> None:
        if event in WATCHED:
            os.write(number, f"{event} {args!r}\n".encode(errors="replace"))

    sys.addaudithook(hook)


class AuditLog:
    """What has been written down since it was last looked at."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._seen = 0

    def news(self) -> list[str]:
        with self.file.open("rb") as file:
            file.seek(self._seen)
            data = file.read()
        self._seen += len(data)
        return [line for line in data.decode().splitlines() if not line.startswith(OWN)]
