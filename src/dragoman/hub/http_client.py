"""HTTP client of a model hub: lists a repository's files, and downloads them with resume.

Everything from a hub is untrusted: names must stay inside their folder, responses are bounded, and contents
are checked against the checksums in the list of files. The token is sent to the hub's own host only, not to
hosts that it redirects a download to.
"""

import hashlib
import os
import re
import ssl
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from http.client import HTTPException, HTTPResponse, IncompleteRead
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote, urlsplit

import msgspec
from msgspec import Struct

from dragoman._version import __version__
from dragoman.errors import ModelFileError
from dragoman.hub.cache import home
from dragoman.hub.names import ModelName, RepoFile

USUAL_ENDPOINT = "https://huggingface.co"
TIMEOUT_S = 30.0
TRIES = 6
"""Maximum number of consecutive failures without progress; a download that progresses is retried without
limit.
"""
MOST_LIST_BYTES = 64 << 20
PIECE = 512 << 10
"""Size of a buffer: small enough to stay in the CPU cache while it is written and hashed."""
BUFFERS = 8
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SUM = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


class RepoListing(Struct, frozen=True):
    commit: str
    files: list[RepoFile]


class _Lfs(Struct):
    sha256: str
    size: int


class _Sibling(Struct):
    rfilename: str
    size: int | None = None
    blobId: str | None = None
    lfs: _Lfs | None = None


class _Info(Struct):
    sha: str
    siblings: list[_Sibling] = []


def endpoint() -> str:
    return (os.environ.get("HF_ENDPOINT") or USUAL_ENDPOINT).rstrip("/")


def is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")


def _token() -> str | None:
    for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if token := os.environ.get(variable, "").strip():
            return token
    try:
        return (home() / "token").read_text().strip() or None
    except OSError:
        return None


def list_files(name: ModelName) -> RepoListing:
    """List the files of a repository. Raises ModelFileError with a remedy."""
    path = f"/api/models/{quote(name.repo)}/revision/{quote(name.revision, safe='')}?blobs=true"
    body = _read_list(name, endpoint() + path)
    try:
        if len(body) > MOST_LIST_BYTES:
            raise ValueError
        info = msgspec.json.decode(body, type=_Info)
    except (msgspec.DecodeError, ValueError):
        raise ModelFileError(f"{endpoint()} does not respond like a model hub; check HF_ENDPOINT.") from None
    if not _COMMIT.fullmatch(info.sha):
        raise ModelFileError(f"{endpoint()} returned no commit of {name.repo}; check HF_ENDPOINT.")
    return RepoListing(info.sha, [file for sibling in info.siblings if (file := _file(sibling))])


def _read_list(name: ModelName, url: str) -> bytes:
    for failures in range(1, TRIES + 1):
        try:
            with _told(name), _open(url) as reply:
                return reply.read(MOST_LIST_BYTES + 1)
        except (OSError, HTTPException) as error:
            if failures == TRIES:
                raise ModelFileError(
                    f"{endpoint()} could not be queried for {name.repo}: {_words(error)}; retry later."
                ) from None
            _pause(failures)
    raise AssertionError


def _pause(failures: int) -> None:
    time.sleep(min(0.25 * 2**failures, 8.0))


def _file(sibling: _Sibling) -> RepoFile | None:
    """Return a file of the list; None if its name is not a valid path here, or it has no checksum."""
    parts = sibling.rfilename.split("/")
    if not sibling.rfilename.isprintable() or len(sibling.rfilename) > 512 or "\\" in sibling.rfilename:
        return None
    if any(part in ("", ".", "..") for part in parts):
        return None
    size = sibling.lfs.size if sibling.lfs else sibling.size
    file = RepoFile(sibling.rfilename, size or 0, sibling.lfs.sha256 if sibling.lfs else None, sibling.blobId)
    return file if _SUM.fullmatch(file.etag) and size is not None else None


def fetch(name: ModelName, commit: str, file: RepoFile, part: Path, progress: Callable[[int], None]) -> None:
    """Download a file into `part`, resuming after its current contents. `progress` is called with the bytes
    received.

    Raises ModelFileError if the hub does not serve the file, or serves another one.
    """
    url = f"{endpoint()}/{quote(name.repo)}/resolve/{commit}/{quote(file.name)}"
    with part.open("ab", buffering=0) as out, ThreadPoolExecutor(1, "dragoman-sum") as summing:
        partial = _PartialFile(file, out, summing, progress)
        partial.take_over(part)
        failures = 0
        while partial.size < file.size:
            before = partial.size
            try:
                with _told(name):
                    _receive(url, partial)
            except (OSError, HTTPException) as error:
                failures = failures + 1 if partial.size == before else 1
                if failures == TRIES or _is_final(error):
                    message = (
                        f"{file.name} of {name.repo} could not be downloaded: {_words(error)}. "
                        "Run it again to continue."
                    )
                    raise ModelFileError(message) from None
                _pause(failures)
        digest = partial.digest()
    if digest != file.etag:
        part.unlink()
        raise ModelFileError(
            f"{file.name} of {name.repo} does not match the hub's checksum and was deleted."
            " Check whether HF_ENDPOINT is a mirror that alters files."
        )


def _receive(url: str, partial: "_PartialFile") -> None:
    at = partial.size
    with _open(url, {"Range": f"bytes={at}-"} if at else {}) as reply:
        if at and reply.status != 206:
            # The server does not support ranges: start again.
            partial.restart()
        while missing := partial.missing:
            buffer = partial.take_buffer()
            count = reply.readinto(memoryview(buffer)[:missing])
            if not count:
                raise IncompleteRead(b"", missing)
            partial.add(buffer, count)


class _PartialFile:
    """A file during download, with its checksum.

    Hashing takes longer than reading and writing, so it runs in parallel: a few buffers circulate, filled and
    written here, hashed by another thread.
    """

    def __init__(
        self, file: RepoFile, out: IO[bytes], pool: ThreadPoolExecutor, progress: Callable[[int], None]
    ) -> None:
        self._file, self._out, self._pool, self._progress = file, out, pool, progress
        self._free = [bytearray(PIECE) for _ in range(BUFFERS)]
        self._summed: deque[tuple[Future[None], bytearray]] = deque()
        self._begin()

    def _begin(self) -> None:
        self.size = 0
        self._sum = hashlib.sha256() if self._file.sha256 else hashlib.sha1(usedforsecurity=False)
        if not self._file.sha256:
            self._sum.update(b"blob %d\0" % self._file.size)

    @property
    def missing(self) -> int:
        return self._file.size - self.size

    def take_over(self, part: Path) -> None:
        """Continue an earlier download, unless it is longer than the file can be."""
        if part.stat().st_size > self._file.size:
            self._out.truncate(0)
        with part.open("rb", buffering=0) as before:
            while count := before.readinto(buffer := self.take_buffer()):
                self._note(buffer, count)

    def restart(self) -> None:
        self._wait()
        self._out.truncate(0)
        self._progress(-self.size)
        self._begin()

    def take_buffer(self) -> bytearray:
        if self._free:
            return self._free.pop()
        done, buffer = self._summed.popleft()
        done.result()
        return buffer

    def add(self, buffer: bytearray, count: int) -> None:
        """Append the next bytes; the caller must not use the buffer afterwards."""
        view = memoryview(buffer)[:count]
        while view:
            view = view[self._out.write(view) :]
        self._note(buffer, count)

    def _note(self, buffer: bytearray, count: int) -> None:
        self._summed.append((self._pool.submit(self._sum.update, memoryview(buffer)[:count]), buffer))
        self.size += count
        self._progress(count)

    def digest(self) -> str:
        self._wait()
        return self._sum.hexdigest()

    def _wait(self) -> None:
        while self._summed:
            done, buffer = self._summed.popleft()
            done.result()
            self._free.append(buffer)


# Requests


class _SameHost(urllib.request.HTTPRedirectHandler):
    """Keeps the token on its own host, and refuses redirects from https to http."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        before, after = urlsplit(req.full_url), urlsplit(newurl)
        if before.scheme == "https" and after.scheme != "https":
            raise urllib.error.HTTPError(newurl, code, "a redirect from https to http", headers, fp)
        redirected = super().redirect_request(req, fp, code, msg, headers, newurl)
        key = req.unredirected_hdrs.get("Authorization")
        if redirected is not None and key and (before.scheme, before.netloc) == (after.scheme, after.netloc):
            redirected.add_unredirected_header("Authorization", key)
        return redirected


def _open(url: str, headers: dict[str, str] | None = None) -> HTTPResponse:
    request = urllib.request.Request(
        url, headers={"User-Agent": f"dragoman/{__version__}", **(headers or {})}
    )
    if token := _token():
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    reply: HTTPResponse = _opener().open(request, timeout=TIMEOUT_S)
    return reply


@cache
def _opener() -> urllib.request.OpenerDirector:
    """Build the opener once: reading the system's certificates takes longer than a small file."""
    return urllib.request.build_opener(
        _SameHost, urllib.request.HTTPSHandler(context=ssl.create_default_context())
    )


@contextmanager
def _told(name: ModelName) -> Iterator[None]:
    """Convert HTTP errors to errors with a remedy."""
    if is_offline():
        raise ModelFileError(
            f"{name} is not on this machine, and HF_HUB_OFFLINE forbids downloads; unset it."
        )
    try:
        yield
    except urllib.error.HTTPError as error:
        error.close()
        if error.code in (401, 403):
            hint = (
                "accept its licence on its web page" if _token() else "set HF_TOKEN if it is gated or private"
            )
            raise ModelFileError(
                f"{endpoint()} denies access to {name.repo} ({error.code}): {hint}."
            ) from None
        if error.code == 404:
            raise ModelFileError(
                f"{endpoint()} has no {name.repo} ({name.revision}); check the name."
            ) from None
        if error.code < 500 and error.code != 429:
            raise ModelFileError(f"{endpoint()} refused {name.repo} with status {error.code}.") from None
        raise
    except urllib.error.URLError as error:
        if isinstance(error.reason, ssl.SSLCertVerificationError):
            raise ModelFileError(
                f"The certificate of {endpoint()} is not valid; check HF_ENDPOINT and the system's "
                "certificates."
            ) from None
        raise


def _is_final(error: Exception) -> bool:
    # disk full, read-only, permission denied
    return isinstance(error, OSError) and error.errno in (28, 30, 13)


def _words(error: Exception) -> str:
    if isinstance(error, IncompleteRead):
        return "the connection was interrupted repeatedly"
    if isinstance(error, urllib.error.HTTPError):
        return f"it responds with status {error.code}"
    reason = getattr(error, "reason", error)
    return str(getattr(reason, "strerror", None) or reason or type(error).__name__)
