"""The load: many streamed requests from one thread. It keeps what comes and when, and reads it afterwards.

While a round runs it does nothing but receive, so that it takes as little as possible from the server, with
which it may share the machine.
"""

import select
import socket
import time
from collections import deque
from collections.abc import Sequence

from msgspec import Struct, field

from bench.errors import BenchError

END = b"\r\n0\r\n\r\n"
"""The end of a chunk and the last, empty one. Nothing else in an event stream ends so."""
RECEIVE = 1 << 16


class Trace(Struct):
    """One answer, as it came."""

    sent: float
    times: list[float] = field(default_factory=list)
    data: list[bytes] = field(default_factory=list)

    @property
    def over(self) -> bool:
        if not self.data:
            return False
        last = self.data[-1]
        if len(last) < len(END):
            last = b"".join(self.data[-len(END) :])
        return not self.data[-1] or last.endswith(END)


class Flight:
    """Requests that are on their way together: one connection and one trace for each body.

    With `at_once` only so many of them are: when an answer is complete, the next request is sent.
    """

    def __init__(
        self,
        port: int,
        bodies: Sequence[bytes],
        limit_s: float = 300.0,
        path: str = "/v1/chat/completions",
        at_once: int | None = None,
    ) -> None:
        self._until = time.perf_counter() + limit_s
        self._poll = select.epoll()
        self._address = ("127.0.0.1", port)
        self._requests = deque(_request(port, path, body) for body in bodies)
        self._open: dict[int, tuple[socket.socket, Trace]] = {}
        self.traces: list[Trace] = []
        for connection in [socket.create_connection(self._address) for _ in bodies[:at_once]]:
            self._send(connection)

    def _send(self, connection: socket.socket) -> None:
        connection.sendall(self._requests.popleft())
        connection.setblocking(False)
        self._poll.register(connection, select.EPOLLIN)
        self.traces.append(Trace(time.perf_counter()))
        self._open[connection.fileno()] = (connection, self.traces[-1])

    def open(self) -> None:
        """Returns when every request has the beginning of an answer."""
        while not all(trace.data for trace in self.traces):
            self._receive()

    def finish(self) -> list[Trace]:
        """Returns when every answer is complete."""
        while self._open:
            self._receive()
        self._poll.close()
        return self.traces

    def _receive(self) -> None:
        ready = self._poll.poll(1.0)
        if not ready and time.perf_counter() > self._until:
            raise BenchError(f"{len(self._open)} of {len(self.traces)} answers did not end in time.")
        for number, _ in ready:
            connection, trace = self._open[number]
            trace.data.append(connection.recv(RECEIVE))
            trace.times.append(time.perf_counter())
            if trace.over:
                del self._open[number]
                self._poll.unregister(connection)
                connection.close()
                if self._requests:
                    self._send(socket.create_connection(self._address))


def _request(port: int, path: str, body: bytes) -> bytes:
    return (
        b"POST %s HTTP/1.1\r\n"
        b"Host: 127.0.0.1:%d\r\n"
        b"Content-Type: application/json\r\n"
        b"Accept: text/event-stream\r\n"
        b"Content-Length: %d\r\n"
        b"\r\n%s"
    ) % (path.encode(), port, len(body), body)
