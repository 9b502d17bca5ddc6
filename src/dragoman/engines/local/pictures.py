"""Pictures and sounds of the embedded engine: measured for prompts, decoded, encoded once, and kept.

The problem. To encode a picture takes as long as many steps, and everybody else's answers must go on
meanwhile. The same picture comes again with every turn of a conversation, and several may ask about it.

The idea. A thread of its own encodes what sequences want, one after another; who wants it waits without a
slot, and others are placed before it. What was encoded is kept by the digest of its file, those used last, up
to `KEPT` bytes. It is wanted only where the prefix that is known already does not reach over it: a second
question about a picture finds it in keys and values, and encodes nothing.

Rules of this file:
- `place` and `decode` are for any thread, `_encode` for the thread that encodes, all else for the engine's.
- Several who want one picture cause one encoding. What nobody wants any more is not begun.
- Of all that sequences hold and wait for, no more is begun than `KEPT`, but always one.
- Owners take turns.
- The thread ends when it has nothing to do: threads of OpenMP belong to the one that computes, and a second
  team of them would slow down the steps for as long as it is there.
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

from dragoman.engines.choosing import Ids
from dragoman.engines.local.projector import Decoded, EncodedPart, PicturePart, Projector
from dragoman.engines.local.runner import ShownRows
from dragoman.engines.local.sequence import NOT_IDS, ShownMedia
from dragoman.engines.local.worker import has_ended
from dragoman.errors import BadRequest, DragomanError, EngineFailed
from dragoman.lately import Lately
from dragoman.media import Media, unsupported
from dragoman.types import Job

if TYPE_CHECKING:
    from dragoman.media.decode import MediaDecoder

_log = logging.getLogger("dragoman.engine")
KEPT = 256 << 20
"""Bytes of what was encoded."""
PLACES = 4096
"""Files of which is known what stands for them in a prompt."""
DECODED = 64 << 20
"""Bytes of pictures that were decoded to be measured, and will be encoded soon."""
_PAUSE_S, _PART = 0.06, 1.1
"""What a step that reads beside answers may take at least, and of what an encoding takes by itself. Beside
answers an encoding takes half as long again and more, so steps that turn out long are within it, too."""
NICE = 5
"""How far the thread that encodes stands behind the steps of answers, where the system has that for threads:
a third of the time is left for it where all cores are wanted."""
STOP_S = 10.0
PLACEHOLDER = 0
"""An id for rows that have none. Nobody computes with it."""


class Picture:
    """A picture or a sound on its way: wanted, encoded, kept."""

    __slots__ = ("_kept", "error", "key", "media", "owner", "parts", "size", "users")

    def __init__(self, kept: "Pictures", key: "PictureKey", media: Media, owner: str, size: int) -> None:
        self._kept = kept
        self.key = key
        self.media = media
        self.owner = owner
        self.size = size
        """Bytes of its rows."""
        self.users: set[ShownPictures] = set()
        """Prompts that wait for it, or have yet to read it."""
        self.parts: list[EncodedPart] | None = None
        self.error: DragomanError | None = None

    def take_in(self) -> "list[ShownPictures]":
        """It was encoded, or could not be; who waited for it."""
        return self._kept.take_in(self)


PictureKey: TypeAlias = tuple[str, str]
"""The digest, and the salt: what strangers may not know of each other's prompts holds for pictures, too."""


class ShownPictures(ShownMedia):
    """Where a prompt has rows of pictures, and whether they are there. For the engine's thread."""

    __slots__ = ("_pictures", "_salt", "_starts", "_wanted", "owner", "parts")

    def __init__(self, pictures: "Pictures", job: Job, parts: Sequence["ShownPart"]) -> None:
        super().__init__()
        self.owner = job.owner
        self._pictures = pictures
        self._salt = job.cache_salt
        self.parts = parts
        self._starts = [part.start for part in parts]
        self._wanted: dict[str, Picture] = {}

    def at(self, place: int) -> "ShownPart | None":
        number = bisect_right(self._starts, place) - 1
        part = self.parts[number] if number >= 0 else None
        return part if part is not None and place < part.end else None

    def border(self, place: int) -> int:
        if (part := self.at(place)) is not None:
            return part.end
        number = bisect_right(self._starts, place)
        return self._starts[number] if number < len(self._starts) else super().border(place)

    def begin(self, place: int) -> int:
        part = self.at(place)
        return place if part is None else part.start

    def position(self, place: int) -> int:
        number = bisect_right(self._starts, place) - 1
        if number < 0:
            return place
        part = self.parts[number]
        if place >= part.end:
            return part.position + part.moves + place - part.end
        return part.position if part.has_dimensions else part.position + place - part.start

    def is_shown(self, place: int) -> bool:
        return self.at(place) is not None

    def is_whole(self, place: int) -> bool:
        part = self.at(place)
        return part is not None and part.whole

    def rows(self, start: int, end: int) -> ShownRows | None:
        part = self.at(start)
        if part is None:
            return None
        encoded = self._wanted[part.media.digest].parts
        assert encoded is not None
        found, first, last = encoded[part.number], start - part.start, end - part.start
        return ShownRows(found.rows[first:last], found.positions(part.position, first, last), part.whole)

    def sees(self, length: int) -> bool:
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


class ShownPart(Struct, frozen=True):
    """Rows of a prompt from `start` to `end` that are those of a picture."""

    media: Media
    number: int
    """Of the parts of the picture that have rows."""
    start: int
    end: int
    position: int
    """Where its first row is."""
    moves: int
    whole: bool
    has_dimensions: bool


class Pictures:
    """All that an engine has seen. `tell` is called by the thread that encodes, when it is done with one."""

    def __init__(self, projector: Projector, decoder: "MediaDecoder") -> None:
        self.projector = projector
        self.tell: Callable[[Picture], None] = lambda picture: None
        self.encoded = 0
        """How many were, since it was opened."""
        self._took = 0.0
        """Seconds of the last encoding, with the cores for itself: those its thread has computed."""
        self._decoder = decoder
        self._measured: Lately[list[PicturePart]] = Lately(PLACES)
        self._decoded: Lately[Decoded] = Lately(DECODED)
        self._pictures: OrderedDict[PictureKey, Picture] = OrderedDict()
        """All that are kept or on their way, the latest at the end."""
        self._lock = threading.Lock()
        self._queues: OrderedDict[str, deque[Picture]] = OrderedDict()
        """What is to be encoded, by owner. The first one's turn is next."""
        self._thread: threading.Thread | None = None
        self._closed = False

    # Prompts, from any thread.

    def place(self, media: Media) -> list[int]:
        """The ids that stand for it in a prompt. What is damaged is found here, before anything is queued."""
        found: list[int] = []
        for part in self._measure(media):
            found += part.ids or [PLACEHOLDER] * part.rows
        return found

    def show(self, job: Job) -> tuple[Ids, ShownPictures]:
        """The ids by which a prompt with pictures is known, and where they are. Raises BadRequest."""
        prompt: Ids = np.array(job.prompt, np.int32)
        shown: list[ShownPart] = []
        behind = 0
        """By how much positions lag behind places."""
        for span in job.media:
            at, number = span.start, 0
            for part in self._measure(span.media):
                if part.is_shown and at + part.rows <= len(prompt):
                    end, position = at + part.rows, at - behind
                    several = self.projector.has_dimensions
                    each = ShownPart(span.media, number, at, end, position, part.moves, part.whole, several)
                    shown.append(each)
                    prompt[at:end] = name_rows(span.media.digest, number, part.rows)
                    behind += part.rows - part.moves
                    number += 1
                at += part.rows
            if at != span.start + span.count or at > len(prompt):
                raise BadRequest("The prompt has not the ids that stand for its pictures and sounds.")
        return prompt, ShownPictures(self, job, shown)

    def _measure(self, media: Media) -> list[PicturePart]:
        if media.kind not in self.projector.modalities:
            raise unsupported(media.kind, self.projector.modalities)
        found = self._measured.get("", media.digest)
        if found is None:
            decoded = self._decode(media)
            self._decoded.put("", media.digest, decoded, decoded.bytes)
            found = self.projector.measure(decoded)
        self._measured.put("", media.digest, found, 1)
        return found

    def _decode(self, media: Media) -> Decoded:
        with self.projector.team:
            if media.kind == "image":
                pixels = self._decoder.decode_image(media)
                return Decoded("image", pixels.width, pixels.height, pixels.rgb)
            samples = self._decoder.decode_audio(media, self.projector.rate)
            return Decoded("audio", len(samples.data) // 4, 0, samples.data)

    # What sequences want, for the engine's thread.

    @property
    def encoding(self) -> bool:
        """Whether something is being encoded: that begins between two steps, and may end within one."""
        return self._thread is not None

    @property
    def pause(self) -> float:
        """Seconds for which answers may stand still beside pictures: about as long as one is encoded."""
        return max(_PAUSE_S, _PART * self._took)

    def want(self, key: PictureKey, media: Media, user: ShownPictures) -> Picture | None:
        """The picture, encoded or to be encoded. None where so much is held that it has to wait."""
        picture = self._pictures.get(key)
        if picture is None:
            rows = sum(part.rows for part in self._measure(media) if part.is_shown)
            size = 4 * rows * self.projector.width
            used = sum(one.size for one in self._pictures.values() if one.users)
            if used and used + size > KEPT:
                return None
            picture = self._pictures[key] = Picture(self, key, media, user.owner, size)
            picture.users.add(user)
            self._make_room()
            self._ask(picture)
        picture.users.add(user)
        self._pictures.move_to_end(key)
        return picture

    def leave(self, picture: Picture, user: ShownPictures) -> None:
        """One prompt needs it no more."""
        picture.users.discard(user)
        self._make_room()

    def take_in(self, picture: Picture) -> list[ShownPictures]:
        """See there."""
        users = list(picture.users)
        if picture.parts is None and picture.error is None and users:
            # Somebody has come for it just when it was left out.
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

    # The thread that encodes.

    def _ask(self, picture: Picture) -> None:
        with self._lock:
            self._queues.setdefault(picture.owner, deque()).append(picture)
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="dragoman-see", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        if sys.platform == "linux":
            # Its team of threads is begun by it, and stands where it does.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        while (picture := self._next()) is not None:
            self._encode(picture)
            self.tell(picture)

    def _next(self) -> Picture | None:
        with self._lock:
            if self._closed or not self._queues:
                self._thread = None
                return None
            owner, mine = self._queues.popitem(last=False)
            picture = mine.popleft()
            if mine:
                self._queues[owner] = mine
            return picture

    def _encode(self, picture: Picture) -> None:
        if not picture.users:
            return
        try:
            digest = picture.media.digest
            decoded = self._decoded.pop("", digest) or self._decode(picture.media)
            began = time.thread_time()
            parts = self.projector.encode(decoded)
            self._took = time.thread_time() - began
            if sum(part.rows.nbytes for part in parts) != picture.size:
                raise EngineFailed("The picture was measured otherwise before it was encoded.")
            self.encoded += 1
            picture.parts = parts
        except DragomanError as error:
            picture.error = error
        except Exception:
            _log.exception("a picture or a sound could not be encoded")
            picture.error = EngineFailed("The model could not look at this picture or hear this sound.")

    def close(self) -> None:
        """What is being encoded is waited for: the library cannot break it off."""
        with self._lock:
            self._closed = True
            self._queues.clear()
            thread = self._thread
        if thread is not None and not has_ended(thread, STOP_S):
            _log.error(
                "The thread that encodes has not ended within %.0f seconds; it is left behind.", STOP_S
            )
            return
        self._pictures.clear()
        self._decoder.close()
        self.projector.close()


def name_rows(digest: str, number: int, rows: int) -> Ids:
    """Numbers that stand for the rows of a picture where prompts are compared; no id is as large."""
    data = shake_128(f"{digest}/{number}".encode()).digest(4 * rows)
    found: Ids = ((np.frombuffer(data, np.uint32) & (NOT_IDS - 1)) | NOT_IDS).astype(np.int32)
    return found
