"""Keys as they are kept: a file with one a line, in plain text or as a hash with what that key may do.

    # the key itself
    sk-one
    {"name":"ci","sha256":"9f86…","begins":"sk-dgm-Qx3a","models":["qwen*"],"tokens_per_day":100000}

A hash is the SHA-256 of the key, without salt and without rounds. That is enough for what nobody can guess:
`dragoman keys add` makes keys of 256 random bits, and takes none that is short. It costs a request next to
nothing, and it is by this hash that all which a key has stored is known: whoever replaces a plain key by its
hash keeps it.

The file is replaced as a whole, by one at a time; who reads it sees the one before or the one after.
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
"""Scanners for secrets can look for it."""
RANDOM_BYTES = 32
SHOWN = 4
"""Letters of a key, behind the prefix, by which a person tells it from others."""
SHORTEST = 24
"""Of a key that somebody brings: its hash would tell a shorter one to who tries all of them."""
MOST_BYTES = 4 * 1024 * 1024
"""Of a file. It is read while requests wait."""

Tokens = Annotated[int, Meta(ge=1)] | None


NOT_FOR_THIS_KEY = "This model does not exist here, or this key may not use it; /v1/models lists what it may."


class ApiKey(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What is known of a key, which is not the key."""

    name: Annotated[str, Meta(max_length=64, pattern=r"^[^\x00-\x1f]*$")] = ""
    sha256: Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")] = ""
    """By which it is known, and all that belongs to it; empty: nobody's, where no key is needed."""
    begins: Annotated[str, Meta(max_length=32)] = ""
    created: str = ""
    admin: bool = False
    models: list[str] = field(default_factory=list)
    """Those that it may use, where * stands for anything; empty: all."""
    tokens_per_minute: Tokens = None
    tokens_per_day: Tokens = None

    @property
    def is_limited(self) -> bool:
        """Whether its tokens are counted."""
        return self.tokens_per_minute is not None or self.tokens_per_day is not None

    def may_use(self, model: str) -> bool:
        return not self.models or self.admin or any(fnmatchcase(model, one) for one in self.models)

    def check_use(self, model: str) -> None:
        """Raises unless it may use the model that is listed by this name: to others it is not there."""
        if not self.may_use(model):
            raise ModelNotFound(NOT_FOR_THIS_KEY, param=MODEL)

    def tell(self, error: DragomanError) -> DragomanError:
        """What somebody with this key is told of an error: not which other models there are."""
        if self.models and not self.admin and isinstance(error, ModelNotFound):
            return ModelNotFound(NOT_FOR_THIS_KEY, param=error.param)
        return error


ANYBODY = ApiKey()
"""Who asks where no key is needed."""


NO_KEYS = frozenset({"", sha256(b"").hexdigest()})
"""What an empty header would be known by."""


def new_key() -> str:
    return PREFIX + secrets.token_urlsafe(RANDOM_BYTES)


def hash_key(key: str | bytes) -> str:
    return sha256(key.encode() if isinstance(key, str) else key).hexdigest()


def describe_key(key: str, **what: object) -> ApiKey:
    """What is kept of a key: `describe_key("sk-one", name="ci", admin=True)`."""
    long = len(key) >= SHORTEST
    begins = key[: SHOWN + (len(PREFIX) if key.startswith(PREFIX) else 0)] if long else ""
    return msgspec.convert({"sha256": hash_key(key), "begins": begins, **what}, ApiKey)


def check_key(key: str) -> str:
    if not key or not key.isprintable() or key != "".join(key.split()):
        raise SettingsError("An API key is empty, or has a space in it.", param="api_key")
    return key


def read_key_lines(name: str) -> list[str]:
    """What is in the file, without lines that are empty or begin with #."""
    try:
        with Path(name).open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
        if len(raw) > MOST_BYTES:
            raise SettingsError(f"{name} has more than {MOST_BYTES} bytes.", param="api_key_file")
        lines = raw.decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"The keys in {name} cannot be read.", param="api_key_file") from error
    return [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]


def is_described(line: str) -> bool:
    """Whether a line tells of a key, and is not the key."""
    return line.startswith("{")


def read_line(line: str, name: str) -> ApiKey:
    if not is_described(line):
        return describe_key(check_key(line))
    try:
        found = msgspec.json.decode(line, type=ApiKey)
    except msgspec.DecodeError as error:
        # Not the line: it may be a key, after all.
        raise SettingsError(f"A key in {name} cannot be read: {error}.", param="api_key_file") from error
    if found.sha256 in NO_KEYS or not found.name:
        raise SettingsError(f"A key in {name} has no name, or no sha256.", param="api_key_file")
    return found


def read_key_file(name: str) -> list[ApiKey]:
    return [read_line(line, name) for line in read_key_lines(name)]


# Changes.


@contextmanager
def change_keys(name: str) -> Iterator[list[str]]:
    """The lines of the file, which may be changed; when the block is left they are the file.

    One at a time: who comes second sees what the first has written. Nobody else may read the file.
    """
    path = Path(name).resolve()
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise SettingsError(f"There is no folder {path.parent}.", param="api_key_file") from error
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        yield lines
        _replace(path, "".join(f"{line}\n" for line in lines))
        os.fsync(folder)
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{name} cannot be changed.", param="api_key_file") from error
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
            # A server of another user may have to read it, as its owner has said.
            before = path.stat()
            os.chown(other, before.st_uid, before.st_gid)
            os.chmod(other, before.st_mode & 0o640)
        os.replace(other, path)
    except BaseException:
        Path(other).unlink(missing_ok=True)
        raise


def add_key(name: str, key: ApiKey) -> None:
    with change_keys(name) as lines:
        known = [read_line(line.strip(), name) for line in lines if line.strip() and line.strip()[0] != "#"]
        if any(key.sha256 == one.sha256 for one in known):
            raise SettingsError(f"{name} has this key already.", param="api_key_file")
        if any(key.name == one.name for one in known):
            raise SettingsError(
                f"{name} has a key named {key.name} already; revoke that, or choose another name.",
                param="api_key_file",
            )
        lines.append(msgspec.json.encode(key).decode())


def revoke_key(name: str, given: str) -> list[ApiKey]:
    """Takes out the key of a name, or with a hash that begins so; gives what it was."""
    with change_keys(name) as lines:
        gone: list[ApiKey] = []
        for line in list(lines):
            if not line.strip() or line.strip().startswith("#"):
                continue
            key = read_line(line.strip(), name)
            if given == key.name or (len(given) >= 8 and key.sha256.startswith(given)):
                lines.remove(line)
                gone.append(key)
        if not gone:
            raise SettingsError(f"{name} has no key named {given}.", param="api_key_file")
    return gone
