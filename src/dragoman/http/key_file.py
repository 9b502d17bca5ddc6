"""The key file: one API key per line, in plain text or as a hash with the rights of the key.

    # the key itself
    sk-one
    {"name":"ci","sha256":"9f86…","begins":"sk-dgm-Qx3a","models":["qwen*"],"tokens_per_day":100000}

The hash is the SHA-256 of the key, without salt or rounds, which is enough for keys that cannot be guessed:
`dragoman keys add` creates keys of 256 random bits, and rejects short ones. Hashing costs a request almost
nothing. The hash also identifies everything that a key has stored: an operator who replaces a plain key by
its hash keeps its data.

The file is replaced as a whole, under a lock; a reader sees the old or the new version.
"""

import fcntl
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from hashlib import sha256
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct, field

from dragoman.errors import MODEL, DragomanError, ModelNotFound, SettingsError

PREFIX = "sk-dgm-"
"""Prefix that secret scanners can look for."""
RANDOM_BYTES = 32
SHOWN = 4
"""Characters after the prefix that are stored, so that an operator can recognize the key."""
SHORTEST = 24
"""Minimum length of a key that an operator chooses: the hash of a shorter one could be brute-forced."""
MOST_BYTES = 4 * 1024 * 1024
"""Maximum size of the file, which is read while requests wait."""

Tokens = Annotated[int, Meta(ge=1)] | None


NOT_FOR_THIS_KEY = (
    "The model does not exist or this API key may not use it; /v1/models lists the models it may use."
)


class ApiKey(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The stored data about a key, without the key itself."""

    name: Annotated[str, Meta(max_length=64, pattern=r"^[^\x00-\x1f]*$")] = ""
    sha256: Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")] = ""
    """The hash that identifies the key and its data; empty for anonymous access."""
    begins: Annotated[str, Meta(max_length=32)] = ""
    created: str = ""
    admin: bool = False
    models: list[str] = field(default_factory=list)
    """Models that the key may use, with * as a wildcard; empty means all."""
    tokens_per_minute: Tokens = None
    tokens_per_day: Tokens = None

    @property
    def is_limited(self) -> bool:
        """Whether the key has a token budget."""
        return self.tokens_per_minute is not None or self.tokens_per_day is not None

    def may_use(self, model: str) -> bool:
        return not self.models or self.admin or any(fnmatchcase(model, pattern) for pattern in self.models)

    def check_use(self, model: str) -> None:
        """Raise unless the key may use this model; other keys cannot see that it exists."""
        if not self.may_use(model):
            raise ModelNotFound(NOT_FOR_THIS_KEY, param=MODEL)

    def redact_error(self, error: DragomanError) -> DragomanError:
        """Return the error as the key may see it: without the names of other models."""
        if self.models and not self.admin and isinstance(error, ModelNotFound):
            return ModelNotFound(NOT_FOR_THIS_KEY, param=error.param)
        return error


ANONYMOUS = ApiKey()
"""The key of all clients if none is required."""


NO_KEYS = frozenset({"", sha256(b"").hexdigest()})
"""Hashes of an empty header."""


def new_key() -> str:
    return PREFIX + secrets.token_urlsafe(RANDOM_BYTES)


def hash_key(key: str | bytes) -> str:
    return sha256(key.encode() if isinstance(key, str) else key).hexdigest()


def describe_key(key: str, **what: object) -> ApiKey:
    """Return what is stored of a key: `describe_key("sk-one", name="ci", admin=True)`."""
    long = len(key) >= SHORTEST
    begins = key[: SHOWN + (len(PREFIX) if key.startswith(PREFIX) else 0)] if long else ""
    return msgspec.convert({"sha256": hash_key(key), "begins": begins, **what}, ApiKey)


def check_key(key: str) -> str:
    if not key or not key.isprintable() or key != "".join(key.split()):
        raise SettingsError(
            "An API key is empty or contains whitespace or control characters; use printable characters.",
            param="api_key",
        )
    return key


def read_key_lines(name: str) -> list[str]:
    """Return the lines of the file, without empty ones and comments."""
    try:
        with Path(name).open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
        if len(raw) > MOST_BYTES:
            raise SettingsError(f"{name} has more than {MOST_BYTES} bytes.", param="api_key_file")
        lines = raw.decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(
            f"Cannot read the keys in {name}; make it a readable UTF-8 file.", param="api_key_file"
        ) from error
    return [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]


def is_described(line: str) -> bool:
    """Return whether a line describes a key, instead of being one."""
    return line.startswith("{")


def read_line(line: str, name: str) -> ApiKey:
    if not is_described(line):
        return describe_key(check_key(line))
    try:
        key = msgspec.json.decode(line, type=ApiKey)
    except msgspec.DecodeError as error:
        # The message does not include the line, which may be a key.
        raise SettingsError(f"A key in {name} is not valid: {error}.", param="api_key_file") from error
    if key.sha256 in NO_KEYS or not key.name:
        raise SettingsError(f"A key in {name} has no name or no sha256.", param="api_key_file")
    return key


def read_key_file(name: str) -> list[ApiKey]:
    return [read_line(line, name) for line in read_key_lines(name)]


# Changes.


@contextmanager
def change_keys(name: str) -> Iterator[list[str]]:
    """Yield the lines of the file for changing; they are written when the block ends.

    Changes are serialized by a lock, so a second one sees the first. The file is readable only by its owner
    and group.
    """
    path = Path(name).resolve()
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise SettingsError(
            f"Cannot open the folder {path.parent}; create it first.", param="api_key_file"
        ) from error
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        yield lines
        _replace(path, "".join(f"{line}\n" for line in lines))
        os.fsync(folder)
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(
            f"Cannot change {name}; check its permissions and its folder's.", param="api_key_file"
        ) from error
    finally:
        os.close(folder)


def _replace(path: Path, text: str) -> None:
    number, other = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(number, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        with suppress(OSError):
            # The server may run as another user, so owner and mode stay as they were.
            before = path.stat()
            os.chown(other, before.st_uid, before.st_gid)
            os.chmod(other, before.st_mode & 0o640)
        os.replace(other, path)
    except BaseException:
        Path(other).unlink(missing_ok=True)
        raise


def add_key(name: str, key: ApiKey) -> None:
    with change_keys(name) as lines:
        existing = [
            read_line(line.strip(), name) for line in lines if line.strip() and line.strip()[0] != "#"
        ]
        if any(key.sha256 == other.sha256 for other in existing):
            raise SettingsError(f"{name} already has this key.", param="api_key_file")
        if any(key.name == other.name for other in existing):
            raise SettingsError(
                f"{name} already has a key named {key.name}; revoke it or choose another name.",
                param="api_key_file",
            )
        lines.append(msgspec.json.encode(key).decode())


def revoke_key(name: str, text: str) -> list[ApiKey]:
    """Remove the key with this name, or with a hash that begins with it; return what was removed."""
    with change_keys(name) as lines:
        gone: list[ApiKey] = []
        for line in list(lines):
            if not line.strip() or line.strip().startswith("#"):
                continue
            key = read_line(line.strip(), name)
            if text == key.name or (len(text) >= 8 and key.sha256.startswith(text)):
                lines.remove(line)
                gone.append(key)
        if not gone:
            raise SettingsError(f"{name} has no key named {text}.", param="api_key_file")
    return gone
