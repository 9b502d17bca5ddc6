"""The turns that a model has had lately, found by the prompt they began with."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

from dragoman.types import Traced

MOST_IDS = 8 * 1024 * 1024
"""Ids that are kept, those of prompts and of answers: about 64 MB."""
MOST_ANSWERS = 16
"""To one prompt."""


class Trails:
    """Threads may share it. The least lately used go first."""

    def __init__(self, most_ids: int = MOST_IDS) -> None:
        self._most_ids = most_ids
        self._kept: OrderedDict[bytes, list[Traced]] = OrderedDict()
        self._ids = 0
        self._lock = threading.Lock()

    def add(self, prompt: str, turn: Traced, salt: str = "") -> None:
        """`prompt` is the text that the turn began with."""
        with self._lock:
            key = _key(prompt, salt)
            known = self._kept.setdefault(key, [])
            self._kept.move_to_end(key)
            if turn in known:
                return
            known.append(turn)
            self._ids += len(turn.all)
            if len(known) > MOST_ANSWERS:
                self._ids -= len(known.pop(0).all)
            while self._ids > self._most_ids and self._kept:
                _, old = self._kept.popitem(last=False)
                self._ids -= sum(len(each.all) for each in old)

    def find(self, prompt: str, salt: str = "") -> Sequence[Traced]:
        """What was answered to this prompt, the latest first."""
        with self._lock:
            key = _key(prompt, salt)
            if key not in self._kept:
                return ()
            self._kept.move_to_end(key)
            return self._kept[key][::-1]

    def __len__(self) -> int:
        return len(self._kept)


def _key(prompt: str, salt: str) -> bytes:
    return blake2b(f"{salt}\0{prompt}".encode("utf-8", "surrogatepass"), digest_size=16).digest()
