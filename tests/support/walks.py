"""Random answers out of a grammar: a model without a mind, which knows the markers of its dialect."""

import random
import re
from collections.abc import Collection, Iterator

import msgspec
import numpy as np
from msgspec import Struct

from dragoman.constrain.constraint import Constraint
from dragoman.constrain.vocabulary import Vocabulary
from dragoman.dialects.declarations import Dialect

COMMON = [
    '"',
    "'",
    "}",
    "]",
    ")",
    "{",
    "[",
    "12",
    "true",
    "null",
    "None",
    "a",
    "b c",
    "é",
    "🚀",
    "\\",
    "<",
    '"}',
    "0",
]
CLOSING = 0.35
"""How often a marker is taken where one may stand."""


class WalkResult(Struct):
    tokens: list[tuple[int, str]]
    """Ids and what they say, as an engine would give them."""
    complete: bool

    @property
    def text(self) -> str:
        return "".join(piece for _, piece in self.tokens)


class Walker:
    """A vocabulary of all bytes and the dialect's markers, some of which are special tokens."""

    def __init__(self, dialect: Dialect, special: Collection[str] = ()) -> None:
        texts = list(dict.fromkeys([*strings(msgspec.to_builtins(dialect)), *COMMON]))
        texts = [text for text in texts if text not in special]
        self.pieces = [bytes([byte]) for byte in range(256)]
        self.pieces += [text.encode() for text in texts]
        self.special = {text: len(self.pieces) + number for number, text in enumerate(special)}
        self.pieces += [text.encode() for text in special]
        self.end = len(self.pieces)
        self.vocabulary = Vocabulary([*self.pieces, b""], self.special, [self.end])

    def walk(self, constraint: Constraint, chance: random.Random, most: int = 1500) -> WalkResult:
        matcher = constraint.start(self.vocabulary)
        ids: list[int] = []
        while len(ids) < most:
            row = np.zeros(self.end + 1, dtype=np.float32)
            matcher.mask(row)
            allowed = np.flatnonzero(row == 0)
            id_ = self._chosen(allowed, chance)
            if id_ == self.end:
                return WalkResult(self._spelled(ids), True)
            matcher.accept(id_)
            ids.append(id_)
        return WalkResult(self._spelled(ids), False)

    def _chosen(self, allowed: "np.ndarray[tuple[int], np.dtype[np.int64]]", chance: random.Random) -> int:
        if allowed[-1] == self.end and chance.random() < 0.5:
            return self.end
        markers = allowed[(allowed >= 256) & (allowed < self.end)]
        if len(markers) and chance.random() < CLOSING:
            # Special tokens are few among many spellings, and only they lead on.
            known = markers[markers >= self.end - len(self.special)]
            return int(chance.choice(known if len(known) and chance.random() < 0.5 else markers))
        printable = allowed[((allowed >= 32) & (allowed < 127)) | (allowed == 10)]
        if len(printable) and chance.random() < 0.85:
            return int(chance.choice(printable))
        return int(chance.choice(allowed))

    def _spelled(self, ids: list[int]) -> list[tuple[int, str]]:
        """Bytes of one character belong to the token that completes it."""
        items, pending = list[tuple[int, str]](), b""
        for id_ in ids:
            if id_ in self.special.values():
                items.append((id_, self.pieces[id_].decode()))
                continue
            pending += self.pieces[id_]
            try:
                text, pending = pending.decode(), b""
            except UnicodeDecodeError:
                text = ""
            items.append((id_, text))
        assert not pending or len(pending) < 4
        return items


SPECIAL = re.compile(
    r"<\|[^|>]*\|>|<｜[^｜>]*｜>|\[/?[A-Z_]+\]|</?(?:seed:|mm:)?think>|</?tool_call>|<\|[a-z_]+>|<[a-z_]+\|>"
)


def special_tokens(dialect: Dialect) -> list[str]:
    """Those of its markers that look like special tokens, and often are."""
    texts = strings(msgspec.to_builtins(dialect))
    return sorted({mark for text in texts for mark in SPECIAL.findall(text)})


def strings(value: object) -> Iterator[str]:
    """Every string in a declaration."""
    if isinstance(value, str) and value:
        yield from {value, value.strip() or value}
    elif isinstance(value, dict):
        for inner in value.values():
            yield from strings(inner)
    elif isinstance(value, list | tuple | set | frozenset):
        for inner in value:
            yield from strings(inner)
