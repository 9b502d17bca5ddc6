"""Calls of tools that take a text: what the model writes as `{"input": "..."}` is that text, unquoted."""

import json
import re
from collections.abc import Collection, Sequence

from dragoman.dialects.parser import AnswerReader
from dragoman.prompt.encode import replace_surrogates
from dragoman.types import Event

INPUT = "input"
OPENING = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
# Half of a surrogate pair waits for what follows, which may be the other half.
WHOLE = re.compile(
    r"""(?: [^"\\]
          | \\["\\/bfnrt]
          | \\u(?![dD][89abAB])[0-9a-fA-F]{4}
          | \\u[dD][89abAB][0-9a-fA-F]{2} (?: \\u[0-9a-fA-F]{4} | (?=[^\\]|\\[^u]) )
        )*""",
    re.VERBOSE,
)


class Unquoted:
    """`{"input": "a\\\\nb"}` in pieces gives `a`, a newline and `b` in pieces."""

    def __init__(self) -> None:
        self._held = ""
        self._inside = False

    def feed(self, piece: str) -> str:
        self._held += piece
        if not self._inside:
            opening = OPENING.match(self._held)
            if opening is None:
                return ""
            self._inside, self._held = True, self._held[opening.end() :]
        whole = WHOLE.match(self._held)
        quoted = whole[0] if whole else ""
        self._held = self._held[len(quoted) :]
        return replace_surrogates(json.loads(f'"{quoted}"', strict=False))


class CustomCalls:
    """A reader whose calls of the given tools have their text for arguments."""

    def __init__(self, reader: AnswerReader, names: Collection[str]) -> None:
        self._reader = reader
        self._names = names
        self._open: dict[int, Unquoted] = {}

    def feed(self, text: str) -> list[Event]:
        return self._unquoted(self._reader.feed(text))

    def finish(self) -> list[Event]:
        return self._unquoted(self._reader.finish())

    def _unquoted(self, events: Sequence[Event]) -> list[Event]:
        kept = []
        for event in events:
            if event.kind == "call_open" and event.text in self._names:
                self._open[event.call] = Unquoted()
            elif event.kind == "call_arguments" and event.call in self._open:
                event.text = self._open[event.call].feed(event.text)
                if not event.text:
                    continue
            kept.append(event)
        return kept
