"""Access control: Host and Origin of a request, forwarded headers, and API keys.

A web page in a browser can send requests to any server on its machine, by its address or by a host name of
the page's own that resolves there. Two headers that no page can change reveal it: Host and Origin.
"""

import ipaddress
import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from starlette.types import Scope

from dragoman.errors import BadRequest, Forbidden, SettingsError, Unauthorized
from dragoman.http.key_file import (
    ANONYMOUS,
    ApiKey,
    check_key,
    describe_key,
    hash_key,
    is_described,
    read_key_file,
    read_key_lines,
)
from dragoman.settings import Settings

logger = logging.getLogger("dragoman.http")

# Host and Origin.


_AUTHORITY = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{1,5})?")
_HEADER_NAMES = re.compile(rb"[A-Za-z0-9, _-]{1,2048}")
_OWN_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]", "0.0.0.0", "[::]"})
"""Names of this machine. Many examples use the last two, and systems treat them as this machine. A remote
page can make a name of its own resolve here, but not an address."""
_ONCE = (b"host", b"origin", b"authorization", b"x-api-key", b"content-type", b"content-encoding")
"""Headers that must not occur twice, because a proxy may have checked the other one."""
ANY = "*"


class OriginPolicy:
    def __init__(self, settings: Settings) -> None:
        self._names = _OWN_NAMES | {name.lower() for name in settings.allow_host}
        self._by_name = is_for_this_machine(settings) and settings.uds is None and ANY not in self._names
        self._origins = frozenset(origin.lower().rstrip("/").encode() for origin in settings.cors_origin)
        self._any_origin = ANY.encode() in self._origins

    def check(self, scope: Scope, headers: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
        """Reject a wrong Host or Origin; return the CORS headers for the page, if any."""
        if len(headers) != len(scope["headers"]):
            _check_single(scope)
        host = headers.get(b"host")
        if host is not None or scope["http_version"] == "1.1":
            self._check_host(scope, host or b"")
        origin = headers.get(b"origin")
        if origin is None:
            return {b"vary": b"Origin"} if self._origins and not self._any_origin else {}
        return self._reply_to(origin.lower(), host or b"")

    def _check_host(self, scope: Scope, host: bytes) -> None:
        match = _AUTHORITY.fullmatch(host)
        if match is None:
            raise BadRequest("The Host header is not a valid host name.", code="invalid_host")
        if self._by_name and _came_by_loopback(scope):
            name = match[1].decode().lower().rstrip(".")
            if name not in self._names:
                raise Forbidden(
                    f"Host {name} is not allowed; start the server with --allow-host {name}.",
                    code="host_not_allowed",
                )

    def _reply_to(self, origin: bytes, host: bytes) -> dict[bytes, bytes]:
        listed = self._any_origin or origin in self._origins
        if not listed:
            if host and origin.partition(b"://")[2] == host.lower():
                return {}  # the server's own page
            raise Forbidden(
                "This origin is not allowed; start the server with --cors-origin to allow it.",
                code="origin_not_allowed",
            )
        # Keys are sent in a header that the page sets itself, so credentials (cookies) are never allowed.
        return {
            b"access-control-allow-origin": b"*" if self._any_origin else origin,
            b"access-control-expose-headers": b"x-request-id, traceresponse, x-dragoman-ignored, retry-after",
            **({} if self._any_origin else {b"vary": b"Origin"}),
        }


def preflight(method: str, headers: Mapping[bytes, bytes]) -> dict[bytes, bytes] | None:
    """Return the reply to a CORS preflight; None if the request is not one."""
    if method != "OPTIONS" or b"access-control-request-method" not in headers:
        return None
    wanted = headers.get(b"access-control-request-headers", b"")
    return {
        b"access-control-allow-methods": b"GET, POST, DELETE",
        b"access-control-max-age": b"600",
        **({b"access-control-allow-headers": wanted} if _HEADER_NAMES.fullmatch(wanted) else {}),
    }


def is_loopback(host: str) -> bool:
    """Return whether an address is reachable only from this machine; unknown names are not.

    >>> is_loopback("127.0.0.2"), is_loopback("::1"), is_loopback("0.0.0.0"), is_loopback("a.example")
    (True, True, False, False)
    """
    if host.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def hosts_of(settings: Settings) -> list[str]:
    """Return the hosts to listen on: `127.0.0.1, ::1` are two."""
    return [each.strip() for each in settings.host.split(",")]


def is_for_this_machine(settings: Settings) -> bool:
    """Return whether no other machine can reach the server."""
    return settings.uds is not None or all(map(is_loopback, hosts_of(settings)))


def is_private(settings: Settings) -> bool:
    """Return whether, as far as is known, only users of this machine can reach the server: a proxy forwards
    others."""
    by_proxy = settings.uds is not None or settings.forwarded_allow_ips or settings.root_path
    return is_for_this_machine(settings) and not by_proxy


is_known_here = lru_cache(maxsize=256)(is_loopback)
"""Cached, because it is called for each request."""


def _came_by_loopback(scope: Scope) -> bool:
    """Check the address of the connection: another ASGI server may listen elsewhere than the settings say."""
    server = scope.get("server")
    return server is not None and is_known_here(server[0])


def _check_single(scope: Scope) -> None:
    names = [name for name, _ in scope["headers"]]
    for name in _ONCE:
        if names.count(name) > 1:
            raise BadRequest(
                f"The request has the header {name.decode()} twice; send it once.", code="invalid_header"
            )


# Forwarded headers.


MOST_HOPS = 32
_FORWARDED_FOR = re.compile(r'(?i)(?:^|;)\s*for\s*=\s*"?([^";]*)')
_FORWARDED_PROTO = re.compile(r'(?i)(?:^|;)\s*proto\s*=\s*"?(https?)')


class ForwardedHeaders:
    """Client address and scheme from forwarded headers. Headers of untrusted peers are ignored."""

    def __init__(self, settings: Settings) -> None:
        self._any = ANY in settings.forwarded_allow_ips
        try:
            names = [each for each in settings.forwarded_allow_ips if each != ANY]
            self._networks = [ipaddress.ip_network(each, strict=False) for each in names]
        except ValueError as error:
            raise SettingsError(f"`forwarded_allow_ips`: {error}.", param="forwarded_allow_ips") from error

    def __bool__(self) -> bool:
        return self._any or bool(self._networks)

    def _trusts(self, host: str) -> bool:
        if self._any:
            return True
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        address = getattr(address, "ipv4_mapped", None) or address
        return any(address in network for network in self._networks)

    def apply(self, scope: Scope) -> None:
        """Set client and scheme to what the first trusted proxy received."""
        peer = scope.get("client")
        # The mode of a Unix socket decides who may connect, so its peers are trusted.
        if peer is not None and not self._trusts(peer[0]):
            return
        names = (b"forwarded", b"x-forwarded-for", b"x-forwarded-proto")
        mapping = {name: value.decode("latin-1") for name, value in scope["headers"] if name in names}
        hops = mapping.get(b"forwarded", mapping.get(b"x-forwarded-for", "")).split(",")[-MOST_HOPS:]
        standard = b"forwarded" in mapping
        client, proto = "", mapping.get(b"x-forwarded-proto", "").rpartition(",")[2].strip().lower()
        for hop in reversed(hops):
            host = _host_of(_part(_FORWARDED_FOR, hop) if standard else hop)
            if host is None:
                break
            client = host
            proto = (_part(_FORWARDED_PROTO, hop) or proto) if standard else proto
            if not self._trusts(host):
                break
        if client:
            scope["client"] = (client, 0)
        if proto in ("http", "https"):
            scope["scheme"] = proto.replace("http", "ws") if scope["type"] == "websocket" else proto


def _part(pattern: re.Pattern[str], hop: str) -> str:
    match = pattern.search(hop)
    return match[1] if match else ""


def _host_of(text: str) -> str | None:
    """Return the address: `_host_of('[2001:db8::1]:4711')` is `2001:db8::1`; None if it is not valid."""
    text = text.strip().strip('"')
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return None


# API keys.


KEY_NEEDED = "Send a valid API key as 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
POLL_INTERVAL_S = 0.05
"""Seconds that a change of the file may go unnoticed. A check takes a microsecond, as does a request's
lookup."""


class ApiKeys:
    """All keys by hash, from the settings and the current file, to look up the key of a request.

    A hash is looked up rather than compared with each: timing could reveal only hashes, and an attacker
    cannot choose a key by its hash.
    """

    def __init__(self, settings: Settings) -> None:
        """Load the keys; raise if one is invalid, or if a named file has none."""
        self._file = settings.api_key_file
        plain = [describe_key(check_key(key)) for key in settings.api_key]
        self._fixed = [*plain, *admin_keys(settings)]
        self.key_required = needs_key(settings)
        """Whether requests need a key. An admin key alone does not close an open server."""
        self._known: dict[str, ApiKey] = {}
        self._seen: tuple[int, ...] | None = None
        self._next_look = 0.0
        self.on_change: Callable[[], None] | None = None
        if self._file is None:
            self._take([])
            return
        self._seen = _state_of(self._file)
        key_file = read_key_file(self._file)
        if not key_file:
            # An operator who names a key file does not want an open server.
            raise SettingsError(
                f"{self._file} has no key; add one with `dragoman keys add NAME`.", param="api_key_file"
            )
        self._take(key_file)

    def __bool__(self) -> bool:
        return self.key_required

    def __len__(self) -> int:
        """Return the number of clients that can be told apart; 0 if no key is required."""
        return len(self._known) if self.key_required else 0

    def _take(self, keys: Sequence[ApiKey]) -> None:
        # Keys of the settings take precedence over the file.
        self._known = {key.sha256: key for key in (*keys, *self._fixed)}
        self.has_admin = any(key.admin for key in self._known.values())
        self.limited = any(key.is_limited for key in self._known.values())

    def _look(self) -> None:
        """Reload the file if it has changed. If it cannot be read, the keys stay as they are."""
        if self._file is None or (now := time.monotonic()) < self._next_look:
            return
        self._next_look = now + POLL_INTERVAL_S
        if (seen := _state_of(self._file)) == self._seen:
            return
        self._seen = seen
        try:
            self._take(read_key_file(self._file))
        except SettingsError as error:
            logger.error("Keys not reloaded: %s", error.message)
            return
        logger.info("Keys reloaded: %d keys", len(self._known))
        if self.on_change is not None:
            self.on_change()

    def _given(self, headers: Mapping[bytes, bytes]) -> ApiKey | None:
        """Return the key of a request, or None if it has no valid one."""
        self._look()
        scheme, _, data = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer":
            data = headers.get(b"x-api-key", b"")
        return self._known.get(hash_key(data.strip()))

    def authenticate(self, headers: Mapping[bytes, bytes]) -> ApiKey:
        """Return the key of a request, or raise if it has no valid one. Without keys it is `ANONYMOUS`."""
        if not self.key_required:
            return ANONYMOUS
        key = self._given(headers)
        if key is None:
            raise Unauthorized(KEY_NEEDED)
        return key

    def get(self, owner: str) -> ApiKey | None:
        return self._known.get(owner)

    def require(self, owner: str) -> ApiKey:
        """Return the key of work that continues without a request; raise if it was revoked."""
        if not self.key_required:
            return ANONYMOUS
        self._look()
        key = self._known.get(owner)
        if key is None:
            raise Unauthorized(
                "The API key of this request was revoked; send a new request with a valid key."
            )
        return key

    def accepts(self, headers: Mapping[bytes, bytes]) -> bool:
        """Return whether a request has a valid key, or needs none."""
        return not self.key_required or self._given(headers) is not None

    def require_admin(self, headers: Mapping[bytes, bytes]) -> None:
        """Raise unless the request has an admin key, for routes that change the server for all."""
        key = self._given(headers)
        if key is not None and key.admin:
            return
        if not self.has_admin:
            raise Forbidden(
                "This route needs an admin key, and the server has none; start it with DRAGOMAN_ADMIN_KEY or "
                "--admin-key-file, and send that key.",
                code="no_admin_key",
            )
        if key is None:
            raise Unauthorized("Send an admin key as 'Authorization: Bearer KEY' or 'x-api-key: KEY'.")
        raise Forbidden(
            "This route needs an admin key; the key in the request is not one.", code="admin_required"
        )

    def check_operator(self, headers: Mapping[bytes, bytes]) -> None:
        """Raise for routes that need an admin key if there is one, and are otherwise open to all keys."""
        if self.has_admin or (self.key_required and self.authenticate(headers).models):
            self.require_admin(headers)


def _state_of(file: str) -> tuple[int, ...] | None:
    """Return values that change when the file does."""
    try:
        stat = os.stat(file)
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def admin_keys(settings: Settings) -> list[ApiKey]:
    """Return the admin keys of the settings and of the admin key file, which always have full rights."""
    keys = [describe_key(check_key(key), name="admin", admin=True) for key in settings.admin_key]
    if settings.admin_key_file is None:
        return keys
    file_keys = read_key_file(settings.admin_key_file)
    if not file_keys:
        raise SettingsError(f"{settings.admin_key_file} has no key; add one.", param="admin_key_file")
    return keys + [ApiKey(name=key.name or "admin", sha256=key.sha256, admin=True) for key in file_keys]


def keys_of(settings: Settings) -> list[str]:
    """Return the keys in plain text, from the settings and the file."""
    keys = [check_key(key) for key in settings.api_key]
    if settings.api_key_file is not None:
        lines = read_key_lines(settings.api_key_file)
        keys += [check_key(line) for line in lines if not is_described(line)]
    return keys


def needs_key(settings: Settings) -> bool:
    """Return whether clients have to send a key."""
    return bool(settings.api_key) or settings.api_key_file is not None


def is_open(settings: Settings) -> bool:
    """Return whether other machines have access without a key."""
    return not ApiKeys(settings).key_required and not is_for_this_machine(settings)


def check_closed(settings: Settings) -> None:
    """Raise if other machines would have access without a key, unless `insecure` is set."""
    if settings.insecure or not is_open(settings):
        return
    raise SettingsError(
        f"Other machines can reach {settings.host or 'all addresses'}, and no API key is set; set "
        "DRAGOMAN_API_KEY, listen on 127.0.0.1, or allow it with --insecure (`insecure=True`).",
        param="host",
    )
