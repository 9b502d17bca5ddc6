"""Who may ask: the keys of a server, and whose key a request has."""

import hmac
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path

from dragoman.errors import SettingsError, Unauthorized
from dragoman.http.guard import is_loopback
from dragoman.settings import Settings


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
