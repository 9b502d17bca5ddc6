"""A listener that nobody must connect to."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager


class Canary:
    """The system takes connections for it; what came is looked at when all is over."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        listener.setblocking(False)
        self.port: int = listener.getsockname()[1]

    def url(self, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}/x"

    @property
    def sings(self) -> bool:
        try:
            self._listener.accept()[0].close()
        except BlockingIOError:
            return False
        return True


@contextmanager
def canary() -> Iterator[Canary]:
    """On every address of this machine, so that no way to write one leads past it."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.create_server(("", 0), family=family, dualstack_ipv6=family == socket.AF_INET6) as listener:
        result = Canary(listener)
        with socket.create_connection(("127.0.0.1", result.port)):
            assert result.sings
        yield result
