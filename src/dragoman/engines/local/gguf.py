"""The header of a GGUF file, walked through before the native library does: nothing in it may lead outside.

What the library reads it trusts more or less; counts and lengths that cannot be are how others were broken
into. Only what is impossible is refused here: whether a model can be run is for the library to say.
"""

import mmap
import struct
from pathlib import Path

from dragoman.errors import ModelFileError

_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of the kinds of values, but for texts and lists."""
_UINT32, _TEXT, _LIST = 4, 8, 9
_READ_VERSIONS = (2, 3)
_MOST_DIMENSIONS = 4
_LONGEST_NAME = 63
_SMALLEST_TENSOR = 8 + 4 + 8 + 4 + 8
_SMALLEST_VALUE = 8 + 4 + 1


class _Wrong(Exception):
    """What is wrong, as the end of a sentence about the file."""


def check_header(path: Path) -> None:
    """Raise ModelFileError for a file, not an empty one, whose header cannot be true."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            _Header(data, len(data)).check()
        except _Wrong as wrong:
            message = f"{path.name} is damaged or was not downloaded to its end: {wrong}."
            raise ModelFileError(message) from None


class _Header:
    def __init__(self, data: mmap.mmap, size: int) -> None:
        self._data = data
        self._size = size
        self._at = 4
        self._alignment = 32

    def check(self) -> None:
        version = self._number("<I")
        if version not in _READ_VERSIONS:
            # Older ones have shorter lengths, and the library refuses them by name.
            return
        tensors, values = self._number("<Q"), self._number("<Q")
        self._fits(values, _SMALLEST_VALUE, "metadata")
        for _ in range(values):
            self._value()
        self._fits(tensors, _SMALLEST_TENSOR, "tensors")
        offsets = [self._tensor() for _ in range(tensors)]
        begin = -(-self._at // self._alignment) * self._alignment
        if any(offset % self._alignment or begin + offset > self._size for offset in offsets):
            raise _Wrong("a tensor is said to be where it cannot be")

    def _value(self) -> None:
        key = self._text()
        kind = self._number("<I")
        if key == b"general.alignment" and kind == _UINT32:
            self._alignment = self._number("<I")
            if self._alignment == 0 or self._alignment & (self._alignment - 1):
                raise _Wrong("its alignment is no power of two")
        elif kind == _TEXT:
            self._skip_texts(1)
        elif kind == _LIST:
            self._list()
        else:
            self._skip(self._size_of(kind))

    def _list(self) -> None:
        kind, count = self._number("<I"), self._number("<Q")
        if kind == _TEXT:
            self._fits(count, 8, "texts in a list")
            self._skip_texts(count)
        else:
            self._skip(self._size_of(kind) * count)

    def _tensor(self) -> int:
        """Where its data begin, behind the header."""
        if len(self._text()) > _LONGEST_NAME:
            raise _Wrong("the name of a tensor is too long")
        dimensions = self._number("<I")
        if dimensions > _MOST_DIMENSIONS:
            raise _Wrong("a tensor has more than four dimensions")
        elements = 1
        for _ in range(dimensions):
            elements *= self._number("<Q")
        if not 0 < elements < 2**63:
            raise _Wrong("a tensor has a size that cannot be")
        self._skip(4)
        return self._number("<Q")

    def _size_of(self, kind: int) -> int:
        if kind not in _SIZES:
            raise _Wrong("a value of its metadata is of no known kind")
        return _SIZES[kind]

    def _fits(self, count: int, least: int, what: str) -> None:
        """Before anything is done so many times."""
        if count > (self._size - self._at) // least:
            raise _Wrong(f"it is too short for its number of {what}")

    def _number(self, form: str) -> int:
        at = self._at
        self._skip(struct.calcsize(form))
        number: int = struct.unpack_from(form, self._data, at)[0]
        return number

    def _text(self) -> bytes:
        length = self._number("<Q")
        at = self._at
        self._skip(length)
        return self._data[at : at + min(length, 256)]

    def _skip_texts(self, count: int) -> None:
        # A vocabulary has hundreds of thousands, hence no call for each.
        at, size, data, unpack = self._at, self._size - 8, self._data, struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at > size:
                raise _Wrong("it ends within its header")
            at += 8 + unpack(data, at)[0]
        self._at = at
        self._skip(0)

    def _skip(self, length: int) -> None:
        self._at += length
        if self._at > self._size:
            raise _Wrong("it ends within its header")
