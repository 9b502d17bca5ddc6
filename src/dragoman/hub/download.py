"""Finds a model on this machine by name, or downloads it."""

import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from dragoman.errors import ModelFileError
from dragoman.hub import http_client
from dragoman.hub.cache import CachedModel, cache_root, find_cached, repo_folder
from dragoman.hub.names import ModelName, ModelVariant, RepoFile, choose_variant, list_variants

AT_ONCE = 4
"""Maximum number of concurrent downloads."""
ROOM = 0.7
"""Fraction of free memory for weights: the rest is for the KV cache and other programs."""

Progress: TypeAlias = Callable[[int, int], None]
"""Callback with the bytes done and the total bytes."""
Check: TypeAlias = Callable[[ModelVariant], None]
"""Callback that may raise for an unusable variant before anything is downloaded."""


def locate(
    name: ModelName,
    progress: Progress | None = None,
    *,
    room: int | None = None,
    check: Check | None = None,
    projector: bool = True,
) -> CachedModel:
    """Return the model, downloading it if necessary. A name without quantization matches any variant on this
    machine.
    """
    return find_cached(name) or pull(name, progress, room=room, check=check, projector=projector)


def pull(
    name: ModelName,
    progress: Progress | None = None,
    *,
    room: int | None = None,
    check: Check | None = None,
    projector: bool = True,
) -> CachedModel:
    """Download the hub's current version of a model; only missing files are fetched.

    `room` is the memory for weights in bytes, if no quantization is named. With `projector`, the projector
    for images or audio is included.
    """
    if name.kind == "ollama":
        raise ModelFileError(
            f"{name} is not in Ollama's store; run `ollama pull {name.repo}:{name.selector}`."
        )
    listing = http_client.list_files(name)
    variant = choose_variant(list_variants(listing.files), name, room or free_memory(), listing.files)
    if check is not None:
        check(variant)
    if not projector:
        variant = ModelVariant(variant.label, variant.files)
    folder = repo_folder(name.repo)
    try:
        _fetch_all(name, listing.commit, variant, folder, progress)
        _write_ref(folder, name.revision, listing.commit)
    except OSError as error:
        raise ModelFileError(
            f"{folder} cannot be written: {error.strerror}; set HF_HOME to another folder."
        ) from None
    model = find_cached(ModelName(name.repo, variant.first.name, listing.commit))
    if model is None:
        raise ModelFileError(f"{name} was downloaded but is not in the cache; pull it again.")
    return model


def free_memory() -> int:
    """Return the bytes available for weights, estimated from the system's memory."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(ROOM * 1024 * int(line.split()[1]))
    except OSError:
        pass
    pages = os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 1 << 20
    return int(ROOM * pages * 4096 / 2)


def _fetch_all(
    name: ModelName, commit: str, variant: ModelVariant, folder: Path, progress: Progress | None
) -> None:
    blobs = folder / "blobs"
    blobs.mkdir(parents=True, exist_ok=True)
    missing = [file for file in variant.all_files if not (blobs / file.etag).exists()]
    _check_room(missing, blobs)
    counted = _DownloadProgress(variant.size, variant.size - sum(file.size for file in missing), progress)

    def obtain(file: RepoFile) -> None:
        with _alone(name.repo, file.etag):
            blob = blobs / file.etag
            if not blob.exists():
                part = blobs / f"{file.etag}.incomplete"
                http_client.fetch(name, commit, file, part, counted.add)
                part.replace(blob)
        _link(folder / "snapshots" / commit / file.name, blob)

    with ThreadPoolExecutor(AT_ONCE, "dragoman-fetch") as pool:
        # Largest first; the others are fetched at the same time.
        coming = [pool.submit(obtain, file) for file in sorted(variant.all_files, key=lambda f: -f.size)]
        try:
            for done in as_completed(coming):
                done.result()
        except BaseException:
            # A download failed, or the user pressed Ctrl-C: do not wait for gigabytes of others.
            counted.stopped = True
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _check_room(missing: Sequence[RepoFile], blobs: Path) -> None:
    parts = [blobs / f"{file.etag}.incomplete" for file in missing]
    needed = sum(file.size for file in missing) - sum(part.stat().st_size for part in parts if part.exists())
    free = shutil.disk_usage(blobs).free
    if needed > free:
        message = f"{blobs} has {free / 1e9:.1f} GB free; {needed / 1e9:.1f} GB are needed."
        raise ModelFileError(f"{message} Free space, or set HF_HOME to another folder.")


class _DownloadProgress:
    """Progress of all files together, counted by several threads."""

    def __init__(self, total: int, done: int, progress: Progress | None) -> None:
        self._total, self._done, self._progress = total, done, progress
        self._lock = threading.Lock()
        self.stopped = False

    def add(self, count: int) -> None:
        if self.stopped:
            raise ModelFileError("The download was stopped; run it again to continue.")
        with self._lock:
            self._done += count
            if self._progress is not None:
                self._progress(min(self._done, self._total), self._total)


@contextmanager
def _alone(repo: str, etag: str) -> Iterator[None]:
    """Lock a file for download, also against Hugging Face's library, which uses the same lock."""
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
    link = name.with_name(f".{name.name}.{os.getpid()}")
    link.unlink(missing_ok=True)
    link.symlink_to(target)
    link.replace(name)


def _write_ref(folder: Path, revision: str, commit: str) -> None:
    if revision != commit:
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / revision).write_text(commit)
