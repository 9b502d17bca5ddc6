"""Who asks: the Host and the web page in whose name a request comes, and whose key it has.

A page in a browser can have any server on its machine asked, by its address or by a name of its own that it
lets point there. What gives it away are two headers that no page can change.
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
    ANYBODY,
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

# In whose name: Host and Origin.


_AUTHORITY = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{1,5})?")
_HEADER_NAMES = re.compile(rb"[A-Za-z0-9, _-]{1,2048}")
_OWN_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]", "0.0.0.0", "[::]"})
"""The last two are what many examples write for this machine, and systems take them for it. A page elsewhere
can have a name of its own lead here, but not a number."""
_ONCE = (b"host", b"origin", b"authorization", b"x-api-key", b"content-type", b"content-encoding")
"""Headers that decide something: of two, others on the way may have looked at the other one."""
ANY = "*"


class Guard:
    def __init__(self, settings: Settings) -> None:
        self._names = _OWN_NAMES | {name.lower() for name in settings.allow_host}
        self._by_name = is_for_this_machine(settings) and settings.uds is None and ANY not in self._names
        self._origins = frozenset(origin.lower().rstrip("/").encode() for origin in settings.cors_origin)
        self._any_origin = ANY.encode() in self._origins

    def check(self, scope: Scope, headers: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
        """Refuses a request in a wrong name; gives what the reply says to the page that asked, if any."""
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
        found = _AUTHORITY.fullmatch(host)
        if found is None:
            raise BadRequest("The Host header is not the name of a host.", code="invalid_host")
        if self._by_name and _came_by_loopback(scope):
            name = found[1].decode().lower().rstrip(".")
            if name not in self._names:
                raise Forbidden(
                    f"This server is not known as {name}; --allow-host {name} makes it so.",
                    code="host_not_allowed",
                )

    def _reply_to(self, origin: bytes, host: bytes) -> dict[bytes, bytes]:
        listed = self._any_origin or origin in self._origins
        if not listed:
            if host and origin.partition(b"://")[2] == host.lower():
                return {}  # our own page
            raise Forbidden(
                "Pages of this origin may not ask here; --cors-origin lists those that may.",
                code="origin_not_allowed",
            )
        # Keys travel in a header that a page sets itself, so cookies and their like are never asked for.
        return {
            b"access-control-allow-origin": b"*" if self._any_origin else origin,
            b"access-control-expose-headers": b"x-request-id, traceresponse, x-dragoman-ignored, retry-after",
            **({} if self._any_origin else {b"vary": b"Origin"}),
        }


def preflight(method: str, headers: Mapping[bytes, bytes]) -> dict[bytes, bytes] | None:
    """What a browser wants to know before it asks for a page; None if this is no such question."""
    if method != "OPTIONS" or b"access-control-request-method" not in headers:
        return None
    wanted = headers.get(b"access-control-request-headers", b"")
    return {
        b"access-control-allow-methods": b"GET, POST, DELETE",
        b"access-control-max-age": b"600",
        **({b"access-control-allow-headers": wanted} if _HEADER_NAMES.fullmatch(wanted) else {}),
    }


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address; a name that we do not know may be anywhere.

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
    """`127.0.0.1, ::1` are two."""
    return [each.strip() for each in settings.host.split(",")]


def is_for_this_machine(settings: Settings) -> bool:
    """Whether nobody on another machine reaches the server."""
    return settings.uds is not None or all(map(is_loopback, hosts_of(settings)))


def is_private(settings: Settings) -> bool:
    """Whether only people on this machine ask, as far as can be known: a proxy asks for others."""
    by_proxy = settings.uds is not None or settings.forwarded_allow_ips or settings.root_path
    return is_for_this_machine(settings) and not by_proxy


is_known_here = lru_cache(maxsize=256)(is_loopback)
"""The same, for what is asked of each request."""


def _came_by_loopback(scope: Scope) -> bool:
    """Another ASGI server may listen elsewhere than the settings say."""
    server = scope.get("server")
    return server is not None and is_known_here(server[0])


def _check_single(scope: Scope) -> None:
    names = [name for name, _ in scope["headers"]]
    for name in _ONCE:
        if names.count(name) > 1:
            raise BadRequest(f"The header {name.decode()} is there twice.", code="invalid_header")


# From where, if a proxy says so.


MOST_HOPS = 32
_FORWARDED_FOR = re.compile(r'(?i)(?:^|;)\s*for\s*=\s*"?([^";]*)')
_FORWARDED_PROTO = re.compile(r'(?i)(?:^|;)\s*proto\s*=\s*"?(https?)')


class Forwarded:
    """Whom the proxies say they ask for. Of others, what is said is not listened to."""

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
        """The client and the scheme become those that the first proxy saw whom we trust."""
        peer = scope.get("client")
        # Whoever reaches a unix socket is let in by its mode.
        if peer is not None and not self._trusts(peer[0]):
            return
        names = (b"forwarded", b"x-forwarded-for", b"x-forwarded-proto")
        said = {name: value.decode("latin-1") for name, value in scope["headers"] if name in names}
        hops = said.get(b"forwarded", said.get(b"x-forwarded-for", "")).split(",")[-MOST_HOPS:]
        standard = b"forwarded" in said
        client, proto = "", said.get(b"x-forwarded-proto", "").rpartition(",")[2].strip().lower()
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
    found = pattern.search(hop)
    return found[1] if found else ""


def _host_of(text: str) -> str | None:
    """`_host_of('[2001:db8::1]:4711')` is `2001:db8::1`; None where it is no address."""
    text = text.strip().strip('"')
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return None


# With whose key.


KEY_NEEDED = "Send a valid API key as 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
LOOK_S = 0.05
"""How long a change of the file may go unnoticed. Looking costs a microsecond, and so does each request."""


class Keys:
    """All keys by their hashes, those of the file as it is now: of a request whose key it has.

    A hash is looked up rather than compared with each: whoever measures how long that takes learns of hashes,
    and cannot choose a key by its hash.
    """

    def __init__(self, settings: Settings) -> None:
        """Raises where a key cannot be used, or there should be some and are none."""
        self._file = settings.api_key_file
        plain = [describe_key(check_key(key)) for key in settings.api_key]
        self._fixed = [*plain, *admin_keys(settings)]
        self.closed = needs_key(settings)
        """Whether it takes a key to ask. One for administrators does not close what was open."""
        self._known: dict[str, ApiKey] = {}
        self._seen: tuple[int, ...] | None = None
        self._next_look = 0.0
        self.on_change: Callable[[], None] | None = None
        if self._file is None:
            self._take([])
            return
        self._seen = _state_of(self._file)
        found = read_key_file(self._file)
        if not found:
            # Somebody who names a file of keys does not mean an open server.
            raise SettingsError(
                f"There is no key in {self._file}; `dragoman keys add NAME` makes one.", param="api_key_file"
            )
        self._take(found)

    def __bool__(self) -> bool:
        return self.closed

    def __len__(self) -> int:
        """How many clients are told apart: where no key is needed, none."""
        return len(self._known) if self.closed else 0

    def _take(self, found: Sequence[ApiKey]) -> None:
        # What the settings say holds, whatever the file says of the same key.
        self._known = {key.sha256: key for key in (*found, *self._fixed)}
        self.has_admin = any(key.admin for key in self._known.values())
        self.limited = any(key.is_limited for key in self._known.values())

    def _look(self) -> None:
        """Reads the file again if it is another. One that cannot be read changes nothing."""
        if self._file is None or (now := time.monotonic()) < self._next_look:
            return
        self._next_look = now + LOOK_S
        if (seen := _state_of(self._file)) == self._seen:
            return
        self._seen = seen
        try:
            self._take(read_key_file(self._file))
        except SettingsError as error:
            logger.error("The keys stay as they were: %s", error.message)
            return
        logger.info("There are %d keys now", len(self._known))
        if self.on_change is not None:
            self.on_change()

    def _given(self, headers: Mapping[bytes, bytes]) -> ApiKey | None:
        """The key that a request has, if it is one."""
        self._look()
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer":
            given = headers.get(b"x-api-key", b"")
        return self._known.get(hash_key(given.strip()))

    def of(self, headers: Mapping[bytes, bytes]) -> ApiKey:
        """Whose key a request has; raises if it has none that counts. Without keys: nobody's."""
        if not self.closed:
            return ANYBODY
        found = self._given(headers)
        if found is None:
            raise Unauthorized(KEY_NEEDED)
        return found

    def get(self, owner: str) -> ApiKey | None:
        return self._known.get(owner)

    def belonging_to(self, owner: str) -> ApiKey:
        """The key of work that goes on without a request; raises if it was revoked since."""
        if not self.closed:
            return ANYBODY
        self._look()
        found = self._known.get(owner)
        if found is None:
            raise Unauthorized("The key that asked for this was revoked.")
        return found

    def has(self, headers: Mapping[bytes, bytes]) -> bool:
        """Whether a request has a key that counts, or needs none."""
        return not self.closed or self._given(headers) is not None

    def require_admin(self, headers: Mapping[bytes, bytes]) -> None:
        """For what changes the server for everybody. Raises unless the request has the key of an admin."""
        found = self._given(headers)
        if found is not None and found.admin:
            return
        if not self.has_admin:
            raise Forbidden(
                "This takes an admin key, and there is none: start the server with DRAGOMAN_ADMIN_KEY or "
                "--admin-key-file, and send that key.",
                code="no_admin_key",
            )
        if found is None:
            raise Unauthorized("Send an admin key as 'Authorization: Bearer KEY' or 'x-api-key: KEY'.")
        raise Forbidden("This takes an admin key, and the key that was sent is none.", code="admin_required")

    def check_operator(self, headers: Mapping[bytes, bytes]) -> None:
        """For what every key may do as long as nobody has the key of an admin."""
        if self.has_admin or (self.closed and self.of(headers).models):
            self.require_admin(headers)


def _state_of(file: str) -> tuple[int, ...] | None:
    """What is another when the file is."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def admin_keys(settings: Settings) -> list[ApiKey]:
    """Those of the settings, and those of a file of their own; what that file says else does not hold."""
    keys = [describe_key(check_key(key), name="admin", admin=True) for key in settings.admin_key]
    if settings.admin_key_file is None:
        return keys
    found = read_key_file(settings.admin_key_file)
    if not found:
        raise SettingsError(f"There is no key in {settings.admin_key_file}.", param="admin_key_file")
    return keys + [ApiKey(name=key.name or "admin", sha256=key.sha256, admin=True) for key in found]


def keys_of(settings: Settings) -> list[str]:
    """The keys that somebody could send: those of the settings, and those in plain text of the file."""
    keys = [check_key(key) for key in settings.api_key]
    if settings.api_key_file is not None:
        lines = read_key_lines(settings.api_key_file)
        keys += [check_key(line) for line in lines if not is_described(line)]
    return keys


def needs_key(settings: Settings) -> bool:
    """Whether a client has to send one."""
    return bool(settings.api_key) or settings.api_key_file is not None


def is_open(settings: Settings) -> bool:
    """Whether other machines may ask without a key."""
    return not Keys(settings).closed and not is_for_this_machine(settings)


def check_closed(settings: Settings) -> None:
    """Refuses what would be open to other machines, unless that is what was asked for."""
    if settings.insecure or not is_open(settings):
        return
    raise SettingsError(
        f"Other machines reach {settings.host or 'all addresses'}, and there is no key. Set "
        "DRAGOMAN_API_KEY, or listen on 127.0.0.1; --insecure (`insecure=True`) serves everybody.",
        param="host",
    )
