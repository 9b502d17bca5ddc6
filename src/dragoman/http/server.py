"""Serving an app on a socket, with uvicorn."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn

from dragoman.engines.protocol import Engine
from dragoman.errors import SettingsError, Unavailable
from dragoman.http.app import App
from dragoman.settings import Settings


def serve(
    engine: Engine,
    settings: Settings | None = None,
    on_ready: Callable[[str], None] | None = None,
    *,
    template: str | None = None,
) -> None:
    """Serves until a signal says stop. `on_ready` gets the address once requests are answered."""
    settings = settings or Settings()
    listener = bind(settings.host, settings.port)
    server = _Server(App(engine, settings, template=template), settings, listener, on_ready)
    server.run(sockets=[listener])
    if not server.started:
        raise Unavailable("The engine did not start; the log above says why.")


@contextmanager
def background(
    engine: Engine, settings: Settings | None = None, *, template: str | None = None
) -> Iterator[str]:
    """Serves in a thread of its own while the block runs; gives the address. For tests and scripts."""
    settings = settings or Settings(port=0)
    listener = bind(settings.host, settings.port)
    ready = threading.Event()
    server = _Server(App(engine, settings, template=template), settings, listener, lambda _: ready.set())
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        while not ready.wait(0.05):
            if not thread.is_alive():
                raise Unavailable("The engine did not start; the log says why.")
        yield address(listener)
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def bind(host: str, port: int) -> socket.socket:
    """Taken before the model loads, so that a port in use is known at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise SettingsError(f"Cannot listen on {host}:{port}: {error.strerror}.", param="port") from error
    return listener


def address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    def __init__(
        self,
        app: App,
        settings: Settings,
        listener: socket.socket,
        on_ready: Callable[[str], None] | None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=settings.shutdown_grace,
                lifespan="on",
                ws="none",
            )
        )
        self._address = address(listener)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self._on_ready is not None:
            asyncio.get_running_loop().call_soon(self._on_ready, self._address)
