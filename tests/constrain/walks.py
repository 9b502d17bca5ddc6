"""Answers at random through the masks of a constraint, as a model that knows nothing would give them."""

import random

import numpy as np

from dragoman.constrain.constraint import Constraint
from dragoman.constrain.vocabulary import GrammarMatcher, Vocabulary

WORDS = [
    '"',
    '",',
    '", "',
    '"]',
    '["',
    '["a", "a"',
    '"a"',
    '", "a"',
    "ab",
    "b",
    "{",
    '{"',
    '": ',
    "tru",
    "e",
    "1",
    "12",
]
PIECES = [*(bytes([byte]) for byte in range(256)), *(word.encode() for word in WORDS), "é".encode(), b""]
END = len(PIECES) - 1


def vocabulary() -> Vocabulary:
    """Every byte, tokens of several characters and of parts of one, and an end."""
    return Vocabulary(PIECES, {"<|end|>": END}, [END])


def allowed(matcher: GrammarMatcher) -> list[int]:
    row = np.zeros(len(PIECES) + 3, dtype=np.float32)
    matcher.mask(row)
    return [int(id_) for id_ in np.flatnonzero(row == 0)]


def walk(constraint: Constraint, known: Vocabulary, seed: int, most: int = 400) -> str | None:
    """The text of an answer; None if it did not end within so many tokens."""
    chance = random.Random(seed)
    matcher, text = constraint.start(known), b""
    for _ in range(most):
        ids = allowed(matcher)
        likely = [id_ for id_ in ids if id_ >= 256 or 32 <= id_ < 127] or ids
        chosen = END if END in ids and chance.random() < 0.3 else chance.choice(likely)
        matcher.accept(chosen)
        if chosen == END:
            return text.decode()
        text += PIECES[chosen]
    return None
