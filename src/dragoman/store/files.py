"""Uploaded files: their bytes in a folder, and metadata beside each.

    FOLDER/OWNER/file-0199....json     metadata of a file; the file exists once this does
    FOLDER/OWNER/file-0199...          its bytes
    FOLDER/OWNER/upload_0199....json   a file that is sent in parts
    FOLDER/OWNER/upload_0199.../       its parts
    FOLDER/OWNER/.new-...              a file that is being written and has no name yet

The folder is the only storage, without a database, so several servers may share it. Text from clients is
never part of a path: ids are generated here, and a requested id must have their format. Ids begin with the
time, so names sort by creation. Metadata of a file is written once and never changed; metadata of an upload
is replaced as a whole. Whenever a server is killed, a file exists completely or not at all.
"""

import asyncio
import hashlib
import logging
import os
import re
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Self, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from dragoman.errors import BadRequest, BodyTooLarge, Conflict, NotFound, ParamKey, StoreUnavailable
from dragoman.store.disk import (
    METADATA_SUFFIX,
    NEW,
    explain_trouble,
    is_name,
    names_after,
    new_name,
    open_bytes,
    read_metadata,
    write_all,
    write_metadata,
)
from dragoman.store.records import Page

logger = logging.getLogger("dragoman.store")

T = TypeVar("T")

FILE, UPLOAD, UPLOAD_PART = ParamKey("file"), ParamKey("upload"), ParamKey("upload_part")
"""What a request names: a file, an upload or a part."""
CONTENT = ParamKey("content")
"""The bytes of a file."""
PIECE = 256 * 1024
"""Bytes that are written or read at once."""
THREADS = 2
SWEEP_S = 60.0
UPLOAD_S = 3600
"""Seconds in which all parts of a file must arrive."""
LEFT_S = 24 * 3600
"""Age in seconds at which unfinished files are abandoned and deleted."""
EVERYBODY = "everybody"
"""The folder of requests without a key."""


class StoredFile(Struct, frozen=True):
    id: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int | None = None


class StoredUpload(Struct, frozen=True, kw_only=True):
    """A file that is sent in parts."""

    id: str
    filename: str
    purpose: str
    bytes: int
    """Bytes of all parts together, as announced at the start."""
    created_at: int
    expires_at: int
    keep_s: int | None
    """Seconds for which the complete file is kept."""
    status: str = "pending"
    file: StoredFile | None = None


class Quota(Struct, frozen=True, kw_only=True):
    """The limits of one owner."""

    files: int
    bytes: int
    file_bytes: int
    """Limit of a single file."""


class FileStore:
    """The store of uploaded files: `FileStore(folder, quota)`. Without a folder it uses a temporary one."""

    def __init__(
        self, folder: Path | None, quota: Quota, *, clock: Callable[[], float] | None = None
    ) -> None:
        self.quota = quota
        self.clock = clock or time.time
        self._given = folder
        self._made: tempfile.TemporaryDirectory[str] | None = None
        self._coming: Counter[str] = Counter()
        """Bytes per owner that are being written, and count as files only later."""
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._sweeping: asyncio.Task[None] | None = None
        self._expiries: dict[Path, int | None] = {}

    @property
    def folder(self) -> Path:
        if self._given is None:
            with self._lock:
                if self._made is None:
                    self._made = tempfile.TemporaryDirectory(prefix="dragoman-files-")
            return Path(self._made.name)
        return self._given

    def owner_folder(self, owner: str) -> Path:
        """Return the folder of an owner, named by the hash of the key."""
        path = self.folder / (owner or EVERYBODY)
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path

    async def run(self, work: Callable[[], T]) -> T:
        """Run disk work in a thread, because disks may be slow, and translate its OSErrors."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(THREADS, "dragoman-files")
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        except OSError as error:
            raise explain_trouble(error) from error

    async def start(self) -> None:
        """Start deleting expired files. Folders are created on first use."""
        await self._try_sweep()
        self._sweeping = asyncio.create_task(self._sweep_always())

    async def _sweep_always(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            await self._try_sweep()

    async def _try_sweep(self) -> None:
        try:
            await self.sweep()
        except StoreUnavailable:
            logger.warning("Expired files could not be deleted", exc_info=True)

    async def close(self) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.gather(self._sweeping, return_exceptions=True)
        pool, self._pool = self._pool, None
        if pool is not None:
            await asyncio.to_thread(pool.shutdown)
        if self._made is not None:
            self._made.cleanup()
            self._made = None

    # Files

    def incoming(self, owner: str, most: int | None = None) -> "IncomingFile":
        """Begin a file: `async with` it and write; it is deleted unless it is kept."""
        return IncomingFile(self, owner, min(most or self.quota.file_bytes, self.quota.file_bytes))

    async def get(self, owner: str, id_: str) -> StoredFile:
        return await self.run(lambda: self.read_file_metadata(owner, id_))

    def read_file_metadata(self, owner: str, id_: str) -> StoredFile:
        file = read_metadata(self.owner_folder(owner), id_, StoredFile)
        if file is None or not id_.startswith("file-") or self._is_over(file):
            raise NotFound(f"There is no file '{id_[:128]}'.", param=FILE, code="not_found")
        return file

    async def open(self, owner: str, id_: str) -> tuple[StoredFile, IO[bytes]]:
        """Open a file; its bytes stay readable even if it is deleted meanwhile."""

        def opened() -> tuple[StoredFile, IO[bytes]]:
            file = self.read_file_metadata(owner, id_)
            return file, open_bytes(self.owner_folder(owner) / id_)

        return await self.run(opened)

    async def pieces(self, opened: IO[bytes]) -> AsyncGenerator[bytes, None]:
        with opened:
            while piece := await self.run(partial(opened.read, PIECE)):
                yield piece

    async def delete(self, owner: str, id_: str) -> None:
        await self.get(owner, id_)
        await self.run(lambda: _remove_file(self.owner_folder(owner), id_))

    async def page(
        self, owner: str, *, after: str | None, limit: int, descending: bool, purpose: str | None = None
    ) -> Page[StoredFile]:
        return await self.run(partial(self._page, owner, after, limit, descending, purpose))

    def _page(
        self, owner: str, after: str | None, limit: int, descending: bool, purpose: str | None
    ) -> Page[StoredFile]:
        files: list[StoredFile] = []
        for id_ in names_after(self.owner_folder(owner), "file-", after, descending):
            file = read_metadata(self.owner_folder(owner), id_, StoredFile)
            if file is None or self._is_over(file) or (purpose and file.purpose != purpose):
                continue
            if len(files) == limit:
                return Page(files, True)
            files.append(file)
        return Page(files, False)

    def _is_over(self, file: StoredFile) -> bool:
        return file.expires_at is not None and file.expires_at <= self.clock()

    # Files sent in parts.

    async def begin_upload(
        self, owner: str, *, filename: str, purpose: str, size: int, keep_s: int | None
    ) -> StoredUpload:
        now = int(self.clock())
        upload = StoredUpload(
            id=new_name("upload_", self.clock()),
            filename=clean_name(filename),
            purpose=purpose,
            bytes=size,
            created_at=now,
            expires_at=now + UPLOAD_S,
            keep_s=keep_s,
        )

        def work() -> None:
            self.check_room(owner, size)
            (self.owner_folder(owner) / upload.id).mkdir(mode=0o700)
            write_metadata(self.owner_folder(owner), upload.id, upload)

        await self.run(work)
        return upload

    def _upload(self, owner: str, id_: str) -> StoredUpload:
        upload = (
            read_metadata(self.owner_folder(owner), id_, StoredUpload) if id_.startswith("upload_") else None
        )
        if upload is None:
            raise NotFound(f"There is no upload '{id_[:128]}'.", param=UPLOAD, code="not_found")
        if upload.status == "pending" and upload.expires_at <= self.clock():
            upload = replace(upload, status="expired")
        return upload

    def pending(self, owner: str, id_: str) -> StoredUpload:
        upload = self._upload(owner, id_)
        if upload.status != "pending":
            message = f"This upload is {upload.status}; start another one."
            raise Conflict(message, param=UPLOAD, code="invalid_state")
        return upload

    async def cancel_upload(self, owner: str, id_: str) -> StoredUpload:
        def work() -> StoredUpload:
            over = replace(self.pending(owner, id_), status="cancelled")
            write_metadata(self.owner_folder(owner), id_, over)
            shutil.rmtree(self.owner_folder(owner) / id_, ignore_errors=True)
            return over

        return await self.run(work)

    async def complete_upload(
        self, owner: str, id_: str, parts: Sequence[str], md5: str | None
    ) -> StoredUpload:
        """Join the parts, in this order, to a file."""
        upload = await self.run(lambda: self.pending(owner, id_))
        paths = [self.owner_folder(owner) / id_ / part for part in parts]
        for number, (part, path) in enumerate(zip(parts, paths, strict=True)):
            if not is_name(part, "part_") or not await self.run(path.is_file):
                message = f"Part {number + 1}, '{part[:128]}', is not a part of this upload."
                raise BadRequest(message, param=UPLOAD_PART, code="not_found")
        if len({*parts}) < len(parts):
            raise BadRequest("A part is named twice.", param=UPLOAD_PART, code="invalid_value")
        size = await self.run(lambda: sum(path.stat().st_size for path in paths))
        if size != upload.bytes:
            message = f"The parts have {size} bytes, but the upload was created with {upload.bytes}."
            raise BadRequest(message, param=UPLOAD_PART, code="invalid_value")
        file = await self._join(owner, upload, paths, md5)
        over = replace(upload, status="completed", file=file)
        await self.run(lambda: write_metadata(self.owner_folder(owner), id_, over))
        await self.run(partial(shutil.rmtree, self.owner_folder(owner) / id_, True))
        return over

    async def _join(
        self, owner: str, upload: StoredUpload, paths: Sequence[Path], md5: str | None
    ) -> StoredFile:
        """Join the parts; their bytes count already."""
        digest = hashlib.md5(usedforsecurity=False)
        incoming = IncomingFile(self, owner, upload.bytes, counts=False)
        async with incoming:
            for path in paths:
                async for piece in self.pieces(await self.run(partial(open_bytes, path))):
                    await self.run(partial(digest.update, piece))
                    await incoming.write(piece)
            if md5 is not None and digest.hexdigest() != md5.lower():
                message = "The MD5 checksum does not match the received bytes; send them again."
                raise BadRequest(message, param=ParamKey("md5"), code="checksum_mismatch")
            return await incoming.commit(upload.filename, upload.purpose, upload.keep_s)

    # Quotas and expiry.

    def check_room(self, owner: str, more: int) -> int:
        """Raise if the owner has no room for a file of `more` bytes; return how many bytes may follow."""
        files, size = _taken(self.owner_folder(owner))
        if files >= self.quota.files:
            message = f"This key has {files} of {self.quota.files} files; delete some."
            raise BadRequest(message, param=CONTENT, code="quota_exceeded")
        if more > self.quota.file_bytes:
            raise self.too_large()
        left = self.quota.bytes - size - self._coming[owner] - more
        if left < 0:
            raise self.too_much()
        return left

    def too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"The file is larger than {self.quota.file_bytes} bytes.", param=CONTENT)

    def too_much(self) -> BodyTooLarge:
        message = f"The files of this key would exceed {self.quota.bytes} bytes; delete some."
        return BodyTooLarge(message, param=CONTENT, code="quota_exceeded")

    def coming(self, owner: str, more: int) -> None:
        with self._lock:
            self._coming[owner] += more

    async def sweep(self) -> None:
        """Delete expired files, and abandoned unfinished ones."""
        await self.run(self._sweep)

    def places(self, pattern: str) -> list[Path]:
        """Return the matching paths of all owners."""
        there = self._given is not None or self._made is not None
        return list(self.folder.glob(f"*/{pattern}")) if there else []

    def _sweep(self) -> None:
        now = self.clock()
        for path in self.places("*"):
            if path.name.startswith(NEW) or _is_unsaid(path):
                with suppress(OSError):
                    if path.stat().st_mtime < now - LEFT_S:
                        path.unlink()
            elif path.suffix == METADATA_SUFFIX and (over := self._expiry(path)) is not None and over <= now:
                _remove_file(path.parent, path.stem)
                self._expiries.pop(path, None)

    def _expiry(self, path: Path) -> int | None:
        """Return the expiry, which is read once, because it never changes. An upload is kept for another
        `UPLOAD_S`.
        """
        if path not in self._expiries:
            # The fields that files and uploads share are read as those of a file.
            metadata = read_metadata(path.parent, path.stem, StoredFile)
            more = UPLOAD_S if path.name.startswith("upload_") else 0
            self._expiries[path] = metadata.expires_at + more if metadata and metadata.expires_at else None
        return self._expiries[path]


class IncomingFile:
    """A file that is being written: it counts for its owner from the first byte, and gets its name at the
    end.
    """

    def __init__(self, shelf: FileStore, owner: str, most: int, *, counts: bool = True) -> None:
        self.size = 0
        self._shelf = shelf
        self._owner = owner
        self._most = self._room = most
        self._counts = counts
        self._place: Path | None = None
        self._file: IO[bytes] | None = None
        self._held = bytearray()

    async def __aenter__(self) -> Self:
        def opened() -> None:
            if self._counts:
                self._room = self._shelf.check_room(self._owner, 0)
            number, name = tempfile.mkstemp(prefix=NEW, dir=self._shelf.owner_folder(self._owner))
            self._place, self._file = Path(name), os.fdopen(number, "wb", buffering=0)

        await self._shelf.run(opened)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Delete the temporary file; a file that was kept has another name by now."""
        self._shelf.coming(self._owner, -self.size if self._counts else 0)
        file, path = self._file, self._place

        def dropped() -> None:
            if file is not None:
                file.close()
            if path is not None:
                path.unlink(missing_ok=True)

        # Completes even if the caller is cancelled.
        await asyncio.shield(self._shelf.run(dropped))

    async def write(self, data: bytes) -> None:
        self.size += len(data)
        if self._counts:
            self._shelf.coming(self._owner, len(data))
        if self.size > self._most:
            raise self._shelf.too_large()
        if self.size > self._room:
            raise self._shelf.too_much()
        self._held += data
        if len(self._held) >= PIECE:
            await self._flush()

    async def _flush(self) -> None:
        held, self._held = self._held, bytearray()
        file = self._file
        assert file is not None
        if held:
            await self._shelf.run(lambda: write_all(file, held))

    async def commit(self, filename: str, purpose: str, keep_s: int | None) -> StoredFile:
        """Give the file its name. It is kept for `keep_s` seconds; None: until it is deleted."""
        await self._flush()
        now = int(self._shelf.clock())
        expires_at = None if keep_s is None else now + keep_s
        id_ = new_name("file-", self._shelf.clock())
        file = StoredFile(id_, clean_name(filename), purpose, self.size, now, expires_at)
        await self._shelf.run(lambda: self._keep(file))
        return file

    def _keep(self, file: StoredFile) -> None:
        assert self._file is not None and self._place is not None
        if self._counts:
            # Other files of this key may have been finished meanwhile; this one still counts as being
            # written.
            self._shelf.check_room(self._owner, 0)
        os.fsync(self._file.fileno())
        folder = self._shelf.owner_folder(self._owner)
        self._place.rename(folder / file.id)
        write_metadata(folder, file.id, file)

    async def commit_part(self, upload: str) -> str:
        """Keep the file as a part of an upload; returns its id."""
        await self._flush()
        name = new_name("part_", self._shelf.clock())

        def work() -> None:
            assert self._file is not None and self._place is not None
            declared = self._shelf.pending(self._owner, upload).bytes
            folder = self._shelf.owner_folder(self._owner) / upload
            there = sum(part.stat().st_size for part in folder.iterdir())
            if there + self.size > declared:
                message = (
                    f"The parts have {there + self.size} bytes, but the upload was created with {declared}."
                )
                raise BodyTooLarge(message, param=CONTENT, code="limit_exceeded")
            self._shelf.check_room(self._owner, 0)
            os.fsync(self._file.fileno())
            self._place.rename(folder / name)

        await self._shelf.run(work)
        return name


def clean_name(filename: str) -> str:
    """Reduce a client's file name to one line without folders. It is only displayed, never used as a path."""
    last = re.split(r"[/\\]", filename)[-1]
    plain = "".join(letter for letter in last if letter.isprintable()).strip()
    return plain[:255] or "file"


def _is_unsaid(path: Path) -> bool:
    """Whether a file has no metadata, because its writer was killed."""
    return is_name(path.name, "file-") and not path.with_name(f"{path.name}{METADATA_SUFFIX}").exists()


def _remove_file(folder: Path, id_: str) -> None:
    """Delete a file, metadata first: without it the file does not exist."""
    (folder / f"{id_}{METADATA_SUFFIX}").unlink(missing_ok=True)
    if id_.startswith("upload_"):
        shutil.rmtree(folder / id_, ignore_errors=True)
    else:
        (folder / id_).unlink(missing_ok=True)


def _taken(folder: Path) -> tuple[int, int]:
    """Count files and uploads, and the bytes of everything in the folder."""
    count = size = 0
    for entry in os.scandir(folder):
        with suppress(FileNotFoundError):
            if entry.name.endswith(METADATA_SUFFIX):
                count += "batch_" not in entry.name
            elif entry.is_dir():
                # The input of a batch is a link to a file, which counts there.
                size += sum(one.stat().st_size for one in os.scandir(entry.path) if one.name != "input")
            elif not entry.name.startswith(NEW):
                size += entry.stat().st_size
    return count, size
