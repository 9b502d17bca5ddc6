"""TLS: certificates that are reloaded when they change, and a listener with a deadline for handshakes.

A client may take any time for its handshake, and until it is over the client is unknown. A connection
therefore counts from accept(), and its handshake has the timeout of a request's headers. The first byte tells
TLS from plain HTTP, and plain-HTTP clients get a 400 that says to use https. This byte is only peeked: the
handshake reads it.
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
"""The first byte of a TLS handshake."""
POLL_INTERVAL_S = 1.0
"""Seconds between checks of the certificate files; only new connections check."""
GOODBYE_S = 0.5
"""Seconds to wait for a client's close_notify."""
HINT_S = 2.0
"""Seconds that a plain-HTTP client has to read the hint."""
ACCEPTED_AT_ONCE = 16
BACKLOG = 2048
MOST_UNREAD = 64 * 1024
PLAIN = b"This port speaks HTTPS: use https:// instead of http://.\n"
HINT = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain; charset=utf-8\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(PLAIN), PLAIN)
)

MakeProtocol: TypeAlias = Callable[[CountedConnection], asyncio.Protocol]


class Certificate:
    """The certificate and key; `context()` reloads changed files, and keeps the old if they are invalid."""

    def __init__(self, cert: str, key: str | None) -> None:
        self._files = (cert, key or cert)
        self._seen = self._state()
        self._looked = time.monotonic()
        self._context = self._load()

    def context(self) -> ssl.SSLContext:
        now = time.monotonic()
        if now - self._looked >= POLL_INTERVAL_S:
            self._looked = now
            if (seen := self._state()) != self._seen:
                self._seen = seen
                self._reload()
        return self._context

    def _reload(self) -> None:
        try:
            self._context = self._load()
        except SettingsError as error:
            # When a pair is replaced, one file changes before the other.
            logger.error("Certificate not reloaded: %s", error.message)
        else:
            logger.info("Certificate reloaded; new connections use it")

    def _state(self) -> list[tuple[int, ...] | None]:
        items: list[tuple[int, ...] | None] = []
        for name in self._files:
            try:
                parts = os.stat(name)
                items.append((parts.st_ino, parts.st_size, parts.st_mtime_ns, parts.st_ctime_ns))
            except OSError:
                items.append(None)
        return items

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        # A client must not be able to repeat the costly part of a handshake on one connection.
        context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
        cert, key = self._files
        try:
            # Without a password, OpenSSL would ask for one on the terminal.
            context.load_cert_chain(cert, key, password=b"")
        except OSError as error:
            raise SettingsError(_what_is_wrong(cert, key, error), param="tls_cert") from error
        return context


def _what_is_wrong(cert: str, key: str, error: OSError) -> str:
    if not isinstance(error, ssl.SSLError):
        return f"Cannot read the certificate {cert} or its key {key}: {error.strerror}."
    if error.reason == "KEY_VALUES_MISMATCH":
        return f"The key {key} does not match the certificate {cert}."
    return f"{cert} and {key} are not a valid certificate and key; use PEM files without a password."


class TlsListener:
    """Accepts the connections of one listener; each that uses TLS gets a protocol from `make`."""

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
        self.arriving: set[TlsHandshake] = set()
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
                # There is no free file descriptor; retry later.
                self.loop.remove_reader(self._listener)
                self.loop.call_later(POLL_INTERVAL_S, self._accept_again)
                return
            taken.setblocking(False)
            TlsHandshake(self, taken)

    def _accept_again(self) -> None:
        if self._listener.fileno() >= 0:
            self.loop.add_reader(self._listener, self._accept)

    def close(self) -> None:
        if self._listener.fileno() >= 0:
            self.loop.remove_reader(self._listener)
            self._listener.close()
        for arrival in list(self.arriving):
            arrival.end()


class TlsHandshake:
    """A connection before its TLS handshake is complete."""

    def __init__(self, door: TlsListener, taken: socket.socket) -> None:
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
            # The client disconnected, or supports no TLS version of ours.
            self._work = None
            self.end()
        else:
            door.arriving.discard(self)

    def _say_hint(self) -> None:
        """Send the hint, and discard what else arrives for a moment: a reset would lose the hint."""
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
        """End the connection, also to make room for others."""
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
