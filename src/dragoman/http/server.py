"""Serving an app on a socket, with uvicorn."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from dragoman.engines.protocol import Engine
from dragoman.errors import SettingsError, Unavailable
from dragoman.http.app import App
from dragoman.settings import Settings, changed


def serve(
    engine: Engine,
    settings: Settings | None = None,
    *,
    template: str | None = None,
    on_ready: Callable[[str], None] | None = None,
    **changes: Any,
) -> None:
    """Serves until a signal says stop: `serve(engine, port=9000, api_key=["secret"])`.

    `template` is the source of a chat template to use instead of the model's. `on_ready` gets the address
    once requests are answered.
    """
    server, listener = _prepare(engine, settings, template, on_ready, changes)
    server.run(sockets=[listener])
    _check_started(server)


async def aserve(
    engine: Engine,
    settings: Settings | None = None,
    *,
    template: str | None = None,
    on_ready: Callable[[str], None] | None = None,
    **changes: Any,
) -> None:
    """`serve` inside an event loop that already runs."""
    server, listener = _prepare(engine, settings, template, on_ready, changes)
    await server.serve(sockets=[listener])
    _check_started(server)


@contextmanager
def background(
    engine: Engine, settings: Settings | None = None, *, template: str | None = None, **changes: Any
) -> Iterator[str]:
    """Serves in a thread of its own while the block runs, and gives the address: a free port by default."""
    ready = threading.Event()
    settings = settings or Settings(port=0)
    server, listener = _prepare(engine, settings, template, lambda _: ready.set(), changes)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        while not ready.wait(0.05):
            if not thread.is_alive():
                _check_started(server)
        yield address(listener)
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def _prepare(
    engine: Engine,
    settings: Settings | None,
    template: str | None,
    on_ready: Callable[[str], None] | None,
    changes: dict[str, Any],
) -> tuple["_Server", socket.socket]:
    chosen = changed(settings or Settings(), changes)
    listener = bind(chosen.host, chosen.port)
    try:
        return _Server(App(engine, chosen, template=template), listener, on_ready), listener
    except BaseException:
        listener.close()
        raise


def _check_started(server: "_Server") -> None:
    if not server.started:
        raise Unavailable("The engine did not start; the log says why.")


def bind(host: str, port: int) -> socket.socket:
    """Taken before anything else, so that a port in use is known at once."""
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
    def __init__(self, app: App, listener: socket.socket, on_ready: Callable[[str], None] | None) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=app.settings.shutdown_grace,
            lifespan="on",
            ws="websockets-sansio",
            ws_max_size=app.settings.limits.body_bytes,
        )
        super().__init__(config)
        self._address = address(listener)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self._on_ready is not None:
            asyncio.get_running_loop().call_soon(self._on_ready, self._address)
