"""Serve a model over the OpenAI API. Without a file a small model is downloaded once and cached."""

import argparse
import asyncio
import logging
import os
import sys
import threading
from importlib import import_module
from typing import TYPE_CHECKING

from dragoman import logs
from dragoman._version import __version__
from dragoman.cli.address import can_listen, host_in_url, next_free, own_key, own_url
from dragoman.cli.exits import CommandError, stopped_by_signals
from dragoman.cli.parser import (
    add_model_argument,
    add_settings,
    model_settings,
    positive,
    stray_variables,
)
from dragoman.settings import Settings

if TYPE_CHECKING:
    from dragoman.models import ModelPool

logger = logging.getLogger("dragoman.cli")

PROGRESS_S = 0.2
SUMMARY = "serve a model over the OpenAI API"
EXAMPLE = """\
examples:
  dragoman serve
  dragoman serve model.gguf --port 9000 --slots 8 --context 4096
  DRAGOMAN_API_KEY=secret dragoman serve --host 0.0.0.0 --log-json

Flags override the environment, which overrides the file (dragoman.toml: `port = 9000`, and the limits without
their prefix under [limits]). Set keys in the environment: other users of the machine can see flags.
"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.usage = "dragoman serve [MODEL] [flags]"
    add_model_argument(parser)
    parser.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="serve on this Ray cluster; local starts one (needs `dragoman[ray]`)",
    )
    parser.add_argument(
        "--replicas", metavar="N", type=positive, default=1, help="processes that serve the model, with --ray"
    )
    add_settings(parser)


def run(args: argparse.Namespace) -> int:
    with stopped_by_signals(last=args.owns_process):
        return _serve(args)


def _serve(args: argparse.Namespace) -> int:
    settings = model_settings(args)
    if settings.log_json and args.owns_process:
        logs.stdio_as_json()
    logs.setup(settings.log_level, settings.log_json)
    for sentence in stray_variables(os.environ):
        logger.warning(sentence)
    # Check before downloading and loading the weights, so that errors show at once.
    for host in map(str.strip, settings.host.split(",")):
        if settings.uds is None and not settings.reuse_port:
            check_port(host, settings.port)
        if settings.ollama_port is not None:
            check_port(host, settings.ollama_port, "--ollama-port")

    from dragoman.api.shared_fields import read_presets
    from dragoman.cli.engine import make_served_engine
    from dragoman.http.connection.tls import Certificate
    from dragoman.http.keys import check_closed
    from dragoman.http.server import serve
    from dragoman.http.upkeep import keep_less
    from dragoman.models.catalog import build_pool
    from dragoman.prompt.builtin_templates import check_template
    from dragoman.prompt.find import check_names
    from dragoman.store import check_folder
    from dragoman.tracing import check_tracing

    check_closed(settings)
    check_tracing(settings)
    if settings.tls_cert is not None:
        Certificate(settings.tls_cert, settings.tls_key)
    check_folder(settings)
    check_names(settings)
    read_presets(settings)
    check_template(settings.chat_template)
    if args.ray is not None:
        return _serve_on_ray(settings, args.ray, args.replicas)
    keep_less()
    pool = build_pool(settings, make_served_engine)
    greeter = _StartupReporter(pool, settings)
    serve(
        pool,
        settings,
        on_ready=greeter.greet,
        on_listen=greeter.announce,
        owns_process=args.owns_process,
    )
    return 0


def _serve_on_ray(settings: Settings, address: str, replicas: int) -> int:
    # Ray Serve's fast proxy is off by default; an existing value of the variable wins.
    os.environ.setdefault("RAY_SERVE_ENABLE_HA_PROXY", "1")
    if address == "local":
        # No load balancer in front of the local proxy needs time to notice that it stops.
        os.environ.setdefault("RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S", "0.1")
    try:
        on_ray = import_module("dragoman.ray.deployments")
    except ModuleNotFoundError as error:
        raise CommandError(
            "--ray needs Ray Serve, which is not installed.", "pip install 'dragoman[ray]'"
        ) from error
    name = own_url(settings, settings.port)

    def greet() -> None:
        print(f"dragoman {__version__} serves {replicas} replicas on Ray at {name}/v1", flush=True)

    def wait() -> None:
        # Ray has replaced the signal handlers meanwhile.
        with stopped_by_signals():
            threading.Event().wait()

    on_ray.serve_on_ray(settings, address, replicas, greet, wait)
    return 0


class _StartupReporter:
    """Prints the URL, the progress of loading the first model, and the banner."""

    def __init__(self, pool: "ModelPool", settings: Settings) -> None:
        self._pool = pool
        self._settings = settings
        self._timer: asyncio.TimerHandle | None = None
        self._shown = False

    def announce(self, url: str) -> None:
        from dragoman.cli.model_info import announcement

        if self._settings.log_json:
            return
        first = self._pool.startup_model
        print(announcement(self._place(url), first.name if first else ""), flush=True)
        self._show()

    def _show(self) -> None:
        """Update the progress line, if stderr is a terminal."""
        first = self._pool.startup_model
        if first is None or not sys.stderr.isatty():
            return
        if first.progress:
            self._shown = True
            sys.stderr.write(f"\r  loading {first.name}: {first.progress:4.0%}")
            sys.stderr.flush()
        self._timer = asyncio.get_running_loop().call_later(PROGRESS_S, self._show)

    def greet(self, url: str) -> None:
        from dragoman.cli.model_info import banner, list_of_models

        if self._timer is not None:
            self._timer.cancel()
        if self._shown:
            sys.stderr.write("\r\x1b[K")
        paint, name = logs.Colorizer(sys.stdout), self._place(url)
        served = next((model for model in self._pool.served if model.loaded is not None), None)
        if served is None or served.loaded is None:
            print(list_of_models(list(self._pool.models), self._settings, name, paint), flush=True)
            return
        if self._settings.log_json:
            api = name if self._settings.uds else f"{name}/v1"
            print(f"dragoman {__version__} serves {served.name} at {api}", flush=True)
            return
        found_dialect = served.loaded.model.detected_dialect
        dialect = f"{found_dialect.dialect.name} · {found_dialect.how}"
        print(banner(served.loaded.card, self._settings, name, paint, dialect), flush=True)
        if len(self._pool.models) > 1:
            print(f"{len(self._pool.models) - 1} more models: see {name}/v1/models\n", flush=True)

    def _place(self, url: str) -> str:
        settings = self._settings
        return own_url(settings, None if settings.uds else int(url.rpartition(":")[2]))


def check_port(host: str, port: int, flag: str = "--port") -> None:
    """Raise an error with a remedy if the server could not listen there."""
    try:
        if port == 0 or can_listen(host, port):
            return
        other = next_free(host, port)
    except PermissionError as error:
        hint = f"Ports below 1024 need root; try {flag} 8000."
        raise CommandError(f"No permission to use port {port}.", hint) from error
    except OSError as error:
        raise CommandError(
            f"{host} is not an address of this machine.", "--host 127.0.0.1 always works."
        ) from error
    hint = f"Port {other} is free: {flag} {other}." if other else f"{flag} 0 takes any free port."
    raise CommandError(f"Port {port} on {host} is in use{_by_whom(host, port)}.", hint)


def _by_whom(host: str, port: int) -> str:
    from dragoman.cli.address import is_dragoman

    return " by another dragoman" if is_dragoman(f"http://{host_in_url(host)}:{port}", own_key()) else ""
