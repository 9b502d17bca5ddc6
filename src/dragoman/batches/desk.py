"""Where batches are kept, made and found again: each is a folder beside the files of its owner.

    FOLDER/OWNER/batch_0199....json       what is said of it, replaced as a whole when it changes
    FOLDER/OWNER/batch_0199.../input      the lines: another name for the file, which may be deleted meanwhile
                           .../output     what came of lines that went well, as far as it is
                           .../errors     what came of the others
                           .../lock       whoever makes it holds a lock on this, which ends with the process
                           .../cancel     it is to be cancelled

Servers that share the folder share the batches. One that finds a batch which nobody makes goes on with it,
wherever it stands: every state can be begun again. Only who holds the lock changes what is said of a batch.
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
    Asked,
    LineReply,
    LineSpelling,
    cannot_cancel,
    model_in,
    other_batch,
    unknown_batch,
)
from dragoman.api.files import BATCH_OUTPUT, BATCH_S
from dragoman.batches.lines import LinesRun, SeenIds, lines_of
from dragoman.errors import BadRequest, StoreUnavailable
from dragoman.limits import Limits
from dragoman.store import Page
from dragoman.store.disk import (
    SAID,
    is_name,
    names_after,
    new_name,
    read_said,
    sync_folder,
    take_lock,
    write_said,
)
from dragoman.store.files import FileShelf, StoredFile
from dragoman.store.records import LineFault, StoredBatch

logger = logging.getLogger("dragoman.batches")

AnswerLine: TypeAlias = Callable[[str, Asked], Awaitable[LineReply]]
"""Of an owner's line."""
OVER = frozenset({"completed", "failed", "expired", "cancelled"})
LOOK_S = 5.0
"""How often the folder is looked through for batches that nobody makes."""
NOTE_S = 1.0
"""How often the counts are written down, and whether another server was told to cancel is looked at."""
KEEP_S = BATCH_S
"""How long what is said of a batch is kept after its end."""


class BatchDesk:
    """`answer` answers one line of an owner; `most()` lines may be at work, of all batches together."""

    def __init__(
        self,
        files: FileShelf,
        spellings: Mapping[str, LineSpelling],
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
        self._runs: dict[str, LinesRun] = {}
        self.wakes: dict[str, asyncio.Event] = {}
        """Of each batch that is made: there may be a reason to end it."""
        self._looking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._look()
        self._looking = asyncio.create_task(self._look_always())

    async def stop(self) -> None:
        """What is made is left as it is, for whoever comes next."""
        tasks = [*self._making.values(), *([self._looking] if self._looking else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # What is asked of batches

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
        """`put_input` puts the lines at a place, and gives the id of the file that they are.

        With a `key`, who asks again gets the batch that is there. `total`: how many lines, if that is known.
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
        made = await self._files.do(lambda: self._create(batch, put_input, key))
        self._take_up(made)
        return self._told(made)

    def _create(
        self, batch: StoredBatch, put_input: Callable[[Path], str | None], key: str | None
    ) -> StoredBatch:
        folder = self._files.of(batch.owner)
        self._check_room(folder)
        work = folder / batch.id
        work.mkdir(mode=0o700)
        try:
            batch = replace(batch, input_file=put_input(work / "input"))
            if key is not None and (there := self._known(folder, key, batch)) is not None:
                shutil.rmtree(work, ignore_errors=True)
                return there
            write_said(folder, batch.id, batch)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
        return batch

    def _check_room(self, folder: Path) -> None:
        there = sum("batch_" in name and name.endswith(SAID) for name in os.listdir(folder))
        if there >= self._limits.batches:
            message = f"This key has {there} batches of the last 30 days, and may have no more."
            raise BadRequest(message, code="quota_exceeded")

    def _known(self, folder: Path, key: str, batch: StoredBatch) -> StoredBatch | None:
        """The batch that was made with this key; the first to come notes its own."""
        place = folder / f".key-{blake2b(key.encode(errors='surrogatepass'), digest_size=16).hexdigest()}"
        try:
            with place.open("x") as note:
                note.write(batch.id)
            return None
        except FileExistsError:
            found = read_said(folder, place.read_text(), StoredBatch)
        if found is None:
            # What it was for is gone.
            place.write_text(batch.id)
            return None
        asked = ("kind", "endpoint", "input_file", "metadata", "keep_s")
        if any(getattr(found, name) != getattr(batch, name) for name in asked):
            raise other_batch()
        return found

    async def get(self, kind: str, owner: str, id_: str) -> StoredBatch:
        return self._told(await self._files.do(partial(self._found, kind, owner, id_)))

    def _found(self, kind: str, owner: str, id_: str) -> StoredBatch:
        folder = self._files.of(owner)
        found = read_said(folder, id_, StoredBatch) if is_name(id_, self._spellings[kind].prefix) else None
        if found is None or found.kind != kind:
            raise unknown_batch(id_)
        return _with_cancel(folder, found)

    async def page(
        self, kind: str, owner: str, *, after: str | None, limit: int, descending: bool
    ) -> Page[StoredBatch]:
        def work() -> Page[StoredBatch]:
            folder, data = self._files.of(owner), list[StoredBatch]()
            for name in names_after(folder, self._spellings[kind].prefix, after, descending):
                batch = read_said(folder, name, StoredBatch)
                if batch is not None and batch.kind == kind:
                    if len(data) == limit:
                        return Page(data, True)
                    data.append(_with_cancel(folder, batch))
            return Page(data, False)

        page = await self._files.do(work)
        return Page([self._told(batch) for batch in page.data], page.has_more)

    async def cancel(self, kind: str, owner: str, id_: str) -> StoredBatch:
        def work() -> StoredBatch:
            found = self._found(kind, owner, id_)
            if found.status in OVER - {"cancelled"}:
                raise cannot_cancel(found.status)
            if found.status not in OVER:
                (self._files.of(owner) / id_ / "cancel").touch()
            return self._found(kind, owner, id_)

        batch = await self._files.do(work)
        if id_ in self.wakes:
            self.wakes[id_].set()
        self._take_up(batch)
        return self._told(batch)

    async def delete(self, kind: str, owner: str, id_: str) -> StoredBatch:
        """Of one that is over."""

        def work() -> StoredBatch:
            found = self._found(kind, owner, id_)
            if found.status in OVER:
                _remove_batch(self._files.of(owner), id_)
            return found

        return await self._files.do(work)

    async def results(self, owner: str, id_: str) -> tuple[int, IO[bytes]] | None:
        """The bytes of what came of a batch whose results are in one file, and how many they are."""

        def work() -> tuple[int, IO[bytes]] | None:
            place = self._files.of(owner) / id_ / "output"
            if not place.exists():
                return None
            file = place.open("rb")
            return os.fstat(file.fileno()).st_size, file

        return await self._files.do(work)

    def _told(self, batch: StoredBatch) -> StoredBatch:
        """With the counts of this very moment, where it is made here."""
        run = self._runs.get(batch.id)
        return batch if run is None or batch.status in OVER else _counted(batch, run)

    # What is made of them

    async def _look_always(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await self._look()

    async def _look(self) -> None:
        try:
            for batch in await self._files.do(self._unfinished):
                self._take_up(batch)
        except StoreUnavailable:
            logger.warning("The folder of the batches could not be looked through", exc_info=True)

    def _unfinished(self) -> list[StoredBatch]:
        """Of all owners; those that were over for long are deleted."""
        found: list[StoredBatch] = []
        now = self._files.clock()
        for place in self._files.places("*batch_*" + SAID):
            batch = read_said(place.parent, place.stem, StoredBatch)
            if batch is None:
                continue
            if batch.status not in OVER:
                found.append(batch)
            elif max(batch.at.values(), default=batch.created_at) < now - KEEP_S:
                _remove_batch(place.parent, batch.id)
        return found

    def _take_up(self, batch: StoredBatch) -> None:
        if batch.id not in self._making and batch.status not in OVER and batch.kind in self._spellings:
            task = asyncio.create_task(self._make(batch), name=batch.id)
            self._making[batch.id] = task
            task.add_done_callback(lambda _: self._making.pop(batch.id, None))

    async def _make(self, batch: StoredBatch) -> None:
        folder = self._files.of(batch.owner)
        lock = await self._files.do(partial(take_lock, folder / batch.id / "lock"))
        if lock is None:
            return
        try:
            # Whoever had the lock before may have changed it.
            fresh = await self._files.do(partial(read_said, folder, batch.id, StoredBatch))
            if fresh is not None and fresh.status not in OVER:
                self.wakes[batch.id] = asyncio.Event()
                await _Making(self, self._files, folder, fresh).make()
        except StoreUnavailable:
            logger.exception("A batch could not be gone on with; it is tried again")
        except Exception:
            logger.exception("A batch could not be made: %s", batch.id)
        finally:
            self.wakes.pop(batch.id, None)
            self._runs.pop(batch.id, None)
            os.close(lock)

    # What the making of one needs

    def check(self, batch: StoredBatch, line: bytes) -> Asked | LineFault:
        return self._spellings[batch.kind].check(line, batch.endpoint, self._limits, self._check_model)

    def keeps_one_file(self, batch: StoredBatch) -> bool:
        return self._spellings[batch.kind].one_file

    @property
    def most_lines(self) -> int:
        return self._limits.batch_lines

    def begin(self, batch: StoredBatch, work: Path) -> LinesRun:
        """The batches that are made share what may be at work."""
        spelling = self._spellings[batch.kind]
        run = LinesRun(
            work / "input",
            work / "output",
            work / ("output" if spelling.one_file else "errors"),
            spelling,
            partial(self._answer, batch.owner),
            lambda: max(1, self._all() // max(1, len(self._runs))),
            self._files.do,
        )
        self._runs[batch.id] = run
        return run


class _Making:
    """One batch, from whichever state it is in to its end."""

    def __init__(self, desk: BatchDesk, files: FileShelf, folder: Path, batch: StoredBatch) -> None:
        self._desk = desk
        self._files = files
        self._folder = folder
        self._work = folder / batch.id
        self._batch = batch
        self._run = desk.begin(batch, self._work)
        self._one_file = desk.keeps_one_file(batch)

    async def make(self) -> None:
        if self._batch.status == "validating":
            await self._validate()
        if self._batch.status == "in_progress":
            await self._answer()
        if self._batch.status in ("finalizing", "cancelling"):
            await self._finalize()

    async def _say(self, status: str | None = None, **changes: object) -> None:
        """Writes down what has changed; a new state with its time."""
        if status is not None:
            at = {**_with_cancel(self._folder, self._batch).at, status: int(self._files.clock())}
            changes = {"status": status, "at": at, **changes}
        self._batch = _counted(replace(self._batch, **changes), self._run)
        await self._files.do(partial(write_said, self._folder, self._batch.id, self._batch))

    async def _validate(self) -> None:
        total, faults, model = await self._files.do(self._checked)
        if faults:
            await self._say("failed", total=total, faults=tuple(faults))
            await self._files.do(partial(shutil.rmtree, self._work, True))
        else:
            await self._say("in_progress", total=total, model=model)

    def _checked(self) -> tuple[int, list[LineFault], str | None]:
        """How many lines there are, what is wrong with them, and which model they are for."""
        place = self._work / "input"
        if not place.exists():
            message = f"Cannot find file '{self._batch.input_file}': it was never uploaded, or is deleted."
            return 0, [LineFault("invalid_request", message, "file_id")], None
        faults: list[LineFault] = []
        ids, model, total = SeenIds(), None, 0
        with place.open("rb") as source:
            for total, line in enumerate(lines_of(source), 1):
                if total > self._desk.most_lines:
                    message = f"The file has more than {self._desk.most_lines} requests."
                    return total, [LineFault("limit_exceeded", message, "input_file_id")], None
                found = self._desk.check(self._batch, line)
                if isinstance(found, LineFault):
                    faults.append(replace(found, line=total))
                elif ids.has_seen(found.custom_id):
                    message = "Another request of this batch has the same 'custom_id'."
                    faults.append(LineFault("duplicate_custom_id", message, "custom_id", total))
                elif model is None:
                    model = model_in(found.body)
                if len(faults) >= MOST_FAULTS:
                    break
        if not total:
            return 0, [LineFault("empty_file", "The file has no requests.", "input_file_id")], None
        return total, faults, model

    async def _answer(self) -> None:
        """Until all lines are done, or it is to end before that."""
        running = asyncio.create_task(self._run.run())
        wake = self._desk.wakes[self._batch.id]
        try:
            while not running.done() and not self._must_end():
                waking = asyncio.create_task(wake.wait())
                await asyncio.wait({running, waking}, timeout=NOTE_S, return_when=asyncio.FIRST_COMPLETED)
                waking.cancel()
                wake.clear()
                if _counted(self._batch, self._run) != self._batch:
                    await self._say()
        finally:
            ended = running.done()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        if ended:
            running.result()
        await self._say("cancelling" if _cancelled_at(self._work) and not ended else "finalizing")

    def _must_end(self) -> bool:
        return _cancelled_at(self._work) is not None or self._files.clock() >= self._batch.expires_at

    async def _finalize(self) -> None:
        """What is left undone is said to be, and what came of the rest becomes files."""
        if self._batch.ends is None:
            await self._settle()
        assert self._batch.ends is not None
        for name in ("output", "errors"):
            if (id_ := self._named(name)) is not None:
                await self._files.do(partial(self._adopt, name, id_))
        await self._say(self._batch.ends)
        if not self._one_file:
            await self._files.do(partial(shutil.rmtree, self._work, True))

    async def _settle(self) -> None:
        """From here on it is certain how it ends."""
        await self._files.do(self._run.recover)
        counts, ends = self._run.counts, "completed"
        if self._batch.status == "cancelling" or counts.completed + counts.failed < self._batch.total:
            ends = "cancelled" if self._batch.status == "cancelling" else "expired"
            await self._files.do(partial(self._run.write_undone, ends))
        names = {} if self._one_file else {"output": "output_file", "errors": "error_file"}
        made = {
            field: new_name("file-", self._files.clock())
            for name, field in names.items()
            if (self._work / name).exists()
        }
        await self._say(ends=ends, **made)

    def _named(self, name: str) -> str | None:
        return self._batch.output_file if name == "output" else self._batch.error_file

    def _adopt(self, name: str, id_: str) -> None:
        """Makes a file of what is in the batch's own folder; it may have been begun before."""
        place, made = self._work / name, self._folder / id_
        if place.exists():
            place.rename(made)
            sync_folder(self._folder)
        if made.exists() and read_said(self._folder, id_, StoredFile) is None:
            now, keep = int(self._files.clock()), self._batch.keep_s
            filename = f"{self._batch.id}_{name}.jsonl"
            expires_at = None if keep is None else now + keep
            size = made.stat().st_size
            write_said(self._folder, id_, StoredFile(id_, filename, BATCH_OUTPUT, size, now, expires_at))


def _counted(batch: StoredBatch, run: LinesRun) -> StoredBatch:
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
    """A batch that is to be cancelled, though whoever makes it has not noticed yet."""
    if batch.status in OVER or (asked := _cancelled_at(folder / batch.id)) is None:
        return batch
    return replace(batch, status="cancelling", at={**batch.at, "cancelling": asked})


def _cancelled_at(work: Path) -> int | None:
    with suppress(FileNotFoundError):
        return int((work / "cancel").stat().st_mtime)
    return None


def _remove_batch(folder: Path, id_: str) -> None:
    (folder / f"{id_}{SAID}").unlink(missing_ok=True)
    shutil.rmtree(folder / id_, ignore_errors=True)
