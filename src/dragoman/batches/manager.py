"""Manages batches: creates, finds, runs and cancels them. Each has a folder beside the files of its owner.

    FOLDER/OWNER/batch_0199....json       its metadata, replaced as a whole when it changes
    FOLDER/OWNER/batch_0199.../input      the lines: a hard link; the uploaded file may be deleted meanwhile
                           .../output     results of lines that succeeded so far
                           .../errors     results of the others
                           .../lock       locked by the server that runs the batch, until its process ends
                           .../cancel     exists if the batch is to be cancelled

Servers that share the folder share the batches. A server that finds an unfinished batch which no server runs
resumes it from its stored state. Only the holder of the lock changes the metadata of a batch.
"""

import asyncio
import logging
import os
import shutil
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import IO, TypeAlias

from msgspec.structs import replace

from dragoman.api.batches import (
    MOST_FAULTS,
    WINDOW,
    WINDOW_S,
    BatchLineCodec,
    LineReply,
    LineRequest,
    cannot_cancel,
    model_in,
    other_batch,
    unknown_batch,
)
from dragoman.api.files import BATCH_OUTPUT, BATCH_S
from dragoman.batches.line_processor import LineProcessor, SeenIds, lines_of
from dragoman.errors import BadRequest, StoreUnavailable
from dragoman.limits import Limits
from dragoman.store import Page
from dragoman.store.disk import (
    METADATA_SUFFIX,
    is_name,
    names_after,
    new_name,
    read_metadata,
    sync_folder,
    take_lock,
    write_metadata,
)
from dragoman.store.files import FileStore, StoredFile
from dragoman.store.records import BatchLineError, StoredBatch

logger = logging.getLogger("dragoman.batches")

AnswerLine: TypeAlias = Callable[[str, LineRequest], Awaitable[LineReply]]
"""Answers a line on behalf of an owner."""
TERMINAL_STATES = frozenset({"completed", "failed", "expired", "cancelled"})
POLL_INTERVAL_S = 5.0
"""Seconds between two searches for batches that no server runs."""
NOTE_S = 1.0
"""Seconds between two writes of the counts, and two checks for a cancellation by another server."""
KEEP_S = BATCH_S
"""Seconds for which metadata of a finished batch is kept."""


class BatchManager:
    """Runs batches: `answer` answers one line of an owner; `most()` lines of all batches may run at once."""

    def __init__(
        self,
        files: FileStore,
        spellings: Mapping[str, BatchLineCodec],
        answer: AnswerLine,
        most: Callable[[], int],
        limits: Limits,
        check_model: Callable[[str], None],
    ) -> None:
        self._files = files
        self._spellings = spellings
        self._answer = answer
        self._all = most
        self._limits = limits
        self._check_model = check_model
        self._making: dict[str, asyncio.Task[None]] = {}
        self._runs: dict[str, LineProcessor] = {}
        self.wakes: dict[str, asyncio.Event] = {}
        """For each running batch: set when there may be a reason to end it."""
        self._looking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._look()
        self._looking = asyncio.create_task(self._look_always())

    async def stop(self) -> None:
        """Stop running batches; the next server resumes them."""
        tasks = [*self._making.values(), *([self._looking] if self._looking else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # Operations on batches.

    async def create(
        self,
        kind: str,
        owner: str,
        endpoint: str,
        put_input: Callable[[Path], str | None],
        *,
        metadata: dict[str, str] | None = None,
        keep_s: int | None = None,
        key: str | None = None,
        total: int = 0,
    ) -> StoredBatch:
        """Create a batch. `put_input` writes its lines to a path and returns the id of the uploaded file.

        With a `key`, a repeated request gets the existing batch. `total` is the number of lines, if known.
        """
        now = self._files.clock()
        batch = StoredBatch(
            id=new_name(self._spellings[kind].prefix, now),
            kind=kind,
            owner=owner,
            endpoint=endpoint,
            window=WINDOW,
            status="validating",
            created_at=int(now),
            expires_at=int(now) + WINDOW_S,
            metadata=metadata,
            keep_s=keep_s,
            total=total,
        )
        stored_batch = await self._files.run(lambda: self._create(batch, put_input, key))
        self._start_run(stored_batch)
        return self._told(stored_batch)

    def _create(
        self, batch: StoredBatch, put_input: Callable[[Path], str | None], key: str | None
    ) -> StoredBatch:
        folder = self._files.owner_folder(batch.owner)
        self._check_room(folder)
        work = folder / batch.id
        work.mkdir(mode=0o700)
        try:
            batch = replace(batch, input_file=put_input(work / "input"))
            if key is not None and (there := self._known(folder, key, batch)) is not None:
                shutil.rmtree(work, ignore_errors=True)
                return there
            write_metadata(folder, batch.id, batch)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
        return batch

    def _check_room(self, folder: Path) -> None:
        there = sum("batch_" in name and name.endswith(METADATA_SUFFIX) for name in os.listdir(folder))
        if there >= self._limits.batches:
            message = (
                f"This key has {there} batches of the last 30 days, which is the limit; wait "
                "until older ones expire."
            )
            raise BadRequest(message, code="quota_exceeded")

    def _known(self, folder: Path, key: str, batch: StoredBatch) -> StoredBatch | None:
        """Return the batch created with this key before; else note this one under the key."""
        path = folder / f".key-{blake2b(key.encode(errors='surrogatepass'), digest_size=16).hexdigest()}"
        try:
            with path.open("x") as note:
                note.write(batch.id)
            return None
        except FileExistsError:
            metadata = read_metadata(folder, path.read_text(), StoredBatch)
        if metadata is None:
            # The noted batch is deleted.
            path.write_text(batch.id)
            return None
        asked = ("kind", "endpoint", "input_file", "metadata", "keep_s")
        if any(getattr(metadata, name) != getattr(batch, name) for name in asked):
            raise other_batch()
        return metadata

    async def get(self, kind: str, owner: str, id_: str) -> StoredBatch:
        return self._told(await self._files.run(partial(self._found, kind, owner, id_)))

    def _found(self, kind: str, owner: str, id_: str) -> StoredBatch:
        folder = self._files.owner_folder(owner)
        metadata = (
            read_metadata(folder, id_, StoredBatch) if is_name(id_, self._spellings[kind].prefix) else None
        )
        if metadata is None or metadata.kind != kind:
            raise unknown_batch(id_)
        return _with_cancel(folder, metadata)

    async def page(
        self, kind: str, owner: str, *, after: str | None, limit: int, descending: bool
    ) -> Page[StoredBatch]:
        def work() -> Page[StoredBatch]:
            folder, data = self._files.owner_folder(owner), list[StoredBatch]()
            for name in names_after(folder, self._spellings[kind].prefix, after, descending):
                batch = read_metadata(folder, name, StoredBatch)
                if batch is not None and batch.kind == kind:
                    if len(data) == limit:
                        return Page(data, True)
                    data.append(_with_cancel(folder, batch))
            return Page(data, False)

        page = await self._files.run(work)
        return Page([self._told(batch) for batch in page.data], page.has_more)

    async def cancel(self, kind: str, owner: str, id_: str) -> StoredBatch:
        def work() -> StoredBatch:
            stored_batch = self._found(kind, owner, id_)
            if stored_batch.status in TERMINAL_STATES - {"cancelled"}:
                raise cannot_cancel(stored_batch.status)
            if stored_batch.status not in TERMINAL_STATES:
                (self._files.owner_folder(owner) / id_ / "cancel").touch()
            return self._found(kind, owner, id_)

        batch = await self._files.run(work)
        if id_ in self.wakes:
            self.wakes[id_].set()
        self._start_run(batch)
        return self._told(batch)

    async def delete(self, kind: str, owner: str, id_: str) -> StoredBatch:
        """Delete a batch, if it has finished."""

        def work() -> StoredBatch:
            batch = self._found(kind, owner, id_)
            if batch.status in TERMINAL_STATES:
                _remove_batch(self._files.owner_folder(owner), id_)
            return batch

        return await self._files.run(work)

    async def results(self, owner: str, id_: str) -> tuple[int, IO[bytes]] | None:
        """Open the results of a batch with a single result file; returns size and file."""

        def work() -> tuple[int, IO[bytes]] | None:
            path = self._files.owner_folder(owner) / id_ / "output"
            if not path.exists():
                return None
            file = path.open("rb")
            return os.fstat(file.fileno()).st_size, file

        return await self._files.run(work)

    def _told(self, batch: StoredBatch) -> StoredBatch:
        """Return the batch with current counts, if it runs here."""
        run = self._runs.get(batch.id)
        return batch if run is None or batch.status in TERMINAL_STATES else _counted(batch, run)

    # Running batches.

    async def _look_always(self) -> None:
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            await self._look()

    async def _look(self) -> None:
        try:
            for batch in await self._files.run(self._unfinished):
                self._start_run(batch)
        except StoreUnavailable:
            logger.warning("The folder of batches cannot be read", exc_info=True)

    def _unfinished(self) -> list[StoredBatch]:
        """List unfinished batches of all owners, and delete those that ended long ago."""
        batches: list[StoredBatch] = []
        now = self._files.clock()
        for path in self._files.places("*batch_*" + METADATA_SUFFIX):
            batch = read_metadata(path.parent, path.stem, StoredBatch)
            if batch is None:
                continue
            if batch.status not in TERMINAL_STATES:
                batches.append(batch)
            elif max(batch.at.values(), default=batch.created_at) < now - KEEP_S:
                _remove_batch(path.parent, batch.id)
        return batches

    def _start_run(self, batch: StoredBatch) -> None:
        if (
            batch.id not in self._making
            and batch.status not in TERMINAL_STATES
            and batch.kind in self._spellings
        ):
            task = asyncio.create_task(self._make(batch), name=batch.id)
            self._making[batch.id] = task
            task.add_done_callback(lambda _: self._making.pop(batch.id, None))

    async def _make(self, batch: StoredBatch) -> None:
        folder = self._files.owner_folder(batch.owner)
        lock = await self._files.run(partial(take_lock, folder / batch.id / "lock"))
        if lock is None:
            return
        try:
            # The previous holder of the lock may have changed it.
            fresh = await self._files.run(partial(read_metadata, folder, batch.id, StoredBatch))
            if fresh is not None and fresh.status not in TERMINAL_STATES:
                self.wakes[batch.id] = asyncio.Event()
                await _BatchRun(self, self._files, folder, fresh).run()
        except StoreUnavailable:
            logger.exception("A batch was interrupted by a storage error; it will be retried")
        except Exception:
            logger.exception("Batch %s failed", batch.id)
        finally:
            self.wakes.pop(batch.id, None)
            self._runs.pop(batch.id, None)
            os.close(lock)

    # Services for a running batch.

    def check(self, batch: StoredBatch, line: bytes) -> LineRequest | BatchLineError:
        return self._spellings[batch.kind].check(line, batch.endpoint, self._limits, self._check_model)

    def keeps_one_file(self, batch: StoredBatch) -> bool:
        return self._spellings[batch.kind].one_file

    @property
    def most_lines(self) -> int:
        return self._limits.batch_lines

    def begin(self, batch: StoredBatch, work: Path) -> LineProcessor:
        """Create the line processor of a batch; running batches share the limit of lines."""
        spelling = self._spellings[batch.kind]
        run = LineProcessor(
            work / "input",
            work / "output",
            work / ("output" if spelling.one_file else "errors"),
            spelling,
            partial(self._answer, batch.owner),
            lambda: max(1, self._all() // max(1, len(self._runs))),
            self._files.run,
        )
        self._runs[batch.id] = run
        return run


class _BatchRun:
    """One running batch: continues from its stored state to its end."""

    def __init__(self, desk: BatchManager, files: FileStore, folder: Path, batch: StoredBatch) -> None:
        self._desk = desk
        self._files = files
        self._folder = folder
        self._work = folder / batch.id
        self._batch = batch
        self._run = desk.begin(batch, self._work)
        self._one_file = desk.keeps_one_file(batch)

    async def run(self) -> None:
        if self._batch.status == "validating":
            await self._validate()
        if self._batch.status == "in_progress":
            await self._answer()
        if self._batch.status in ("finalizing", "cancelling"):
            await self._finalize()

    async def _save(self, status: str | None = None, **changes: object) -> None:
        """Write the changed metadata; a new status gets a timestamp."""
        if status is not None:
            at = {**_with_cancel(self._folder, self._batch).at, status: int(self._files.clock())}
            changes = {"status": status, "at": at, **changes}
        self._batch = _counted(replace(self._batch, **changes), self._run)
        await self._files.run(partial(write_metadata, self._folder, self._batch.id, self._batch))

    async def _validate(self) -> None:
        total, faults, model = await self._files.run(self._checked)
        if faults:
            await self._save("failed", total=total, faults=tuple(faults))
            await self._files.run(partial(shutil.rmtree, self._work, True))
        else:
            await self._save("in_progress", total=total, model=model)

    def _checked(self) -> tuple[int, list[BatchLineError], str | None]:
        """Check all lines: return their number, their faults and the model they name."""
        path = self._work / "input"
        if not path.exists():
            message = f"Cannot find file '{self._batch.input_file}': it was never uploaded, or was deleted."
            return 0, [BatchLineError("invalid_request", message, "file_id")], None
        faults: list[BatchLineError] = []
        ids, model, total = SeenIds(), None, 0
        with path.open("rb") as source:
            for total, line in enumerate(lines_of(source), 1):
                if total > self._desk.most_lines:
                    message = f"The file has more than {self._desk.most_lines} requests."
                    return total, [BatchLineError("limit_exceeded", message, "input_file_id")], None
                item = self._desk.check(self._batch, line)
                if isinstance(item, BatchLineError):
                    faults.append(replace(item, line=total))
                elif ids.has_seen(item.custom_id):
                    message = "Another request of this batch has the same 'custom_id'."
                    faults.append(BatchLineError("duplicate_custom_id", message, "custom_id", total))
                elif model is None:
                    model = model_in(item.body)
                if len(faults) >= MOST_FAULTS:
                    break
        if not total:
            return 0, [BatchLineError("empty_file", "The file has no requests.", "input_file_id")], None
        return total, faults, model

    async def _answer(self) -> None:
        """Run until all lines are done, or the batch must end."""
        running = asyncio.create_task(self._run.run())
        wake = self._desk.wakes[self._batch.id]
        try:
            while not running.done() and not self._must_end():
                waking = asyncio.create_task(wake.wait())
                await asyncio.wait({running, waking}, timeout=NOTE_S, return_when=asyncio.FIRST_COMPLETED)
                waking.cancel()
                wake.clear()
                if _counted(self._batch, self._run) != self._batch:
                    await self._save()
        finally:
            ended = running.done()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        if ended:
            running.result()
        await self._save("cancelling" if _cancelled_at(self._work) and not ended else "finalizing")

    def _must_end(self) -> bool:
        return _cancelled_at(self._work) is not None or self._files.clock() >= self._batch.expires_at

    async def _finalize(self) -> None:
        """Record the lines that were not run, and turn the results into files."""
        if self._batch.ends is None:
            await self._settle()
        assert self._batch.ends is not None
        for name in ("output", "errors"):
            if (id_ := self._named(name)) is not None:
                await self._files.run(partial(self._adopt, name, id_))
        await self._save(self._batch.ends)
        if not self._one_file:
            await self._files.run(partial(shutil.rmtree, self._work, True))

    async def _settle(self) -> None:
        """Decide how the batch ends; later steps only carry it out."""
        await self._files.run(self._run.recover)
        counts, ends = self._run.counts, "completed"
        if self._batch.status == "cancelling" or counts.completed + counts.failed < self._batch.total:
            ends = "cancelled" if self._batch.status == "cancelling" else "expired"
            await self._files.run(partial(self._run.write_undone, ends))
        names = {} if self._one_file else {"output": "output_file", "errors": "error_file"}
        fields = {
            field: new_name("file-", self._files.clock())
            for name, field in names.items()
            if (self._work / name).exists()
        }
        await self._save(ends=ends, **fields)

    def _named(self, name: str) -> str | None:
        return self._batch.output_file if name == "output" else self._batch.error_file

    def _adopt(self, name: str, id_: str) -> None:
        """Turn a result in the batch's folder into a file; safe to repeat after an interruption."""
        target, path = self._work / name, self._folder / id_
        if target.exists():
            target.rename(path)
            sync_folder(self._folder)
        if path.exists() and read_metadata(self._folder, id_, StoredFile) is None:
            now, keep = int(self._files.clock()), self._batch.keep_s
            filename = f"{self._batch.id}_{name}.jsonl"
            expires_at = None if keep is None else now + keep
            size = path.stat().st_size
            write_metadata(self._folder, id_, StoredFile(id_, filename, BATCH_OUTPUT, size, now, expires_at))


def _counted(batch: StoredBatch, run: LineProcessor) -> StoredBatch:
    counts = run.counts
    return replace(
        batch,
        completed=max(counts.completed, batch.completed),
        failed=max(counts.failed, batch.failed),
        undone=max(counts.undone, batch.undone),
        prompt_tokens=max(counts.usage.prompt_tokens, batch.prompt_tokens),
        completion_tokens=max(counts.usage.completion_tokens, batch.completion_tokens),
        cached_tokens=max(counts.usage.cached_tokens, batch.cached_tokens),
        reasoning_tokens=max(counts.usage.reasoning_tokens, batch.reasoning_tokens),
    )


def _with_cancel(folder: Path, batch: StoredBatch) -> StoredBatch:
    """Show a batch as `cancelling` as soon as it is asked to, before its server has noticed."""
    if batch.status in TERMINAL_STATES or (asked := _cancelled_at(folder / batch.id)) is None:
        return batch
    return replace(batch, status="cancelling", at={**batch.at, "cancelling": asked})


def _cancelled_at(work: Path) -> int | None:
    with suppress(FileNotFoundError):
        return int((work / "cancel").stat().st_mtime)
    return None


def _remove_batch(folder: Path, id_: str) -> None:
    (folder / f"{id_}{METADATA_SUFFIX}").unlink(missing_ok=True)
    shutil.rmtree(folder / id_, ignore_errors=True)
