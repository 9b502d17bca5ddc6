"""Durable storage of responses, conversations and chat completions: SQLite, memory or PostgreSQL."""

import os
import tempfile
from pathlib import Path

from dragoman.errors import SettingsError
from dragoman.settings import Settings
from dragoman.store.files import FileStore, Quota
from dragoman.store.records import (
    ConversationAppend,
    Page,
    ReadLimits,
    Record,
    ResponseChain,
    Stats,
    StoredConversation,
    StoredItem,
    StoreLimits,
)
from dragoman.store.sqlite import SqliteStore
from dragoman.store.store import Store

__all__ = [
    "ConversationAppend",
    "Page",
    "ReadLimits",
    "Record",
    "ResponseChain",
    "Stats",
    "Store",
    "StoreLimits",
    "StoredConversation",
    "StoredItem",
    "check_folder",
    "folder_of",
    "make_file_store",
    "make_folder",
    "make_store",
    "open_store",
]


# Opening the store that the settings `store`, `data_dir`, `store_max_bytes` and `store_max_age` describe.


def open_store(
    which: str = "sqlite",
    data_dir: Path | None = None,
    *,
    max_bytes: int | None = None,
    max_age: float | None = None,
) -> Store | None:
    """Create the store of this name, not yet opened; None for "none"."""
    bounds = StoreLimits(max_bytes=max_bytes, max_age=max_age)
    if which == "none":
        return None
    if which == "memory":
        return SqliteStore(None, bounds)
    if which == "sqlite":
        return SqliteStore(data_dir or default_folder(), bounds)
    if which.startswith(("postgresql://", "postgres://")):
        return _postgres(which, bounds)
    # Not the whole value: it may contain a password.
    scheme = which.partition(":")[0]
    raise SettingsError(f"`store` is sqlite, memory, none or postgresql://..., not {scheme}.", param="store")


def make_store(settings: Settings) -> Store | None:
    return open_store(
        settings.store,
        folder_of(settings),
        max_bytes=settings.store_max_bytes,
        max_age=settings.store_max_age,
    )


def folder_of(settings: Settings) -> Path:
    """Return `data_dir`, or `dragoman` in the user's data folder."""
    return Path(settings.data_dir).expanduser() if settings.data_dir else default_folder()


def kept_folder(settings: Settings) -> Path | None:
    """Return the folder of the store; None if nothing is stored on disk."""
    return None if settings.store in ("memory", "none") else folder_of(settings)


def check_folder(settings: Settings) -> Path | None:
    """Create the store's folder and test that it can be written; raises if not."""
    folder = kept_folder(settings)
    return None if folder is None else make_folder(folder)


def make_file_store(settings: Settings) -> FileStore:
    """Create the file store: in `files_dir`, else beside the store, else temporary."""
    limits = settings.limits
    quota = Quota(files=limits.files, bytes=limits.files_bytes, file_bytes=limits.file_bytes)
    if settings.files_dir:
        return FileStore(Path(settings.files_dir).expanduser(), quota)
    folder = kept_folder(settings)
    return FileStore(None if folder is None else folder / "files", quota)


def make_folder(folder: Path) -> Path:
    """Create a writable folder. Only an attempt to write reveals missing permissions and read-only disks."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise SettingsError(
            f"The data folder {folder} cannot be written: {error.strerror}. Choose "
            "another data_dir, or store = memory, which writes nothing to disk.",
            param="data_dir",
        ) from error
    return folder


def default_folder() -> Path:
    general = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(general).expanduser() / "dragoman"


def _postgres(url: str, bounds: StoreLimits) -> Store:
    try:
        from dragoman.store.postgres import PostgresStore
    except ImportError as error:
        raise SettingsError(
            "A store in PostgreSQL needs psycopg: pip install 'dragoman[postgres]'.", param="store"
        ) from error
    return PostgresStore(url, bounds)
