"""A model by its name, on this machine: found, or fetched."""

import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from dragoman.errors import ModelFileError
from dragoman.hub import remote
from dragoman.hub.cache import CachedModel, cache_root, find_cached, repo_folder
from dragoman.hub.names import ModelName, RemoteFile, Variant, choose_variant, list_variants

AT_ONCE = 4
"""Files that are fetched at the same time."""
ROOM = 0.7
"""Of the memory that is free, for weights: the rest is for keys and values, and for everybody else."""

Progress: TypeAlias = Callable[[int, int], None]
"""Told the bytes done and the bytes there are."""
Check: TypeAlias = Callable[[Variant], None]
"""May raise for what is of no use here, before anything is fetched."""


def locate(
    name: ModelName,
    progress: Progress | None = None,
    *,
    room: int | None = None,
    check: Check | None = None,
    projector: bool = True,
) -> CachedModel:
    """The model, fetched where it is not here. A name without a quantisation is what is here already."""
    return find_cached(name) or pull(name, progress, room=room, check=check, projector=projector)


def pull(
    name: ModelName,
    progress: Progress | None = None,
    *,
    room: int | None = None,
    check: Check | None = None,
    projector: bool = True,
) -> CachedModel:
    """The model as the hub has it now; only what is not here is fetched.

    `room` has the bytes that weights may take in memory, where no quantisation is named. With `projector`
    what it sees or hears with comes too.
    """
    if name.kind == "ollama":
        raise ModelFileError(
            f"{name} is not in Ollama's store; `ollama pull {name.repo}:{name.choice}` fetches it."
        )
    listing = remote.list_files(name)
    variant = choose_variant(list_variants(listing.files), name, room or free_memory(), listing.files)
    if check is not None:
        check(variant)
    if not projector:
        variant = Variant(variant.label, variant.files)
    folder = repo_folder(name.repo)
    try:
        _fetch_all(name, listing.commit, variant, folder, progress)
        _write_ref(folder, name.revision, listing.commit)
    except OSError as error:
        raise ModelFileError(
            f"{folder} cannot be written: {error.strerror}. HF_HOME names another."
        ) from None
    found = find_cached(ModelName(name.repo, variant.first.name, listing.commit))
    if found is None:
        raise ModelFileError(f"{name} was fetched, and is not there.")
    return found


def free_memory() -> int:
    """Bytes for weights, as far as the system alone can say."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(ROOM * 1024 * int(line.split()[1]))
    except OSError:
        pass
    pages = os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 1 << 20
    return int(ROOM * pages * 4096 / 2)


def _fetch_all(
    name: ModelName, commit: str, variant: Variant, folder: Path, progress: Progress | None
) -> None:
    blobs = folder / "blobs"
    blobs.mkdir(parents=True, exist_ok=True)
    missing = [file for file in variant.all_files if not (blobs / file.etag).exists()]
    _check_room(missing, blobs)
    counted = _Counted(variant.size, variant.size - sum(file.size for file in missing), progress)

    def obtain(file: RemoteFile) -> None:
        with _alone(name.repo, file.etag):
            blob = blobs / file.etag
            if not blob.exists():
                part = blobs / f"{file.etag}.incomplete"
                remote.fetch(name, commit, file, part, counted.add)
                part.replace(blob)
        _link(folder / "snapshots" / commit / file.name, blob)

    with ThreadPoolExecutor(AT_ONCE, "dragoman-fetch") as pool:
        # The largest first: the others come beside it.
        coming = [pool.submit(obtain, file) for file in sorted(variant.all_files, key=lambda f: -f.size)]
        try:
            for done in as_completed(coming):
                done.result()
        except BaseException:
            # One has failed, or somebody has pressed Ctrl-C: gigabytes of others are not waited for.
            counted.stopped = True
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _check_room(missing: Sequence[RemoteFile], blobs: Path) -> None:
    parts = [blobs / f"{file.etag}.incomplete" for file in missing]
    needed = sum(file.size for file in missing) - sum(part.stat().st_size for part in parts if part.exists())
    free = shutil.disk_usage(blobs).free
    if needed > free:
        message = f"There is room for {free / 1e9:.1f} GB in {blobs}, and {needed / 1e9:.1f} GB are needed."
        raise ModelFileError(f"{message} HF_HOME names another folder.")


class _Counted:
    """Bytes of all files together, from several threads."""

    def __init__(self, total: int, done: int, progress: Progress | None) -> None:
        self._total, self._done, self._progress = total, done, progress
        self._lock = threading.Lock()
        self.stopped = False

    def add(self, count: int) -> None:
        if self.stopped:
            raise ModelFileError("The download was stopped; what is here stays.")
        with self._lock:
            self._done += count
            if self._progress is not None:
                self._progress(min(self._done, self._total), self._total)


@contextmanager
def _alone(repo: str, etag: str) -> Iterator[None]:
    """One process fetches a file, be it this or one of Hugging Face's library: it takes the same lock."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    folder = cache_root() / ".locks" / repo_folder(repo).name
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{etag}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _link(name: Path, blob: Path) -> None:
    name.parent.mkdir(parents=True, exist_ok=True)
    target = os.path.relpath(blob, name.parent)
    if name.is_symlink() and os.readlink(name) == target:
        return
    made = name.with_name(f".{name.name}.{os.getpid()}")
    made.unlink(missing_ok=True)
    made.symlink_to(target)
    made.replace(name)


def _write_ref(folder: Path, revision: str, commit: str) -> None:
    if revision != commit:
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / revision).write_text(commit)
