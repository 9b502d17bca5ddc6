"""Serves an app on sockets, with uvicorn."""

import asyncio
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from inspect import isawaitable
from types import FrameType
from typing import Any, TypeAlias

from dragoman import logs
from dragoman.engines.contract import as_engine
from dragoman.engines.protocol import Engine
from dragoman.errors import Unavailable
from dragoman.http.app import App
from dragoman.http.connection.limiter import CountedConnection
from dragoman.http.connection.protocol import StrictProtocol
from dragoman.http.connection.tls import Certificate, TlsListener
from dragoman.http.connection.uvicorn_internals import Config, Server, pass_on
from dragoman.http.keys import check_closed, is_open
from dragoman.http.listeners import UNIX, UnixName, address_of, open_listeners
from dragoman.http.upkeep import GcController, MemoryTrimmer, keep_less
from dragoman.models import ModelPool
from dragoman.settings import Settings, change_settings

logger = logging.getLogger("dragoman.http")

Engines: TypeAlias = Engine | Mapping[str, Engine] | ModelPool
STOPPING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
ACCEPTED_AT_ONCE = 16
"""Connections accepted in one turn of the event loop. The loop accepts one per listener, so each socket is
duplicated this many times: otherwise a new connection waits a turn for each one before it."""


def serve(
    engine: Engines,
    settings: Settings | None = None,
    *,
    template: str | None = None,
    on_ready: Callable[[str], None] | None = None,
    on_listen: Callable[[str], None] | None = None,
    owns_process: bool = False,
    **changes: Any,
) -> None:
    """Serve until a signal: `serve(engine, port=9000, api_key=["secret"])`.

    `engine` is an Engine, or an object with `generate_request`; a mapping serves several by their names.
    `template` is a chat template to use instead of the model's, like the setting `chat_template`: a file, a
    name or its text. `on_ready` is called with the address once requests are served; without it, the address
    is printed. `on_listen` is called with it earlier, if the first model is still to be loaded. With
    `owns_process` the third signal ends the process in any case; otherwise `serve` then returns, and leaves
    behind what is stuck.
    """
    _log_safely()
    server, listener = _prepare(engine, settings, template, on_ready, changes)
    server.on_listen = on_listen
    server.third_ends_process = owns_process
    server.garbage = GcController()
    try:
        server.run(sockets=[listener])
    finally:
        server.garbage.end()
    _check_started(server)


async def aserve(
    engine: Engines,
    settings: Settings | None = None,
    *,
    template: str | None = None,
    on_ready: Callable[[str], None] | None = None,
    **changes: Any,
) -> None:
    """Run `serve` inside an event loop that already runs.

    The signal is for the whole program: when the server has stopped, it is forwarded to the program.
    """
    _log_safely()
    server, listener = _prepare(engine, settings, template, on_ready, changes)
    server.passes_signals_on = True
    await server.serve(sockets=[listener])
    _check_started(server)


def serve_oai(
    engine: Any,
    host: str = "127.0.0.1",
    port: int = 8000,
    chat_template: str | None = None,
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
    **more: Any,
) -> None:
    """Serve an Engine, or an object with `generate_request`, until a signal.

    Without names of parsers, the dialect is detected from the chat template, and without a template that of
    the tokenizer is used. Pass what the engine does not expose: `tokenizer` (Hugging Face's, a Tokenizer, or
    a folder), `max_model_len`, `special_tokens` by the names that the template uses, `model_name`. Without a
    tokenizer it is served as text, with no length limit but the engine's own. All other arguments are
    settings, or those of `serve`.
    """
    described = _described(engine, more)
    more.update(tool_call_parser=tool_parser, reasoning_parser=reasoning_parser)
    serve(described, template=chat_template, host=host, port=port, **more)


async def aserve_oai(
    engine: Any,
    host: str = "127.0.0.1",
    port: int = 8000,
    chat_template: str | None = None,
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
    **more: Any,
) -> None:
    """Run `serve_oai` inside an event loop that already runs, like `aserve` runs `serve`."""
    described = _described(engine, more)
    more.update(tool_call_parser=tool_parser, reasoning_parser=reasoning_parser)
    await aserve(described, template=chat_template, host=host, port=port, **more)


def _described(engine: Any, more: dict[str, Any]) -> Engine:
    """Return the engine with its description, which is removed from the other arguments."""
    names = ("tokenizer", "max_model_len", "special_tokens", "model_name")
    return as_engine(engine, **{name: more.pop(name, None) for name in names})


@contextmanager
def background(
    engine: Engines, settings: Settings | None = None, *, template: str | None = None, **changes: Any
) -> Iterator[str]:
    """Serve in a thread while the block runs; yields the address, by default with a free port."""
    with run_in_thread(engine, settings, template=template, **changes) as server:
        yield server.address


@contextmanager
def run_in_thread(
    engine: Engines, settings: Settings | None = None, *, template: str | None = None, **changes: Any
) -> Iterator["_UvicornServer"]:
    """Serve like `background`, and yield the server."""
    ready = threading.Event()
    settings = settings or Settings(port=0)
    server, listener = _prepare(engine, settings, template, lambda _: ready.set(), changes)
    thread = threading.Thread(
        target=server.run, name="dragoman-serve", kwargs={"sockets": [listener]}, daemon=True
    )
    thread.start()
    try:
        while not ready.wait(0.05):
            if not thread.is_alive():
                _check_started(server)
        yield server
    finally:
        server.should_exit = True
        _joined(thread, server)
        listener.close()


def _joined(thread: threading.Thread, server: "_UvicornServer") -> None:
    """Wait for a server's thread. Ctrl-C ends the grace period, not the wait."""
    interrupted = None
    while thread.is_alive():
        try:
            thread.join()
        except KeyboardInterrupt as error:
            interrupted = error
            server.hurries = True
    if interrupted is not None:
        raise interrupted


def _prepare(
    engine: Engines,
    settings: Settings | None,
    template: str | None,
    on_ready: Callable[[str], None] | None,
    changes: dict[str, Any],
) -> tuple["_UvicornServer", socket.socket]:
    chosen = change_settings(settings or Settings(), changes)
    check_closed(chosen)
    if is_open(chosen):
        logger.warning(
            "No API key is set: anyone who can reach %s has access, and sees what others store", chosen.host
        )
    keep_less()
    tls = None if chosen.tls_cert is None else Certificate(chosen.tls_cert, chosen.tls_key)
    with ExitStack() as doors:
        listener, *others = [doors.enter_context(each) for each in open_listeners(chosen)]
        name = UnixName(listener)
        doors.callback(name.remove)
        server = _UvicornServer(App(engine, chosen, template=template), listener, on_ready, others, tls)
        doors.pop_all()
    server.name = name
    return server, listener


def _log_safely() -> None:
    """Set up logging if there is none: Python's default would print foreign exceptions with data from
    clients."""
    if not logger.hasHandlers():
        logs.setup("warning", json=False)


def _check_started(server: "_UvicornServer") -> None:
    if server.failure is not None:
        raise server.failure
    if not server.started:
        raise Unavailable("The engine did not start; see the log.")


class _UvicornServer(Server):
    """On a signal it rejects new requests, lets active ones finish, and then closes its listeners."""

    def __init__(
        self,
        app: App,
        listener: socket.socket,
        on_ready: Callable[[str], None] | None,
        others: Sequence[socket.socket] = (),
        certificate: Certificate | None = None,
    ) -> None:
        config = Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=1,  # the grace period is over by then
            timeout_keep_alive=app.settings.idle_timeout,  # type: ignore[arg-type]
            http=StrictProtocol,
            lifespan="on",
            ws="none",  # `StrictProtocol` handles upgrades
            callback_notify=self._notified,
            timeout_notify=1,
        )
        super().__init__(config)
        self.garbage: GcController | None = None
        self._spare = MemoryTrimmer()
        """Only for a server that owns the process."""
        self.app = app
        self.hurries = False
        """Whether the grace period is cut short."""
        self.passes_signals_on = False
        self.third_ends_process = False
        self._grace = app.settings.shutdown_grace
        self.address = address_of(listener, app.settings)
        self.name: UnixName | None = None
        self._certificate = certificate
        self._tls_doors: list[TlsListener] = []
        self.failure: Exception | None = None
        """Why the first model could not be loaded."""
        self.on_listen: Callable[[str], None] | None = None
        self._on_ready = on_ready or self._print_place
        self._waiting: asyncio.Task[None] | None = None
        """Task that waits for the first model."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listeners = [listener, *others]
        self._doors: list[socket.socket] = []
        self._others: ForeignSignalHandlers | None = None
        """Handlers that other code installs for the server's signals."""

    async def call_in_loop(self, work: Callable[..., Any], *args: Any) -> Any:
        """Call or await something in the server's event loop, from the loop of another thread."""

        async def called() -> Any:
            result = work(*args)
            return await result if isawaitable(result) else result

        if self._loop is None:
            raise Unavailable("The server has not started; retry soon.")
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(called(), self._loop))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        if self._certificate is None:
            self._doors = [each.dup() for each in self._listeners for _ in range(ACCEPTED_AT_ONCE)]
        try:
            await super().startup(self._doors)
        except SystemExit:
            # The loop may belong to the caller's program: the caller of the server reports that it did not
            # start.
            self.should_exit = True
        finally:
            if not self.started:
                for door in self._doors:
                    door.close()
        if self.started and self._certificate is not None:
            self._open_tls(self._certificate)
        pool = self.app.host.pool
        # Loading may have failed already, which is reported like any other failure.
        if self.started and pool.startup_model is None and pool.fatal is None:
            self._begin()
        elif self.started:
            self._waiting = asyncio.create_task(self._wait_for_first())

    def _begin(self) -> None:
        if self.garbage is not None:
            self.garbage.begin()
            self.app.host.pool.after_unload = self.garbage.renew
        asyncio.get_running_loop().call_soon(self._on_ready, self.address)

    async def _wait_for_first(self) -> None:
        """Wait for the first model; the port is open meanwhile. If it cannot be loaded, the server ends."""
        if self.on_listen is not None:
            self.on_listen(self.address)
        try:
            await self.app.host.pool.ready()
        except Exception as error:
            self.failure, self.should_exit = error, True
        else:
            self._begin()

    def _open_tls(self, certificate: Certificate) -> None:
        app = self.app

        def make(counted: CountedConnection) -> StrictProtocol:
            protocol = StrictProtocol(self.config, self.server_state, self.lifespan.state)
            protocol.counted = counted
            return protocol

        rest = app.host.connections, make, app.settings.header_timeout
        self._tls_doors = [TlsListener(each.dup(), certificate, *rest) for each in self._listeners]

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Also stop when the terminal is closed. The server's handler runs first, even if others are
        installed later."""
        with super().capture_signals(), _on_hangup(self.handle_exit):
            self._others = ForeignSignalHandlers(self.handle_exit, asyncio.get_running_loop())
            with self._others.told_later():
                yield

    async def on_tick(self, counter: int) -> bool:
        if self._others is not None:
            self._others.take_back()
        return await super().on_tick(counter)

    def _print_place(self, url: str) -> None:
        root = self.app.settings.root_path
        param = url if url.startswith(UNIX) else f"{url}{root}/v1, see {url}{root}/docs"
        sys.stdout.write(f"dragoman serves {self.app.host.pool.default.name} at {param}\n")
        sys.stdout.flush()

    async def _notified(self) -> None:
        if self.garbage is not None:
            host = self.app.host
            self.garbage.collect(quiet=not host.bodies.used_bytes and not host.frame_scheduler.busy)
            await self._spare.give_back()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin the shutdown on the first signal, end the grace period on the second, everything else on the
        third."""
        if self.hurries and self.third_ends_process:
            # The default action, as without a handler.
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
        self.force_exit = self.hurries
        self.hurries = self.should_exit
        if self.passes_signals_on:
            pass_on(self, sig)
        if self._others is not None:
            self._others.came.add(sig)
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        admission = self.app.host.admission
        admission.draining = True
        if self._waiting is not None:
            self._waiting.cancel()
        if admission.active_count:
            logger.info("Stopping: %d requests have %d s to finish", admission.active_count, self._grace)
        deadline = time.monotonic() + self._grace
        while admission.active_count and not self.hurries and time.monotonic() < deadline:
            # Polled, as in uvicorn: a signal does not wake the event loop.
            if self._others is not None:
                self._others.take_back()
            await admission.wait_empty(min(0.1, max(deadline - time.monotonic(), 0)))
        await admission.cancel_all()
        for connection in list(self.server_state.connections):
            if connection.transport.get_write_buffer_size():
                # The client does not read, and would keep the server from stopping.
                connection.transport.abort()
        for door in self._tls_doors:
            door.close()
        if self.name is not None:
            self.name.remove()
        await super().shutdown([*self._doors, *self._listeners[1:], *(sockets or [])])
        if self._others is not None:
            self._others.tell()


class ForeignSignalHandlers:
    """Handlers that other code installs for the server's signals; they are called after the server has
    stopped.

    Some engines install them with their first request (SGLang and tokenspeed, with the event loop's
    `add_signal_handler`), and without this class no signal would stop the server any more.
    """

    def __init__(
        self, ours: Callable[[int, FrameType | None], None], loop: asyncio.AbstractEventLoop
    ) -> None:
        self.came: set[int] = set()
        """The signals that were received."""
        self._ours = ours
        self._loop = loop
        # Empty if the server is not in the main thread, and handles no signals.
        self._taken = frozenset(number for number in STOPPING if signal.getsignal(number) == ours)
        self._theirs: dict[int, Callable[[], object]] = {}

    @contextmanager
    def told_later(self) -> Iterator[None]:
        add, remove = self._loop.add_signal_handler, self._loop.remove_signal_handler

        def added(sig: int, callback: Callable[..., object], *args: Any) -> None:
            if sig in self._taken:
                self._theirs[sig] = partial(callback, *args)
            else:
                add(sig, callback, *args)

        def removed(sig: int) -> bool:
            return self._theirs.pop(sig, None) is not None if sig in self._taken else remove(sig)

        own = vars(self._loop)
        own.update(add_signal_handler=added, remove_signal_handler=removed)
        try:
            yield
        finally:
            del own["add_signal_handler"], own["remove_signal_handler"]

    def take_back(self) -> None:
        """Restore our handlers, if others were installed without the event loop; a microsecond, so it is done
        each tick."""
        for number in self._taken:
            handler = signal.getsignal(number)
            if handler != self._ours:
                signal.signal(number, self._ours)
                if callable(handler) and handler is not signal.default_int_handler:
                    self._theirs[number] = partial(handler, number, None)

    def tell(self) -> None:
        for number in sorted(self.came & self._theirs.keys()):
            try:
                self._theirs.pop(number)()
            except Exception:
                logger.exception("Handler of signal %d failed after the server stopped", number)


@contextmanager
def _on_hangup(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle SIGHUP as uvicorn handles its signals, unless `nohup` has the process ignore it."""
    number = getattr(signal, "SIGHUP", None)
    in_main = threading.current_thread() is threading.main_thread()
    if number is None or not in_main or signal.getsignal(number) is signal.SIG_IGN:
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)
