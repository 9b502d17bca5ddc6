"""TLS: certificates that are read again when they change, and a door at which strangers do not wait for ever.

A handshake takes as long as its client likes, and until it is over nothing is known of who that is. So a
connection is counted when it is taken, not when it can be talked on, and has as long for its handshake as
others have for the head of a request. Its first byte tells TLS from plain HTTP, whose clients are told what
is wrong. It is only looked at, not read: the handshake finds it in its place.
"""

import asyncio
import logging
import os
import socket
import ssl
import time
from collections.abc import Callable
from typing import TypeAlias

from dragoman.errors import SettingsError
from dragoman.http.connection.limiter import ConnectionLimiter, CountedConnection

logger = logging.getLogger("dragoman.http")

HANDSHAKE = 0x16
"""The first byte of whoever speaks TLS."""
LOOK_S = 1.0
"""Between two looks at the files, of which each new connection asks for one."""
GOODBYE_S = 0.5
"""What a client gets to say that it has heard the end."""
HINT_S = 2.0
"""What one that speaks plain HTTP gets to hear why that is wrong."""
ACCEPTED_AT_ONCE = 16
BACKLOG = 2048
MOST_UNREAD = 64 * 1024
PLAIN = b"This port speaks HTTPS: ask for https:// instead of http://.\n"
HINT = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain; charset=utf-8\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(PLAIN), PLAIN)
)

MakeProtocol: TypeAlias = Callable[[CountedConnection], asyncio.Protocol]


class Certificate:
    """`context()` has what the two files say now; if they cannot be used, what they said before."""

    def __init__(self, cert: str, key: str | None) -> None:
        self._files = (cert, key or cert)
        self._seen = self._state()
        self._looked = time.monotonic()
        self._context = self._load()

    def context(self) -> ssl.SSLContext:
        now = time.monotonic()
        if now - self._looked >= LOOK_S:
            self._looked = now
            if (seen := self._state()) != self._seen:
                self._seen = seen
                self._reload()
        return self._context

    def _reload(self) -> None:
        try:
            self._context = self._load()
        except SettingsError as error:
            # Of a pair that is replaced, one file comes after the other.
            logger.error("The certificate stays as it was: %s", error.message)
        else:
            logger.info("There is another certificate; new connections have it")

    def _state(self) -> list[tuple[int, ...] | None]:
        found: list[tuple[int, ...] | None] = []
        for name in self._files:
            try:
                told = os.stat(name)
                found.append((told.st_ino, told.st_size, told.st_mtime_ns, told.st_ctime_ns))
            except OSError:
                found.append(None)
        return found

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        # One connection must not have us do the costly part of a handshake again and again.
        context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
        cert, key = self._files
        try:
            # Without a password it would ask for one, on the terminal.
            context.load_cert_chain(cert, key, password=b"")
        except OSError as error:
            raise SettingsError(_what_is_wrong(cert, key, error), param="tls_cert") from error
        return context


def _what_is_wrong(cert: str, key: str, error: OSError) -> str:
    if not isinstance(error, ssl.SSLError):
        return f"The certificate {cert} and its key {key} cannot be read: {error.strerror}."
    if error.reason == "KEY_VALUES_MISMATCH":
        return f"The key {key} is not that of the certificate {cert}."
    return f"{cert} and {key} are not a certificate and its key in PEM, without a password."


class TlsDoor:
    """Takes connections of one listener; each that speaks TLS becomes a protocol of `make`'s."""

    def __init__(
        self,
        listener: socket.socket,
        certificate: Certificate,
        limiter: ConnectionLimiter,
        make: MakeProtocol,
        seconds: float,
    ) -> None:
        self.certificate = certificate
        self.limiter = limiter
        self.make = make
        self.seconds = seconds
        self.loop = asyncio.get_running_loop()
        self.arriving: set[Arrival] = set()
        self._listener = listener
        listener.setblocking(False)
        listener.listen(BACKLOG)
        self.loop.add_reader(listener, self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                taken, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:
                # There is no descriptor left; the next may find one.
                self.loop.remove_reader(self._listener)
                self.loop.call_later(LOOK_S, self._accept_again)
                return
            taken.setblocking(False)
            Arrival(self, taken)

    def _accept_again(self) -> None:
        if self._listener.fileno() >= 0:
            self.loop.add_reader(self._listener, self._accept)

    def close(self) -> None:
        if self._listener.fileno() >= 0:
            self.loop.remove_reader(self._listener)
            self._listener.close()
        for arrival in list(self.arriving):
            arrival.end()


class Arrival:
    """A connection before anything can be said on it."""

    def __init__(self, door: TlsDoor, taken: socket.socket) -> None:
        self._door = door
        self._socket = taken
        self._ends_at = door.loop.time() + door.seconds
        self._timer = door.loop.call_at(self._ends_at, self.end)
        self._work: asyncio.Task[None] | None = None
        self._plain = False
        self._unread = 0
        self._watched = True
        counted = door.limiter.enter(self.end)
        if counted is None:
            self._timer.cancel()
            taken.close()
            return
        self._counted = counted
        door.arriving.add(self)
        door.loop.add_reader(taken, self._look)

    def _look(self) -> None:
        try:
            first = self._socket.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            first = b""
        if not first:
            self.end()
        elif first[0] == HANDSHAKE:
            self._watch_no_more()
            self._work = self._door.loop.create_task(self._shake_hands())
        else:
            self._say_hint()

    async def _shake_hands(self) -> None:
        door = self._door
        protocol = door.make(self._counted)
        left = max(0.001, self._ends_at - door.loop.time())
        self._timer.cancel()
        try:
            await door.loop.connect_accepted_socket(
                lambda: protocol,
                self._socket,
                ssl=door.certificate.context(),
                ssl_handshake_timeout=left,
                ssl_shutdown_timeout=GOODBYE_S,
            )
        except (OSError, TimeoutError, asyncio.CancelledError):
            # Whoever it was has left, or speaks no TLS that we do.
            self._work = None
            self.end()
        else:
            door.arriving.discard(self)

    def _say_hint(self) -> None:
        """And hears what else is sent, for a moment: a reset would take the hint from the client."""
        if not self._plain:
            self._plain = True
            self._timer.cancel()
            self._timer = self._door.loop.call_later(HINT_S, self.end)
            try:
                self._socket.send(HINT)
                self._socket.shutdown(socket.SHUT_WR)
            except OSError:
                self.end()
                return
        try:
            heard = len(self._socket.recv(MOST_UNREAD))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            heard = 0
        self._unread += heard
        if not heard or self._unread > MOST_UNREAD:
            self.end()

    def end(self) -> None:
        """It is over, or gives way to others."""
        self._timer.cancel()
        self._counted.leave()
        self._door.arriving.discard(self)
        if self._work is not None:
            self._work.cancel()
        else:
            self._watch_no_more()
            self._socket.close()

    def _watch_no_more(self) -> None:
        if self._watched:
            self._watched = False
            self._door.loop.remove_reader(self._socket)
