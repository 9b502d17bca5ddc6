"""Who asks: the Host and the web page in whose name a request comes, and whose key it has.

A page in a browser can have any server on its machine asked, by its address or by a name of its own that it
lets point there. What gives it away are two headers that no page can change.
"""

import hmac
import ipaddress
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

from starlette.types import Scope

from dragoman.errors import BadRequest, Forbidden, SettingsError, Unauthorized
from dragoman.settings import Settings

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
        self._by_name = is_loopback(settings.host) and ANY not in self._names
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
            b"access-control-expose-headers": b"x-request-id, x-dragoman-ignored, retry-after",
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


_is_loopback = lru_cache(maxsize=256)(is_loopback)


def _came_by_loopback(scope: Scope) -> bool:
    """Another ASGI server may listen elsewhere than the settings say."""
    server = scope.get("server")
    return server is not None and _is_loopback(server[0])


def _check_single(scope: Scope) -> None:
    names = [name for name, _ in scope["headers"]]
    for name in _ONCE:
        if names.count(name) > 1:
            raise BadRequest(f"The header {name.decode()} is there twice.", code="invalid_header")


# With whose key.


class Keys:
    """Only digests are kept: they have one length, so that comparing them tells nothing of a key's."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [sha256(key.encode()).digest() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def owner(self, headers: Mapping[bytes, bytes]) -> str:
        """Whose key a request has, as a hash; raises if it has none that counts. Without keys: nobody's."""
        if not self._digests:
            return ""
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer":
            given = headers.get(b"x-api-key", b"")
        digest = sha256(given.strip()).digest()
        # Every key is compared, and in constant time, so that the time tells nothing.
        if not sum(hmac.compare_digest(digest, known) for known in self._digests):
            raise Unauthorized("Send a valid API key as 'Authorization: Bearer KEY' or 'x-api-key: KEY'.")
        return digest.hex()

    def has(self, headers: Mapping[bytes, bytes]) -> bool:
        """Whether a request has a key that counts, or needs none."""
        try:
            self.owner(headers)
        except Unauthorized:
            return False
        return True


def keys_of(settings: Settings) -> list[str]:
    """All keys, those of the settings and those of a file. Raises for one that nobody could send."""
    keys = list(settings.api_key)
    if settings.api_key_file is not None:
        keys += _from_file(settings.api_key_file)
    for key in keys:
        if not key or not key.isprintable() or key != "".join(key.split()):
            raise SettingsError("An API key is empty, or has a space in it.", param="api_key")
    return keys


def _from_file(name: str) -> list[str]:
    """One key a line; lines that are empty or begin with # are none."""
    try:
        lines = Path(name).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"The keys in {name} cannot be read.", param="api_key_file") from error
    keys = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
    if not keys:
        # Somebody who names a file of keys does not mean an open server.
        raise SettingsError(f"There is no key in {name}.", param="api_key_file")
    return keys


def is_open(settings: Settings) -> bool:
    """Whether other machines may ask without a key."""
    return not keys_of(settings) and not is_loopback(settings.host)


def check_closed(settings: Settings) -> None:
    """Refuses what would be open to other machines, unless that is what was asked for."""
    if settings.insecure or not is_open(settings):
        return
    raise SettingsError(
        f"Other machines reach {settings.host or 'all addresses'}, and there is no key. Set "
        "DRAGOMAN_API_KEY, or listen on 127.0.0.1; --insecure (`insecure=True`) serves everybody.",
        param="host",
    )
