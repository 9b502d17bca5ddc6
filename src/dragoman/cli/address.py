"""Where a server is and which key it wants; how to find a port."""

import errno
import os
import socket
from urllib.parse import urlsplit

from dragoman.cli.problems import USAGE, CommandError


def root_of(url: str) -> str:
    """`root_of("localhost:8000/v1/")` is `http://localhost:8000`."""
    root = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
    try:
        parts = urlsplit(root)
        # Reading the port is what checks it.
        right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        right = False
    if not right:
        raise CommandError(f"{url} is not a URL.", "It looks like http://127.0.0.1:8000.", exit_code=USAGE)
    return root


def own_key() -> str | None:
    """The first key of a server that is set up by this environment."""
    return os.environ.get("DRAGOMAN_API_KEY", "").split(",")[0].strip() or None


def key_of(given: str | None) -> str | None:
    """The key for a server that a person named: the flag's, else our own, else OpenAI's."""
    return given or own_key() or os.environ.get("OPENAI_API_KEY") or None


def headers_of(key: str | None) -> dict[str, str]:
    if key is None:
        return {}
    if not (key.isascii() and key.isprintable()):
        raise CommandError("The key has characters that no HTTP header can hold.", exit_code=USAGE)
    return {"Authorization": f"Bearer {key}"}


def host_in_url(host: str) -> str:
    """`host_in_url("::1")` is `[::1]`; "all addresses" is reached through the loopback."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


def can_listen(host: str, port: int) -> bool:
    """Whether the port is free. Raises OSError where the address itself is wrong."""
    family, kind, proto, _, place = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, proto) as trial:
        # A port whose last connections are still winding down counts as free, as it does for the server.
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(place)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return False
    return True


def next_free(host: str, port: int) -> int | None:
    """The first free port above `port`, within reason."""
    return next((other for other in range(port + 1, min(port + 100, 65536)) if can_listen(host, other)), None)
