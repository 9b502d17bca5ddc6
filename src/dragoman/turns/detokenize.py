"""Ids to text, one at a time: a table of pieces, and a UTF-8 decoder for characters cut between ids."""

import codecs
from collections.abc import Mapping, Sequence

_decoder = codecs.getincrementaldecoder("utf-8")


class Pieces:
    """What each id says, made once per model. An id whose bytes are not whole characters has no text."""

    def __init__(self, pieces: Sequence[bytes], special: frozenset[int] = frozenset()) -> None:
        self.bytes = pieces
        self.shown = [_whole(piece) for piece in pieces]
        self.hidden = ["" if id_ in special else text for id_, text in enumerate(self.shown)]
        self.special = special
        self.marks: Mapping[int, str] = {}

    def marked(self, marks: Mapping[int, str]) -> "Pieces":
        """The same with a private character for some special ids, whether such ids are shown or not."""
        made = Pieces([], self.special)
        made.bytes, made.marks = self.bytes, marks
        made.shown, made.hidden = self.shown.copy(), self.hidden.copy()
        for id_, mark in marks.items():
            made.shown[id_] = made.hidden[id_] = mark
        return made

    def __len__(self) -> int:
        return len(self.bytes)

    def text(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        reader = Detokenizer(self, skip_special=skip_special)
        return "".join(map(reader.feed, ids)) + reader.flush()


class Detokenizer:
    """`feed` gives the text an id completes, which is empty while a character is still open."""

    __slots__ = ("_bytes", "_decoder", "_marks", "_open", "_texts")

    def __init__(self, pieces: Pieces, *, skip_special: bool) -> None:
        self._texts = pieces.hidden if skip_special else pieces.shown
        self._bytes = pieces.bytes
        self._marks = pieces.marks
        self._decoder = _decoder("replace")
        self._open = False

    def feed(self, id_: int) -> str:
        text = self._texts[id_]
        if not self._open:
            if text is not None:
                return text
            self._open = True
        elif id_ in self._marks:
            return self.flush() + self._marks[id_]
        # An empty text is a special token that is skipped: it must not end an open character.
        return self._advance(b"" if text == "" else self._bytes[id_])

    def _advance(self, piece: bytes) -> str:
        out = self._decoder.decode(piece)
        self._open = bool(self._decoder.getstate()[0])
        return out

    def flush(self) -> str:
        """What is left at the end, or at a mark: an unfinished character becomes U+FFFD."""
        self._open = False
        return self._decoder.decode(b"", True)


def _whole(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None
