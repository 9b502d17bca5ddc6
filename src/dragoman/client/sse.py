"""Server-sent events: bytes in, however they are cut, whole events out."""

from msgspec import Struct

DONE = b"[DONE]"
_BOM = b"\xef\xbb\xbf"
LONGEST = 64 * 1024 * 1024
"""Bytes of one event. Nobody sends as much; a server that never ends a line must not fill the memory."""


class EventTooLong(ValueError):
    """An event that does not end."""


class SseEvent(Struct):
    data: bytes
    name: bytes = b""
    """What its `event:` line said."""


class SseReader:
    """Lines may end in LF, CR LF or CR; what is no data and no name (comments, ids) is left out.

    >>> reader = SseReader()
    >>> reader.feed(b"data: a"), reader.feed(b"b\\n\\n: ping\\n\\n")
    ([], [SseEvent(data=b'ab', name=b'')])
    """

    def __init__(self, longest: int = LONGEST) -> None:
        self._longest = longest
        self._line: list[bytes] = []
        """The pieces of a line whose end has not come."""
        self._size = 0
        self._data: list[bytes] = []
        self._name = b""
        self._first = True
        self._after_cr = False

    def feed(self, data: bytes) -> list[SseEvent]:
        # Only these ends of line: a text splitter would also cut at U+2028, which JSON may hold as it is.
        head, *rest = self._plain(data).split(b"\n")
        self._line.append(head)
        self._size += len(data)
        if not rest:
            self._check()
            return []
        lines = [b"".join(self._line), *rest[:-1]]
        self._line = [rest[-1]]
        if self._first:
            self._first, lines[0] = False, lines[0].removeprefix(_BOM)
        events = self._events(lines)
        if events:
            self._size = len(rest[-1])
        self._check()
        return events

    def end(self) -> list[SseEvent]:
        """No more bytes: an event without the blank line behind it counts, for some servers forget it."""
        return self.feed(b"\n\n")

    def _check(self) -> None:
        if self._size > self._longest:
            raise EventTooLong(f"An event has more than {self._longest} bytes.")

    def _plain(self, data: bytes) -> bytes:
        """The same with LF alone, where CR LF may be cut in two."""
        if not data:
            return data
        after, self._after_cr = self._after_cr, data.endswith(b"\r")
        if after and data.startswith(b"\n"):
            data = data[1:]
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n") if b"\r" in data else data

    def _events(self, lines: list[bytes]) -> list[SseEvent]:
        events = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(_value(line[5:]))
            elif line.startswith(b"event:"):
                self._name = _value(line[6:])
            elif not line:
                if self._data:
                    events.append(SseEvent(b"\n".join(self._data), self._name))
                self._data, self._name = [], b""
        return events


def _value(text: bytes) -> bytes:
    return text[1:] if text.startswith(b" ") else text
