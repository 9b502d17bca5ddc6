"""Images and audio of the embedded engine: measured for prompts, decoded, encoded once, and cached.

The problem. Encoding an image takes as long as many steps, and all other answers must continue meanwhile. The
same image comes again with every turn of a conversation, and several requests may ask about it.

The idea. A separate thread encodes what sequences need, one after another; a sequence waits for it without a
slot, and others are admitted before it. Encoded media are cached by the digest of the file, the most recently
used ones up to `KEPT` bytes. A medium is needed only if the cached prefix does not cover it: a second
question about an image finds it in the KV cache, and encodes nothing.

Rules of this file:
- `media_token_ids` and `decode` are for any thread, `_encode` for the encoding thread, everything else for
  the engine thread.
- Several sequences that need one image share one encoding. What no sequence needs any more is not started.
- Media that sequences hold or wait for are limited to `KEPT` bytes, but one is always allowed.
- Owners take turns.
- The thread ends when it is idle: OpenMP's threads belong to the computing thread, and a second team of them
  would slow down the steps as long as it exists.
"""

import logging
import os
import sys
import threading
import time
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from hashlib import shake_128
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from msgspec import Struct

from dragoman.engines.local.engine_thread import has_ended
from dragoman.engines.local.projector import DecodedMedia, EncodedChunk, MediaChunk, Projector
from dragoman.engines.local.runner import MediaRows
from dragoman.engines.local.sequence import NOT_IDS, PromptMedia
from dragoman.engines.sampling import Ids
from dragoman.errors import BadRequest, DragomanError, EngineFailed
from dragoman.media import Media, unsupported
from dragoman.owner_cache import OwnerCache
from dragoman.types import Job

if TYPE_CHECKING:
    from dragoman.media.decode import MediaDecoder

_log = logging.getLogger("dragoman.engine")
KEPT = 256 << 20
"""Maximum bytes of encoded media in the cache."""
PLACES = 4096
"""Files whose ids in a prompt are cached."""
DECODED = 64 << 20
"""Maximum bytes of media that were decoded for measuring and will soon be encoded."""
_PAUSE_S, _PART = 0.06, 1.1
"""Minimum time for a step that prefills beside answers while media are used, and the same as a multiple of
one encoding. Beside answers an encoding takes half as long again or more, so this also covers steps that
turn out longer.
"""
NICE = 5
"""Niceness of the encoding thread, where the system supports it for threads; it leaves the thread a third
of the time if all cores are busy.
"""
STOP_S = 10.0
PLACEHOLDER = 0
"""Id for rows without ids. No step computes with it."""


class EncoderCacheEntry:
    """An image or audio on its way: needed, encoded, cached."""

    __slots__ = ("_kept", "error", "key", "media", "owner", "parts", "size", "users")

    def __init__(self, kept: "EncoderCache", key: "PictureKey", media: Media, owner: str, size: int) -> None:
        self._kept = kept
        self.key = key
        self.media = media
        self.owner = owner
        self.size = size
        """Bytes of its rows."""
        self.users: set[CachedPromptMedia] = set()
        """Prompts that wait for it, or have not prefilled it yet."""
        self.parts: list[EncodedChunk] | None = None
        self.error: DragomanError | None = None

    def take_in(self) -> "list[CachedPromptMedia]":
        """Handle the end of its encoding; return the prompts that waited for it."""
        return self._kept.take_in(self)


PictureKey: TypeAlias = tuple[str, str]
"""The digest and the cache salt: prompts with different salts do not share media either."""


class CachedPromptMedia(PromptMedia):
    """The rows of media in a prompt, and whether they are encoded. For the engine thread."""

    __slots__ = ("_pictures", "_salt", "_starts", "_wanted", "owner", "parts")

    def __init__(self, pictures: "EncoderCache", job: Job, parts: Sequence["MediaRowSpan"]) -> None:
        super().__init__()
        self.owner = job.owner
        self._pictures = pictures
        self._salt = job.cache_salt
        self.parts = parts
        self._starts = [part.start for part in parts]
        self._wanted: dict[str, EncoderCacheEntry] = {}

    def at(self, index: int) -> "MediaRowSpan | None":
        number = bisect_right(self._starts, index) - 1
        part = self.parts[number] if number >= 0 else None
        return part if part is not None and index < part.end else None

    def border(self, index: int) -> int:
        if (part := self.at(index)) is not None:
            return part.end
        number = bisect_right(self._starts, index)
        return self._starts[number] if number < len(self._starts) else super().border(index)

    def begin(self, index: int) -> int:
        part = self.at(index)
        return index if part is None else part.start

    def position(self, index: int) -> int:
        number = bisect_right(self._starts, index) - 1
        if number < 0:
            return index
        part = self.parts[number]
        if index >= part.end:
            return part.position + part.moves + index - part.end
        return part.position if part.has_dimensions else part.position + index - part.start

    def is_shown(self, index: int) -> bool:
        return self.at(index) is not None

    def is_whole(self, index: int) -> bool:
        part = self.at(index)
        return part is not None and part.whole

    def rows(self, start: int, end: int) -> MediaRows | None:
        part = self.at(start)
        if part is None:
            return None
        encoded = self._wanted[part.media.digest].parts
        assert encoded is not None
        chunk, first, last = encoded[part.number], start - part.start, end - part.start
        return MediaRows(chunk.rows[first:last], chunk.positions(part.position, first, last), part.whole)

    def request_media(self, length: int) -> bool:
        media = {part.media.digest: part.media for part in self.parts if part.end > length}
        for digest, each in media.items():
            if digest not in self._wanted:
                wanted = self._pictures.want((digest, self._salt), each, self)
                if wanted is not None:
                    self._wanted[digest] = wanted
        self.waits = any(digest not in self._wanted or self._wanted[digest].parts is None for digest in media)
        return not self.waits

    def release(self) -> bool:
        had = bool(self._wanted)
        while self._wanted:
            self._pictures.leave(self._wanted.popitem()[1], self)
        return had


class MediaRowSpan(Struct, frozen=True):
    """A media chunk's rows in a prompt, from `start` to `end`."""

    media: Media
    number: int
    """Index among the medium's chunks that have rows."""
    start: int
    end: int
    position: int
    """Position of its first row."""
    moves: int
    whole: bool
    has_dimensions: bool


class EncoderCache:
    """Cache of encoded media. The encoding thread calls `tell` after each one."""

    def __init__(self, projector: Projector, decoder: "MediaDecoder") -> None:
        self.projector = projector
        self.tell: Callable[[EncoderCacheEntry], None] = lambda picture: None
        self.encoded = 0
        """Number of encodings since it was opened."""
        self._took = 0.0
        """CPU seconds of the encoding thread for the last encoding."""
        self._decoder = decoder
        self._measured: OwnerCache[list[MediaChunk]] = OwnerCache(PLACES)
        self._decoded: OwnerCache[DecodedMedia] = OwnerCache(DECODED)
        self._pictures: OrderedDict[PictureKey, EncoderCacheEntry] = OrderedDict()
        """Cached or pending media, most recently used last."""
        self._lock = threading.Lock()
        self._queues: OrderedDict[str, deque[EncoderCacheEntry]] = OrderedDict()
        """Media to encode, by owner, in order of their turns."""
        self._thread: threading.Thread | None = None
        self._closed = False

    # Prompts, from any thread.

    def media_token_ids(self, media: Media) -> list[int]:
        """Return the ids that represent a medium in a prompt. Damaged files are found here, before
        anything is queued.
        """
        numbers: list[int] = []
        for part in self._measure(media):
            numbers += part.ids or [PLACEHOLDER] * part.rows
        return numbers

    def show(self, job: Job) -> tuple[Ids, CachedPromptMedia]:
        """Return the ids that identify a prompt with media, and where the media are. Raises BadRequest."""
        prompt: Ids = np.array(job.prompt, np.int32)
        shown: list[MediaRowSpan] = []
        behind = 0
        """Difference between offsets and positions so far."""
        for span in job.media:
            at, number = span.start, 0
            for part in self._measure(span.media):
                if part.is_shown and at + part.rows <= len(prompt):
                    end, position = at + part.rows, at - behind
                    several = self.projector.has_dimensions
                    each = MediaRowSpan(
                        span.media, number, at, end, position, part.moves, part.whole, several
                    )
                    shown.append(each)
                    prompt[at:end] = name_rows(span.media.digest, number, part.rows)
                    behind += part.rows - part.moves
                    number += 1
                at += part.rows
            if at != span.start + span.count or at > len(prompt):
                raise BadRequest("The prompt does not have the ids that represent its images and audio.")
        return prompt, CachedPromptMedia(self, job, shown)

    def _measure(self, media: Media) -> list[MediaChunk]:
        if media.kind not in self.projector.modalities:
            raise unsupported(media.kind, self.projector.modalities)
        chunks = self._measured.get("", media.digest)
        if chunks is None:
            decoded = self._decode(media)
            self._decoded.put("", media.digest, decoded, decoded.bytes)
            chunks = self.projector.measure(decoded)
        self._measured.put("", media.digest, chunks, 1)
        return chunks

    def _decode(self, media: Media) -> DecodedMedia:
        with self.projector.team:
            if media.kind == "image":
                pixels = self._decoder.decode_image(media)
                return DecodedMedia("image", pixels.width, pixels.height, pixels.rgb)
            samples = self._decoder.decode_audio(media, self.projector.rate)
            return DecodedMedia("audio", len(samples.data) // 4, 0, samples.data)

    # The needs of sequences, for the engine thread.

    @property
    def encoding(self) -> bool:
        """Whether something is being encoded; this starts between two steps, and may end within one."""
        return self._thread is not None

    @property
    def pause(self) -> float:
        """Seconds that a step may take beside media: about as long as one encoding."""
        return max(_PAUSE_S, _PART * self._took)

    def want(self, key: PictureKey, media: Media, user: CachedPromptMedia) -> EncoderCacheEntry | None:
        """Return the medium, encoded or queued for encoding. None if so much is held that it has to wait."""
        picture = self._pictures.get(key)
        if picture is None:
            rows = sum(part.rows for part in self._measure(media) if part.is_shown)
            size = 4 * rows * self.projector.width
            used = sum(one.size for one in self._pictures.values() if one.users)
            if used and used + size > KEPT:
                return None
            picture = self._pictures[key] = EncoderCacheEntry(self, key, media, user.owner, size)
            picture.users.add(user)
            self._make_room()
            self._ask(picture)
        picture.users.add(user)
        self._pictures.move_to_end(key)
        return picture

    def leave(self, picture: EncoderCacheEntry, user: CachedPromptMedia) -> None:
        """Release a medium for one prompt."""
        picture.users.discard(user)
        self._make_room()

    def take_in(self, picture: EncoderCacheEntry) -> list[CachedPromptMedia]:
        """See `EncoderCacheEntry.take_in`."""
        users = list(picture.users)
        if picture.parts is None and picture.error is None and users:
            # A prompt requested it just after the encoding thread had skipped it.
            self._ask(picture)
        elif picture.parts is None:
            self._pictures.pop(picture.key, None)
        return users

    def _make_room(self) -> None:
        over = sum(one.size for one in self._pictures.values()) - KEPT
        for key, picture in list(self._pictures.items()):
            if over <= 0:
                return
            if not picture.users and picture.parts is not None:
                del self._pictures[key]
                over -= picture.size

    # The encoding thread.

    def _ask(self, picture: EncoderCacheEntry) -> None:
        with self._lock:
            self._queues.setdefault(picture.owner, deque()).append(picture)
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="dragoman-see", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        if sys.platform == "linux":
            # Its OpenMP team inherits the niceness.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        while (picture := self._next()) is not None:
            self._encode(picture)
            self.tell(picture)

    def _next(self) -> EncoderCacheEntry | None:
        with self._lock:
            if self._closed or not self._queues:
                self._thread = None
                return None
            owner, mine = self._queues.popitem(last=False)
            picture = mine.popleft()
            if mine:
                self._queues[owner] = mine
            return picture

    def _encode(self, picture: EncoderCacheEntry) -> None:
        if not picture.users:
            return
        try:
            digest = picture.media.digest
            decoded = self._decoded.pop("", digest) or self._decode(picture.media)
            began = time.thread_time()
            parts = self.projector.encode(decoded)
            self._took = time.thread_time() - began
            if sum(part.rows.nbytes for part in parts) != picture.size:
                raise EngineFailed("The encoded media have another size than was measured before.")
            self.encoded += 1
            picture.parts = parts
        except DragomanError as error:
            picture.error = error
        except Exception:
            _log.exception("Cannot encode an image or audio")
            picture.error = EngineFailed("The model failed to encode this image or audio.")

    def close(self) -> None:
        """Close the cache; waits for a running encoding, which the library cannot interrupt."""
        with self._lock:
            self._closed = True
            self._queues.clear()
            thread = self._thread
        if thread is not None and not has_ended(thread, STOP_S):
            _log.error("The encoding thread did not end within %.0f seconds; it is abandoned", STOP_S)
            return
        self._pictures.clear()
        self._decoder.close()
        self.projector.close()


def name_rows(digest: str, number: int, rows: int) -> Ids:
    """Return numbers that identify the rows of a medium when prompts are compared; all are above any id."""
    data = shake_128(f"{digest}/{number}".encode()).digest(4 * rows)
    array: Ids = ((np.frombuffer(data, np.uint32) & (NOT_IDS - 1)) | NOT_IDS).astype(np.int32)
    return array
