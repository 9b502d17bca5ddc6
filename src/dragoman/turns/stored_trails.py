"""Turns as they are stored beside what was said, so that any process can go on from their ids.

Of a prompt that goes on from an earlier turn only what is new is stored: however long a conversation becomes,
each of its ids is stored once.
"""

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b

import msgspec
from msgspec import Struct

from dragoman.turns.trails import Trails
from dragoman.types import Traced


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


def packed(turns: Sequence[Traced]) -> bytes:
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
