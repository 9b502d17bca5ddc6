"""Listeners of a server: addresses with a port, or a Unix socket."""

import errno
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import ExitStack, suppress

from dragoman.errors import SettingsError
from dragoman.http.keys import hosts_of
from dragoman.settings import Settings

UNSENT_BYTES = 32 * 1024
POLL_INTERVAL_S = 1.0
"""Timeout for connecting to an existing Unix socket, to find out whether a server uses it."""
UNIX = "unix:"


def open_listeners(settings: Settings) -> list[socket.socket]:
    """Open all listeners, or raise an error that names the one that failed. The first has the server's own
    address."""
    with ExitStack() as doors:
        if settings.uds is not None:
            listeners = [doors.enter_context(bind_unix(settings.uds, int(settings.uds_mode, 8)))]
        else:
            listeners = [doors.enter_context(each) for each in _bind_all(settings)]
        if settings.ollama_port is not None:
            hosts = hosts_of(settings)
            listeners += [doors.enter_context(bind(host, settings.ollama_port)) for host in hosts]
        doors.pop_all()
    return listeners


def _bind_all(settings: Settings) -> Iterator[socket.socket]:
    """Bind all hosts; a free port found for the first is used for the others too."""
    port = settings.port
    for host in hosts_of(settings):
        listener = bind(host, port, reuse_port=settings.reuse_port)
        yield listener
        port = listener.getsockname()[1]


def bind(host: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    """Bind a TCP socket; done before anything else, so that a port in use is reported at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if reuse_port:
        if not hasattr(socket, "SO_REUSEPORT"):
            raise SettingsError("This system has no SO_REUSEPORT; unset reuse_port.", param="reuse_port")
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        # Connections inherit the option: the kernel buffers little of what a client has not read.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise SettingsError(f"Cannot listen on {host}:{port}: {error.strerror}.", param="port") from error
    return listener


def bind_unix(path: str, mode: int) -> socket.socket:
    """Bind a Unix socket. A stale one of a stopped server is replaced; nothing else is ever removed."""
    _remove_stale(path)
    listener = socket.socket(socket.AF_UNIX)
    # The socket has its mode from the beginning, so no other user can connect in between.
    before = os.umask(0o777 & ~mode)
    try:
        listener.bind(path)
        os.chmod(path, mode)
    except OSError as error:
        listener.close()
        text = error.strerror or "the path is too long"
        raise SettingsError(f"Cannot listen on {path}: {text}.", param="uds") from error
    finally:
        os.umask(before)
    return listener


def _remove_stale(path: str) -> None:
    try:
        is_socket = stat.S_ISSOCK(os.lstat(path).st_mode)
    except OSError:
        return
    if not is_socket:
        raise SettingsError(
            f"{path} exists and is not a socket; remove it or choose another path.", param="uds"
        )
    with socket.socket(socket.AF_UNIX) as trial:
        trial.settimeout(POLL_INTERVAL_S)
        try:
            trial.connect(path)
        except OSError as error:
            if error.errno == errno.ECONNREFUSED:
                with suppress(FileNotFoundError):
                    os.unlink(path)
                return
    raise SettingsError(f"Another server listens on {path}; stop it or choose another path.", param="uds")


class UnixName:
    """The path of a Unix socket, removed when its server ends, unless another server has replaced it."""

    def __init__(self, listener: socket.socket) -> None:
        name = listener.getsockname() if listener.family == socket.AF_UNIX else None
        self._path: str | None = name or None
        self._file = os.lstat(name).st_ino if name else 0

    def remove(self) -> None:
        if self._path is not None:
            with suppress(OSError):
                if os.lstat(self._path).st_ino == self._file:
                    os.unlink(self._path)


def address_of(listener: socket.socket, settings: Settings) -> str:
    """Return the address: `https://127.0.0.1:8443`, or `unix:/run/dragoman.sock`."""
    if listener.family == socket.AF_UNIX:
        return f"{UNIX}{listener.getsockname()}"
    scheme = "http" if settings.tls_cert is None else "https"
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
