"""A client that sends bytes as they are, and reads whatever comes back."""

import socket
from contextlib import suppress
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

import msgspec

from tests.attacks.frame import Reply

TIMEOUT_S = 60.0


def place(url: str) -> tuple[str, int]:
    """Where the server of a URL listens."""
    parts = urlsplit(url)
    assert parts.hostname and parts.port
    return parts.hostname, parts.port


class Raw:
    """`with Raw(url) as raw: raw.send(b"GET / HTTP/1.1...")`"""

    def __init__(self, url: str, receive_bytes: int = 0) -> None:
        """`receive_bytes`: how much the system takes for a client that does not read."""
        self.socket = socket.socket()
        if receive_bytes:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.socket.settimeout(TIMEOUT_S)
        self.socket.connect(place(url))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> int:
        """How much of it could be sent before the server would have no more."""
        sent = 0
        with suppress(ConnectionError):
            while sent < len(data):
                sent += self.socket.send(data[sent : sent + 65536])
        return sent

    def rest(self) -> bytes:
        """All that comes until the server closes the connection."""
        raw = b""
        with suppress(ConnectionResetError):
            while data := self.socket.recv(65536):
                raw += data
        return raw

    def replies(self, count: int | None = None) -> list[Reply]:
        """So many, or all until the server closes the connection."""
        if count is None:
            return replies(self.rest())
        raw = b""
        while len(result := replies(raw)) < count:
            data = self.socket.recv(65536)
            assert data, f"closed after {raw!r}"
            raw += data
        return result


class OpenSocket(msgspec.Struct):
    """A socket of a process."""

    listens: bool
    port: int
    """The other side's."""


def held(pid: int) -> list[OpenSocket]:
    """The sockets that a process holds, but for those of files."""
    rows = []
    for table in ("tcp", "tcp6", "udp", "udp6"):
        lines = Path(f"/proc/{pid}/net/{table}").read_text(encoding="ascii").splitlines()[1:]
        rows += [(table, *line.split()) for line in lines]
    own = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            own.add(str(link.readlink()))
    return [
        OpenSocket(listens=table.startswith("udp") or row[3] == "0A", port=int(row[2].rpartition(":")[2], 16))
        for table, *row in rows
        if f"socket:[{row[9]}]" in own
    ]


def replies(said: bytes) -> list[Reply]:
    """The whole replies in some bytes; none of them may come in chunks."""
    result = []
    while b"\r\n\r\n" in said:
        head, _, rest = said.partition(b"\r\n\r\n")
        lines = head.lower().split(b"\r\n")
        status = int(lines[0].split()[1])
        length = next(int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length:"))
        if len(rest) < length:
            break
        result.append(Reply(status, rest[:length]))
        said = rest[length:]
    return result
