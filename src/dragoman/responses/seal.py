"""Texts that a client keeps for us, and can neither read nor change: reasoning and summaries."""

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
"""The version: how everything after it is to be read."""
PURPOSE = b"dragoman sealed text 1"
NONCE_BYTES = 12
TAG_BYTES = 16
LEAST_KEY_BYTES = 16


class Sealer:
    """Seals texts for one owner each: nobody else's request can use them."""

    def __init__(self, key: bytes) -> None:
        if len(key) < LEAST_KEY_BYTES:
            raise ValueError(f"A key for sealing must have at least {LEAST_KEY_BYTES} bytes.")
        # Derived, so that a key which is used for something else too gives nothing away there.
        derived = HKDF(SHA256(), length=32, salt=None, info=PURPOSE).derive(key)
        self._cipher = AESGCM(derived)

    def seal(self, text: str, owner: str) -> str:
        nonce = os.urandom(NONCE_BYTES)
        # A model may write a lone surrogate, which is no UTF-8.
        sealed = self._cipher.encrypt(nonce, text.encode("utf-8", "surrogatepass"), _bound(owner))
        return _encode(nonce + sealed)

    def open(self, sealed: str, owner: str) -> str | None:
        """None for whatever was not sealed here, for this owner, as it is."""
        try:
            raw = urlsafe_b64decode(sealed.removeprefix(PREFIX))
            # The decoder skips what it does not know, so one text has many codings: only ours counts.
            if _encode(raw) != sealed or len(raw) < NONCE_BYTES + TAG_BYTES:
                return None
            opened = self._cipher.decrypt(raw[:NONCE_BYTES], raw[NONCE_BYTES:], _bound(owner))
        except (ValueError, InvalidTag):
            return None
        return opened.decode("utf-8", "surrogatepass")


def _encode(raw: bytes) -> str:
    return PREFIX + urlsafe_b64encode(raw).decode()


def _bound(owner: str) -> bytes:
    """What the seal covers beside the text."""
    return PURPOSE + b"\0" + owner.encode("utf-8", "surrogatepass")


# The key with which reasoning and summaries are sealed: kept beside the store, and as long as it.
#
# It is written elsewhere, made sure to be on disk, and only then given its name, by a link: there never is
# a file of that name which is not whole, and of two servers that start together one makes it, and both read
# it.


FILE = "seal.key"
BYTES = 32


def seal_key(settings: Settings) -> bytes:
    """Without a store on disk nothing outlives the process, and neither does the key."""
    if settings.store in ("memory", "none"):
        return secrets.token_bytes(BYTES)
    folder = make_folder(folder_of(settings))
    path = folder / FILE
    try:
        if not path.exists():
            _make(path)
        elif path.stat().st_size < BYTES and not _is_used(folder / DATABASE):
            # Of a start that was cut off before anything was sealed.
            path.unlink(missing_ok=True)
            _make(path)
        key = path.read_bytes()
    except OSError as error:
        raise SettingsError(f"The key {path} cannot be read or made: {error.strerror}.") from error
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
        # A file system without links: whoever comes last has the name, and whoever reads after that its key.
        unnamed.rename(path)


def _sync(folder: Path) -> None:
    with suppress(OSError):
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def _is_used(database: Path) -> bool:
    """Whether anything was ever stored, as far as can be seen."""
    if not database.exists():
        return False
    try:
        with closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            # Of what was ever counted up, also if it is gone by now.
            query = "SELECT EXISTS (SELECT 1 FROM sqlite_sequence WHERE seq > 0)"
            return bool(connection.execute(query).fetchone()[0])
    except sqlite3.Error as error:
        return "no such table" not in str(error)
