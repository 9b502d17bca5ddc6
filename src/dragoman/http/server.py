"""Serving an app on a socket, with uvicorn."""

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
from dragoman.engines.protocol import Engine
from dragoman.engines.sound import as_engine
from dragoman.errors import Unavailable
from dragoman.http.app import App
from dragoman.http.connection.limiter import CountedConnection
from dragoman.http.connection.protocol import StrictProtocol
from dragoman.http.connection.tls import Certificate, TlsDoor
from dragoman.http.connection.uvicorn_parts import Config, Server, pass_on
from dragoman.http.keys import check_closed, is_open
from dragoman.http.listen import UNIX, UnixName, address_of, open_listeners
from dragoman.http.upkeep import Garbage, SpareMemory, keep_less
from dragoman.models import ModelPool
from dragoman.settings import Settings, change_settings

logger = logging.getLogger("dragoman.http")

Engines: TypeAlias = Engine | Mapping[str, Engine] | ModelPool
STOPPING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
ACCEPTED_AT_ONCE = 16
"""Connections that are taken in one turn of the event loop. It takes one of each listener, so the socket is
there so many times: otherwise whoever connects waits as many turns as others came before."""


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
    """Serves until a signal says stop, and returns: `serve(engine, port=9000, api_key=["secret"])`.

    `engine` is an Engine, or an object with `generate_request`; several are served by the names that a
    mapping has for them. `template` is a chat template to use instead of the model's, as `chat_template` is
    among the settings: a file, a name or its text. `on_ready` gets the address once requests are answered;
    without it, the address is printed. `on_listen` gets it before, when the first model is yet to be loaded.
    With `owns_process` the third signal ends the process, whatever it does; else `serve` returns then, and
    what is stuck is left behind.
    """
    _log_safely()
    server, listener = _prepare(engine, settings, template, on_ready, changes)
    server.on_listen = on_listen
    server.third_ends_process = owns_process
    server.garbage = Garbage()
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
    """`serve` inside an event loop that already runs.

    The signal was meant for the whole program: when the server has stopped, the program gets it too.
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
    """Serves an Engine, or an object with `generate_request`, until a signal says stop.

    Without names of parsers the dialect is read off the chat template, and without a template that of the
    tokenizer is used. What the engine does not show of itself is given: `tokenizer` (one of Hugging Face, a
    Tokenizer, or a folder), `max_model_len`, `special_tokens` by the names that the template has for them,
    `model_name`. Without any tokenizer it is served in text, without a length up to the engine's own. All
    other arguments are settings, or those of `serve`.
    """
    made = _described(engine, more)
    more.update(tool_call_parser=tool_parser, reasoning_parser=reasoning_parser)
    serve(made, template=chat_template, host=host, port=port, **more)


async def aserve_oai(
    engine: Any,
    host: str = "127.0.0.1",
    port: int = 8000,
    chat_template: str | None = None,
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
    **more: Any,
) -> None:
    """`serve_oai` inside an event loop that already runs, as `aserve` is `serve`."""
    made = _described(engine, more)
    more.update(tool_call_parser=tool_parser, reasoning_parser=reasoning_parser)
    await aserve(made, template=chat_template, host=host, port=port, **more)


def _described(engine: Any, more: dict[str, Any]) -> Engine:
    """The engine, with what is said of it; that is taken out of the other arguments."""
    names = ("tokenizer", "max_model_len", "special_tokens", "model_name")
    return as_engine(engine, **{name: more.pop(name, None) for name in names})


@contextmanager
def background(
    engine: Engines, settings: Settings | None = None, *, template: str | None = None, **changes: Any
) -> Iterator[str]:
    """Serves in a thread of its own while the block runs, and gives the address: a free port by default."""
    with run_in_thread(engine, settings, template=template, **changes) as server:
        yield server.address


@contextmanager
def run_in_thread(
    engine: Engines, settings: Settings | None = None, *, template: str | None = None, **changes: Any
) -> Iterator["_Server"]:
    """`background`, for those who want to see more of it than the address."""
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


def _joined(thread: threading.Thread, server: "_Server") -> None:
    """Waits for a server's thread. Ctrl-C does away with the grace, not with the wait."""
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
) -> tuple["_Server", socket.socket]:
    chosen = change_settings(settings or Settings(), changes)
    check_closed(chosen)
    if is_open(chosen):
        logger.warning("Everybody who reaches %s may ask, and sees what all others store", chosen.host)
    keep_less()
    tls = None if chosen.tls_cert is None else Certificate(chosen.tls_cert, chosen.tls_key)
    with ExitStack() as doors:
        listener, *others = [doors.enter_context(each) for each in open_listeners(chosen)]
        name = UnixName(listener)
        doors.callback(name.remove)
        server = _Server(App(engine, chosen, template=template), listener, on_ready, others, tls)
        doors.pop_all()
    server.name = name
    return server, listener


def _log_safely() -> None:
    """Without a handler Python prints foreign exceptions as they are, with what clients sent."""
    if not logger.hasHandlers():
        logs.setup("warning", json=False)


def _check_started(server: "_Server") -> None:
    if server.failure is not None:
        raise server.failure
    if not server.started:
        raise Unavailable("The engine did not start; the log says why.")


class _Server(Server):
    """On a signal it refuses new work, lets what runs come to its end, and only then closes its doors."""

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
            timeout_graceful_shutdown=1,  # the grace is over by then
            timeout_keep_alive=app.settings.idle_timeout,  # type: ignore[arg-type]
            http=StrictProtocol,
            lifespan="on",
            ws="none",  # upgrades are our protocol's own
            callback_notify=self._notified,
            timeout_notify=1,
        )
        super().__init__(config)
        self.garbage: Garbage | None = None
        self._spare = SpareMemory()
        """Only of a server that has the process for itself."""
        self.app = app
        self.hurries = False
        """There is no grace any more."""
        self.passes_signals_on = False
        self.third_ends_process = False
        self._grace = app.settings.shutdown_grace
        self.address = address_of(listener, app.settings)
        self.name: UnixName | None = None
        self._certificate = certificate
        self._tls_doors: list[TlsDoor] = []
        self.failure: Exception | None = None
        """Why the first model could not be loaded."""
        self.on_listen: Callable[[str], None] | None = None
        self._on_ready = on_ready or self._print_place
        self._waiting: asyncio.Task[None] | None = None
        """For the first model."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listeners = [listener, *others]
        self._doors: list[socket.socket] = []
        self._others: OtherHandlers | None = None
        """Who else wants the signals that the server takes."""

    async def do(self, work: Callable[..., Any], *args: Any) -> Any:
        """Has something called, or awaited, in the event loop of the server, from that of another thread."""

        async def called() -> Any:
            made = work(*args)
            return await made if isawaitable(made) else made

        if self._loop is None:
            raise Unavailable("The server has not started.")
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(called(), self._loop))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        if self._certificate is None:
            self._doors = [each.dup() for each in self._listeners for _ in range(ACCEPTED_AT_ONCE)]
        try:
            await super().startup(self._doors)
        except SystemExit:
            # Not for a loop that may be somebody else's: whoever serves says that it did not start.
            self.should_exit = True
        finally:
            if not self.started:
                for door in self._doors:
                    door.close()
        if self.started and self._certificate is not None:
            self._open_tls(self._certificate)
        pool = self.app.host.pool
        # Loading may have failed already, which is told like any other failure.
        if self.started and pool.first is None and pool.fatal is None:
            self._begin()
        elif self.started:
            self._waiting = asyncio.create_task(self._wait_for_first())

    def _begin(self) -> None:
        if self.garbage is not None:
            self.garbage.begin()
            self.app.host.pool.after_unload = self.garbage.renew
        asyncio.get_running_loop().call_soon(self._on_ready, self.address)

    async def _wait_for_first(self) -> None:
        """The port answers meanwhile. What cannot be loaded ends the server, if there is nothing else."""
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
        self._tls_doors = [TlsDoor(each.dup(), certificate, *rest) for each in self._listeners]

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """A terminal that is closed says stop as well. Ours is asked first, whoever takes a signal later."""
        with super().capture_signals(), _on_hangup(self.handle_exit):
            self._others = OtherHandlers(self.handle_exit, asyncio.get_running_loop())
            with self._others.told_later():
                yield

    async def on_tick(self, counter: int) -> bool:
        if self._others is not None:
            self._others.take_back()
        return await super().on_tick(counter)

    def _print_place(self, url: str) -> None:
        root = self.app.settings.root_path
        place = url if url.startswith(UNIX) else f"{url}{root}/v1, see {url}{root}/docs"
        sys.stdout.write(f"dragoman serves {self.app.host.pool.default.name} at {place}\n")
        sys.stdout.flush()

    async def _notified(self) -> None:
        if self.garbage is not None:
            host = self.app.host
            self.garbage.collect(quiet=not host.bodies.held and not host.turnstile.busy)
            await self._spare.give_back()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal begins the end, the second does away with the grace, the third with all else."""
        if self.hurries and self.third_ends_process:
            # As it would have without anybody who takes signals.
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
        if admission.inside:
            logger.info("Stopping: %d requests have %d seconds to end", admission.inside, self._grace)
        deadline = time.monotonic() + self._grace
        while admission.inside and not self.hurries and time.monotonic() < deadline:
            # Again and again, as uvicorn does: a signal does not wake the event loop.
            if self._others is not None:
                self._others.take_back()
            await admission.emptied(min(0.1, max(deadline - time.monotonic(), 0)))
        await admission.end_all()
        for connection in list(self.server_state.connections):
            if connection.transport.get_write_buffer_size():
                # Its client does not take what it is sent, and would keep the server from ending.
                connection.transport.abort()
        for door in self._tls_doors:
            door.close()
        if self.name is not None:
            self.name.remove()
        await super().shutdown([*self._doors, *self._listeners[1:], *(sockets or [])])
        if self._others is not None:
            self._others.tell()


class OtherHandlers:
    """Handlers that others install for our signals while the server runs: they are told when it has stopped.

    Engines do that with their first request (SGLang's and tokenspeed's by `add_signal_handler` of the event
    loop), and from then on nobody would end the server.
    """

    def __init__(
        self, ours: Callable[[int, FrameType | None], None], loop: asyncio.AbstractEventLoop
    ) -> None:
        self.came: set[int] = set()
        """The signals that there were."""
        self._ours = ours
        self._loop = loop
        # Empty where the server is not in the main thread, and has taken none.
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
        """What was installed past the event loop. It costs a microsecond, so it is done again and again."""
        for number in self._taken:
            found = signal.getsignal(number)
            if found != self._ours:
                signal.signal(number, self._ours)
                if callable(found) and found is not signal.default_int_handler:
                    self._theirs[number] = partial(found, number, None)

    def tell(self) -> None:
        for number in sorted(self.came & self._theirs.keys()):
            try:
                self._theirs.pop(number)()
            except Exception:
                logger.exception("A handler of signal %d failed that was told after the server's", number)


@contextmanager
def _on_hangup(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """As uvicorn does with its signals. `nohup` has this one ignored, and that is respected."""
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
