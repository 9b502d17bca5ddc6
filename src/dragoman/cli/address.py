"""URLs and keys of servers, detection of a running dragoman, and free ports."""

import errno
import os
import socket
from typing import TYPE_CHECKING, Any

from dragoman.cli.exits import CommandError

if TYPE_CHECKING:
    from dragoman.client import Client
    from dragoman.settings import Settings

POLL_INTERVAL_S = 1.0


def own_key() -> str | None:
    """Return the first API key of the environment, which a server started in it would accept."""
    return os.environ.get("DRAGOMAN_API_KEY", "").split(",")[0].strip() or None


def key_of(text: str | None) -> str | None:
    """Return the key for the server at `--url`: the flag's, else DRAGOMAN_API_KEY, else OPENAI_API_KEY."""
    return text or own_key() or os.environ.get("OPENAI_API_KEY") or None


def host_in_url(host: str) -> str:
    """Format a host for a URL: `host_in_url("::1")` is `[::1]`; wildcard addresses become loopback."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


def own_url(settings: "Settings", port: int | None = None) -> str:
    """Return the URL at which clients on this machine reach a server with these settings."""
    if settings.uds is not None:
        return f"unix:{settings.uds}"
    scheme = "http" if settings.tls_cert is None else "https"
    host = host_in_url(settings.host.partition(",")[0].strip())
    return f"{scheme}://{host}:{settings.port if port is None else port}{settings.root_path}"


def can_listen(host: str, port: int) -> bool:
    """Whether the port is free. Raises OSError if the address itself is not valid."""
    family, kind, proto, _, position = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, proto) as trial:
        # A port whose last connections are still closing counts as free, as it does for the server.
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(position)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return False
    return True


def next_free(host: str, port: int) -> int | None:
    """Return the first free port of the 99 after `port`."""
    return next((other for other in range(port + 1, min(port + 100, 65536)) if can_listen(host, other)), None)


def first_model(client: "Client") -> dict[str, Any]:
    models = client.models()
    if not models:
        raise CommandError(f"The server at {client.url} has no model.")
    return models[0]


def is_dragoman(url: str, key: str | None = None) -> bool:
    """Whether a dragoman answers at the URL; a quick check that never raises."""
    return bool(own_models(url, key))


def own_models(url: str, key: str | None = None) -> list[dict[str, Any]]:
    """Return the models of the dragoman at the URL, or none."""
    from dragoman.client import AddressError, Client, ClientError, Timeouts

    look = Timeouts(connect=POLL_INTERVAL_S, read=POLL_INTERVAL_S)
    try:
        with Client(url, key, timeouts=look, retries=0) as client:
            return [model for model in client.models() if model.get("owned_by") == "dragoman"]
    except (ClientError, AddressError):
        return []
