"""The turns that a model has had lately, found by the prompt they began with."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

from msgspec.structs import replace

from dragoman.types import Traced

MOST_IDS = 8 * 1024 * 1024
"""Ids that are kept, those of prompts and of answers: about 64 MB."""
MOST_ANSWERS = 16
"""To one prompt."""


class Trails:
    """Threads may share it. The least lately used go first."""

    def __init__(self, model: str = "", pieces: Sequence[bytes] = (), most_ids: int = MOST_IDS) -> None:
        """`pieces` are the model's vocabulary: ids of another one must not be found, whatever its name."""
        # Each id is one object, whoever says it: else a number in a tuple takes five times its place there.
        self._shared = {id: id for id in range(len(pieces))}.get
        self._model = blake2b(b"\0".join([model.encode(), *pieces]), digest_size=16).digest()
        self._most_ids = most_ids
        self._kept: OrderedDict[bytes, list[Traced]] = OrderedDict()
        self._ids = 0
        self._lock = threading.Lock()

    def key(self, prompt: str, salt: str = "") -> bytes:
        """What turns are remembered by that begin with this text. It is the same in every process."""
        text = f"{salt}\0{prompt}".encode("utf-8", "surrogatepass")
        return blake2b(text, digest_size=16, key=self._model).digest()

    def add(self, turn: Traced) -> None:
        turn = replace(
            turn,
            prompt=tuple(map(self._shared, turn.prompt, turn.prompt)),
            ids=tuple(map(self._shared, turn.ids, turn.ids)),
        )
        with self._lock:
            known = self._kept.setdefault(turn.key, [])
            self._kept.move_to_end(turn.key)
            if turn in known:
                return
            known.append(turn)
            self._ids += len(turn.all)
            if len(known) > MOST_ANSWERS:
                self._ids -= len(known.pop(0).all)
            while self._ids > self._most_ids and self._kept:
                _, old = self._kept.popitem(last=False)
                self._ids -= sum(len(each.all) for each in old)

    def find(self, key: bytes) -> Sequence[Traced]:
        """What was answered to this prompt, the latest first."""
        with self._lock:
            if key not in self._kept:
                return ()
            self._kept.move_to_end(key)
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
