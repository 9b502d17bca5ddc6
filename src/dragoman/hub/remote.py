"""A hub over HTTP: which files a repository has, and their bytes, from where a download stopped.

All that comes from a hub is untrusted: names must stay below their folder, answers are bounded, contents are
compared with the sums that the list of files gave. The token goes to the hub's own host alone, not to the
hosts that it sends a download to.
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
from dragoman.hub.names import ModelName, RemoteFile

USUAL_ENDPOINT = "https://huggingface.co"
TIMEOUT_S = 30.0
TRIES = 6
"""Without a byte between them; a download that gets on is tried for as long as it does."""
MOST_LIST_BYTES = 64 << 20
PIECE = 512 << 10
"""So little that it is still in the processor's cache when it is written and summed up."""
BUFFERS = 8
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SUM = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


class RepoFiles(Struct, frozen=True):
    commit: str
    files: list[RemoteFile]


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
        if said := os.environ.get(variable, "").strip():
            return said
    try:
        return (home() / "token").read_text().strip() or None
    except OSError:
        return None


def list_files(name: ModelName) -> RepoFiles:
    """What the hub has under a name. Raises ModelFileError, with what to do."""
    path = f"/api/models/{quote(name.repo)}/revision/{quote(name.revision, safe='')}?blobs=true"
    body = _read_list(name, endpoint() + path)
    try:
        if len(body) > MOST_LIST_BYTES:
            raise ValueError
        info = msgspec.json.decode(body, type=_Info)
    except (msgspec.DecodeError, ValueError):
        raise ModelFileError(f"{endpoint()} does not answer as a hub of models does.") from None
    if not _COMMIT.fullmatch(info.sha):
        raise ModelFileError(f"{endpoint()} says no commit of {name.repo}.")
    return RepoFiles(info.sha, [file for each in info.siblings if (file := _file(each))])


def _read_list(name: ModelName, url: str) -> bytes:
    for failures in range(1, TRIES + 1):
        try:
            with _told(name), _open(url) as reply:
                return reply.read(MOST_LIST_BYTES + 1)
        except (OSError, HTTPException) as error:
            if failures == TRIES:
                raise ModelFileError(
                    f"{endpoint()} cannot be asked for {name.repo}: {_words(error)}."
                ) from None
            _pause(failures)
    raise AssertionError


def _pause(failures: int) -> None:
    time.sleep(min(0.25 * 2**failures, 8.0))


def _file(given: _Sibling) -> RemoteFile | None:
    """None for what has no name that may be one of a file here, or no sum to know it by."""
    parts = given.rfilename.split("/")
    if not given.rfilename.isprintable() or len(given.rfilename) > 512 or "\\" in given.rfilename:
        return None
    if any(part in ("", ".", "..") for part in parts):
        return None
    size = given.lfs.size if given.lfs else given.size
    made = RemoteFile(given.rfilename, size or 0, given.lfs.sha256 if given.lfs else None, given.blobId)
    return made if _SUM.fullmatch(made.etag) and size is not None else None


def fetch(
    name: ModelName, commit: str, file: RemoteFile, part: Path, progress: Callable[[int], None]
) -> None:
    """Has `part` be the file, beginning with what is in it. `progress` is told bytes as they come.

    Raises ModelFileError where the hub does not give it, or something else.
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
                        f"{file.name} of {name.repo} cannot be fetched: {_words(error)}. What is here stays."
                    )
                    raise ModelFileError(message) from None
                _pause(failures)
        found = partial.digest()
    if found != file.etag:
        part.unlink()
        raise ModelFileError(
            f"{file.name} of {name.repo} is not what the hub's list says (wrong sum); it was deleted."
            " Is HF_ENDPOINT a mirror that alters files?"
        )


def _receive(url: str, partial: "_PartialFile") -> None:
    at = partial.size
    with _open(url, {"Range": f"bytes={at}-"} if at else {}) as reply:
        if at and reply.status != 206:
            # The server has no ranges: all of it again.
            partial.restart()
        while missing := partial.missing:
            buffer = partial.take_buffer()
            count = reply.readinto(memoryview(buffer)[:missing])
            if not count:
                raise IncompleteRead(b"", missing)
            partial.add(buffer, count)


class _PartialFile:
    """A file while it comes, and the sum that a hub knows it by.

    Summing up takes longer than reading and writing do, so it is done beside them: a few buffers go around,
    filled and written here, summed up by a thread of their own.
    """

    def __init__(
        self, file: RemoteFile, out: IO[bytes], pool: ThreadPoolExecutor, progress: Callable[[int], None]
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
        """What an earlier try has left, unless it is more than there can be."""
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
        """The next bytes of the file; the buffer is not the caller's any more."""
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


# Requests.


class _SameHost(urllib.request.HTTPRedirectHandler):
    """The token stays with the host that it is for; nothing goes on from https to http."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        before, after = urlsplit(req.full_url), urlsplit(newurl)
        if before.scheme == "https" and after.scheme != "https":
            raise urllib.error.HTTPError(newurl, code, "a redirect to an open connection", headers, fp)
        made = super().redirect_request(req, fp, code, msg, headers, newurl)
        key = req.unredirected_hdrs.get("Authorization")
        if made is not None and key and (before.scheme, before.netloc) == (after.scheme, after.netloc):
            made.add_unredirected_header("Authorization", key)
        return made


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
    """Made once: to read the certificates of a system takes longer than a small file."""
    return urllib.request.build_opener(
        _SameHost, urllib.request.HTTPSHandler(context=ssl.create_default_context())
    )


@contextmanager
def _told(name: ModelName) -> Iterator[None]:
    """What a status means for a person."""
    if is_offline():
        raise ModelFileError(f"{name} is not on this machine, and HF_HUB_OFFLINE forbids to fetch it.")
    try:
        yield
    except urllib.error.HTTPError as error:
        error.close()
        if error.code in (401, 403):
            hint = (
                "its licence must be accepted on its page"
                if _token()
                else "set HF_TOKEN if it is gated or private"
            )
            raise ModelFileError(f"{endpoint()} does not give {name.repo} ({error.code}): {hint}.") from None
        if error.code == 404:
            raise ModelFileError(f"{endpoint()} has no {name.repo} ({name.revision}).") from None
        if error.code < 500 and error.code != 429:
            raise ModelFileError(f"{endpoint()} refuses {name.repo}: {error.code}.") from None
        raise
    except urllib.error.URLError as error:
        if isinstance(error.reason, ssl.SSLCertVerificationError):
            raise ModelFileError(f"The certificate of {endpoint()} is not valid.") from None
        raise


def _is_final(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in (28, 30, 13)  # no room, read only, not allowed


def _words(error: Exception) -> str:
    if isinstance(error, IncompleteRead):
        return "the connection was cut again and again"
    if isinstance(error, urllib.error.HTTPError):
        return f"it answers {error.code}"
    reason = getattr(error, "reason", error)
    return str(getattr(reason, "strerror", None) or reason or type(error).__name__)
