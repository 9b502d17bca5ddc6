"""The turns that a model has had lately, found by the prompt they began with.

And turns as they are stored beside what was said, so that any process can go on from their ids. Of a prompt
that goes on from an earlier turn only what is new is stored: however long a conversation becomes, each of its
ids is stored once.
"""

import threading
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from operator import itemgetter

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from dragoman.types import Traced

MOST_IDS = 8 * 1024 * 1024
"""Ids that are kept, those of prompts and of answers: about 64 MB."""
MOST_ANSWERS = 16
"""To one prompt."""


class Trails:
    """Threads may share it. Of the owner with the most ids the least lately used go first."""

    def __init__(self, model: str = "", pieces: Sequence[bytes] = (), most_ids: int = MOST_IDS) -> None:
        """`pieces` are the model's vocabulary: ids of another one must not be found, whatever its name."""
        # Each id is one object, whoever says it: else a number in a tuple takes five times its place there.
        self._shared = list(range(len(pieces)))
        self._model = blake2b(b"\0".join([model.encode(), *pieces]), digest_size=16).digest()
        self._most_ids = most_ids
        self._kept: dict[bytes, list[Traced]] = {}
        self._owner_of: dict[bytes, str] = {}
        self._used: dict[str, OrderedDict[bytes, None]] = {}
        """The keys of each owner, the least lately used first."""
        self._ids: Counter[str] = Counter()
        """How many are kept of each owner."""
        self._lock = threading.Lock()

    def key(self, prompt: str, salt: str = "") -> bytes:
        """What turns are remembered by that begin with this text. It is the same in every process."""
        text = f"{salt}\0{prompt}".encode("utf-8", "surrogatepass")
        return blake2b(text, digest_size=16, key=self._model).digest()

    def shared(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """The same, of the objects that all have in common."""
        try:
            # With one more it is a tuple, however few they are.
            shared: tuple[int, ...] = itemgetter(*ids, 0)(self._shared)
            return shared[:-1]
        except IndexError:
            # Some are not in the vocabulary.
            return tuple(self._shared[id] if id < len(self._shared) else id for id in ids)

    def add(self, turn: Traced, owner: str = "", *, planned: bool = False) -> None:
        """The prompt of one that was `planned` is `shared` already, which takes long for a long one."""
        prompt = turn.prompt if planned else self.shared(turn.prompt)
        turn = replace(turn, prompt=prompt, ids=self.shared(turn.ids))
        with self._lock:
            known = self._kept.setdefault(turn.key, [])
            owner = self._owner_of.setdefault(turn.key, owner)
            self._use(turn.key)
            # Answers to one prompt have it in common, and it may be long: what tells them apart comes first.
            if any(each.source == turn.source and each.ids == turn.ids and each == turn for each in known):
                return
            known.append(turn)
            self._ids[owner] += turn.count
            if len(known) > MOST_ANSWERS:
                self._ids[owner] -= known.pop(0).count
            while self._kept and self._ids.total() > self._most_ids:
                self._drop(max(self._ids, key=self._ids.__getitem__))

    def _use(self, key: bytes) -> None:
        used = self._used.setdefault(self._owner_of[key], OrderedDict())
        used[key] = None
        used.move_to_end(key)

    def _drop(self, owner: str) -> None:
        key, _ = self._used[owner].popitem(last=False)
        self._ids[owner] -= sum(each.count for each in self._kept.pop(key))
        del self._owner_of[key]
        if not self._used[owner]:
            del self._used[owner], self._ids[owner]

    def find(self, key: bytes) -> Sequence[Traced]:
        """What was answered to this prompt, the latest first."""
        with self._lock:
            if key not in self._kept:
                return ()
            self._use(key)
            return self._kept[key][::-1]

    def prefer(self, key: bytes, source: str) -> bool:
        """Has the turn of this answer be found first; false if it is not known."""
        with self._lock:
            known = self._kept.get(key, [])
            number = next((number for number, turn in enumerate(known) if turn.source == source), None)
            if number is None:
                return False
            known.append(known.pop(number))
            return True

    def __len__(self) -> int:
        return len(self._kept)


class StoredTurn(Struct, frozen=True, kw_only=True, array_like=True):
    key: bytes
    source: str
    mark: bytes
    """Stands for all ids of the turn, from the first of its prompt."""
    after: bytes
    """The mark of the turn that the prompt goes on from; empty: there is none."""
    prompt: tuple[int, ...]
    """What is new in it."""
    ids: tuple[int, ...]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[StoredTurn]).decode


def pack_turns(turns: Sequence[Traced]) -> bytes:
    """The turns of one answer; those that nothing can go on from are left out."""
    found = [_stored(turn) for turn in turns if turn.key]
    return _encode(found) if found else b""


def recall(trails: Trails, stored: Sequence[bytes], owner: str = "") -> None:
    """Has a prompt that goes on from these answers find the last one, be it remembered or not."""
    last = next(_backwards(stored), None)
    if last is None or trails.prefer(last.key, last.source):
        return
    prompt = _prompt(stored)
    if prompt is not None:
        trails.add(Traced(key=last.key, source=last.source, prompt=prompt, ids=last.ids), owner)


def _stored(turn: Traced) -> StoredTurn:
    return StoredTurn(
        key=turn.key,
        source=turn.source,
        mark=_mark(turn.all),
        after=_mark(turn.prompt[: turn.kept]) if turn.kept else b"",
        prompt=turn.prompt[turn.kept :],
        ids=turn.ids,
    )


def _mark(ids: tuple[int, ...]) -> bytes:
    return blake2b(array("I", ids).tobytes(), digest_size=16).digest()


def _backwards(stored: Sequence[bytes]) -> Iterator[StoredTurn]:
    for answer in reversed(stored):
        yield from reversed(_decode(answer))


def _prompt(stored: Sequence[bytes]) -> tuple[int, ...] | None:
    """That of the last turn, put together; None where a turn that it goes on from is gone."""
    parts: list[tuple[int, ...]] = []
    wanted: bytes | None = None
    for turn in _backwards(stored):
        if wanted is None:
            parts.append(turn.prompt)
        elif turn.mark == wanted:
            parts += [turn.ids, turn.prompt]
        else:
            continue
        wanted = turn.after
        if not wanted:
            return tuple(id_ for part in reversed(parts) for id_ in part)
    return None
