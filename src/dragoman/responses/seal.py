"""Sealed texts: reasoning and summaries that clients keep for us and can neither read nor change."""

import os
import secrets
import sqlite3
from base64 import urlsafe_b64decode, urlsafe_b64encode
from contextlib import closing, suppress
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from dragoman.errors import SettingsError
from dragoman.settings import Settings
from dragoman.store import folder_of, make_folder
from dragoman.store.sqlite import FILE as DATABASE

PREFIX = "dgm1_"
"""The format version."""
PURPOSE = b"dragoman sealed text 1"
NONCE_BYTES = 12
TAG_BYTES = 16
LEAST_KEY_BYTES = 16


class Sealer:
    """Authenticated encryption per owner: a request of another owner cannot open a text."""

    def __init__(self, key: bytes) -> None:
        if len(key) < LEAST_KEY_BYTES:
            raise ValueError(f"A key for sealing must have at least {LEAST_KEY_BYTES} bytes.")
        # Derived, so that nothing leaks if the key is also used elsewhere.
        derived = HKDF(SHA256(), length=32, salt=None, info=PURPOSE).derive(key)
        self._cipher = AESGCM(derived)

    def seal(self, text: str, owner: str) -> str:
        nonce = os.urandom(NONCE_BYTES)
        # A model may write a lone surrogate, which is not valid UTF-8.
        sealed = self._cipher.encrypt(nonce, text.encode("utf-8", "surrogatepass"), _bound(owner))
        return _encode(nonce + sealed)

    def open(self, sealed: str, owner: str) -> str | None:
        """Decrypt a text; None unless it was sealed here, for this owner, and is unchanged."""
        try:
            raw = urlsafe_b64decode(sealed.removeprefix(PREFIX))
            # The decoder skips unknown characters, so one text has many encodings; only the canonical one
            # counts.
            if _encode(raw) != sealed or len(raw) < NONCE_BYTES + TAG_BYTES:
                return None
            opened = self._cipher.decrypt(raw[:NONCE_BYTES], raw[NONCE_BYTES:], _bound(owner))
        except (ValueError, InvalidTag):
            return None
        return opened.decode("utf-8", "surrogatepass")


def _encode(raw: bytes) -> str:
    return PREFIX + urlsafe_b64encode(raw).decode()


def _bound(owner: str) -> bytes:
    """Return the data that the seal authenticates besides the text."""
    return PURPOSE + b"\0" + owner.encode("utf-8", "surrogatepass")


# The key that seals reasoning and summaries, stored beside the database.
#
# It is written to a temporary file, synced, and only then linked to its name: a file of that name is always
# complete, and if two servers start together, one creates the key and both read it.


FILE = "seal.key"
BYTES = 32


def seal_key(settings: Settings) -> bytes:
    """Return the key; without a store on disk, a new one for the life of the process."""
    if settings.store in ("memory", "none"):
        return secrets.token_bytes(BYTES)
    folder = make_folder(folder_of(settings))
    path = folder / FILE
    try:
        if not path.exists():
            _make(path)
        elif path.stat().st_size < BYTES and not _is_used(folder / DATABASE):
            # Left by a start that was interrupted before anything was sealed.
            path.unlink(missing_ok=True)
            _make(path)
        key = path.read_bytes()
    except OSError as error:
        raise SettingsError(f"The key {path} cannot be read or created: {error.strerror}.") from error
    if len(key) < BYTES:
        raise SettingsError(
            f"The key {path} is damaged: it has {len(key)} of {BYTES} bytes. Restore it from a backup;"
            " or delete it, and what was sealed with it cannot be opened any more."
        )
    return key[:BYTES]


def _make(path: Path) -> None:
    unnamed = path.with_name(f".{FILE}-{secrets.token_hex(8)}")
    with os.fdopen(os.open(unnamed, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secrets.token_bytes(BYTES))
        file.flush()
        os.fsync(file.fileno())
    try:
        with suppress(FileExistsError):
            _name(unnamed, path)
    finally:
        unnamed.unlink(missing_ok=True)
    _sync(path.parent)


def _name(unnamed: Path, path: Path) -> None:
    try:
        os.link(unnamed, path)
    except FileExistsError:
        raise
    except OSError:
        # File systems without links: the last server to rename wins, and later readers get its key.
        unnamed.rename(path)


def _sync(folder: Path) -> None:
    with suppress(OSError):
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def _is_used(database: Path) -> bool:
    """Whether the database ever stored anything, as far as that can be read."""
    if not database.exists():
        return False
    try:
        with closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            # The sequence counters, which deletions leave in place.
            query = "SELECT EXISTS (SELECT 1 FROM sqlite_sequence WHERE seq > 0)"
            return bool(connection.execute(query).fetchone()[0])
    except sqlite3.Error as error:
        return "no such table" not in str(error)
