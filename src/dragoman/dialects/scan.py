"""Reading text that arrives in chunks. Code built on these few moves cannot tell how the text was cut.

The problem. A model's answer comes in tokens, and a token ends anywhere: in the middle of `<tool_call>`, of a
JSON string, of `\\u00e9`. Events must leave as soon as they are certain, and an answer must be read alike
whether it comes as one text or character by character (law 1 of docs/architecture.md).

The idea. A reader is written as if all text were there, as a generator, and where it needs text that has not
come yet it yields. `Scanner` has the moves that can find out that text is missing, and only they yield:

    peek, space, skip       one character, whitespace, as much of a layout as is there
    match, stands           the marker that is here
    until                   everything up to a marker, given to a sink as it comes
    collect                 a short text up to a marker, which must look like a name or a header
    json_string, json_container    the rest of a JSON value, given to a sink as it stands

Readers call them with `yield from`, and are called so themselves; `Wait[T]` is the type of all of them. A
`yield` anywhere returns to `AnswerStateMachine.feed`, which returns the events so far; the next `feed`
appends text and continues exactly where the reader was:

    feed("...<tool_")   until() finds no marker, but its beginning: emits "...", keeps "<tool_", yields
    feed("call>{")      until() goes on, finds "<tool_call>", and returns it

Why cuts cannot matter. A move answers only when more text could not change its answer. `MarkerSet` is where
that is decided: "[" is not yet the marker "[" as long as "[TOOL_CALLS]" may come, and "<tool" at the end of
the text is held back, since it may be the beginning of "<tool_call>". When the answer has `ended`, all that
is here is all there is. A reader that uses nothing but moves inherits this, and never looks at `text` itself
unless a move has said what is in it.

Trials. After a marker, a reader does not know yet whether a call follows. `begin_trial` begins a trial: what
is read from here on may be rolled back; `commit_trial` commits it, and `abort_trial` aborts it and returns
all that was read, to be emitted as text. Text is kept, not reread: time is proportional to the text whatever
fails.

    text      ... <tool_call> {"nam   e" ...
    at                        ^ what was read before is gone, but for what is held
    append    drops what was read, and keeps the part that is on trial in `_held`

A trial may continue to the end of a call whatever its parts turn out to be (`mentioning`): calls that
reasoning only mentions are read in this way, and then rolled back whole. `MentionTracker` finds such
mentions.

The fast path. While `until` or a JSON value waits, all that can come is more of the same, unless one of a few
characters is in it. The move leaves in `quick` what those are and of what kind the text is, and
`AnswerStateMachine.feed` passes a chunk without any of them straight on, without a generator: one search for
a token.

Lone surrogates in the text are special tokens, each as one private character (see marker_tables.py).
"""

import re
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import lru_cache
from typing import TypeAlias, TypeVar

from dragoman.dialects.declarations import find_mention
from dragoman.dialects.schema import escape_json
from dragoman.types import Event, EventKind

T = TypeVar("T")
Wait: TypeAlias = Generator[None, None, T]
TextSink: TypeAlias = Callable[[str], object]
Quick: TypeAlias = tuple[EventKind, re.Pattern[str], Callable[[str], str | None] | None]
"""The kind of the coming text, a pattern of what would end it, and an optional function that the text goes
through: it may return a replacement.
"""

MOST_MARKER = 64
MOST_PIECES, MOST_LINE = 65536, 1024
"""Maximum of reasoning kept for inspection, in chunks, and of its current line, in characters."""
SPACE = re.compile(r"\s*")
IN_STRING = re.compile(r'["\\\ud800-\udfff]')
"""Characters that a reader of JSON strings must inspect. Lone surrogates stand for special tokens, see
`marker_tables.py`.
"""


class UnrequestedCall(Exception):
    """Raised when a trial has proved to be a call although calls were not requested."""


class MarkerSet:
    """Markers to search for at the same time. The leftmost wins; among those that
    start there, the longest.
    """

    def __init__(self, marks: Iterable[str]) -> None:
        self.all = sorted(set(marks), key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, self.all)) or r"(?!)")
        firsts = "".join(sorted({re.escape(mark[0]) for mark in self.all})) + "\ud800-\udfff"
        self.first = re.compile(f"[{firsts}]")
        """First characters of markers; special tokens that are not markers here also match."""
        self.beginnings = {mark[:size] for mark in self.all for size in range(1, len(mark))}
        self._longest = max(map(len, self.all), default=1)

    def search(self, text: str, at: int, ended: bool) -> tuple[int, str]:
        """Return where the first marker starts, and the marker; "" if it is absent or may be incomplete."""
        match = self.pattern.search(text, at)
        limit = match.start() if match else len(text)
        if ended:
            return limit, match.group() if match else ""
        begun = self._find_begun(text, max(at, len(text) - self._longest + 1), limit)
        if begun < limit or not match:
            return begun, ""
        # `[` is here; `[TOOL_CALLS]` may still come.
        undecided = len(text) - limit < self._longest and text[limit:] in self.beginnings
        return limit, "" if undecided else match.group()

    def here(self, text: str, at: int, ended: bool) -> str | None:
        """Return the marker at this offset, "" if there is none, None if that is not certain yet."""
        rest = text[at : at + self._longest]
        if not self.all:
            return ""
        if not ended and (not rest or rest in self.beginnings) and at + len(rest) == len(text):
            return None
        match = self.pattern.match(text, at)
        return match.group() if match else ""

    def _find_begun(self, text: str, at: int, limit: int) -> int:
        while at < limit:
            candidate = self.first.search(text, at, limit)
            if candidate is None:
                break
            at = candidate.start()
            if text[at:] in self.beginnings:
                return at
            at += 1
        return limit


class MentionTracker:
    """The part of reasoning that decides whether a marker is only mentioned: whether a code fence is open,
    and the current line. Each chunk is inspected once.
    """

    def __init__(self) -> None:
        self._pieces: deque[str] = deque(maxlen=MOST_PIECES)
        self._line = ""
        self._fenced = False
        self.note = self._pieces.append
        """Called for each chunk, so it must be fast."""

    def find_mention(self, layout: str) -> str:
        """Apply `declarations.find_mention` to a marker that follows this layout."""
        self._look()
        return find_mention(self._line + layout, fenced=self._fenced)

    def _look(self) -> None:
        reasoning = "".join(self._pieces)
        self._pieces.clear()
        # A fence may be cut in two.
        begun = len(self._line) - len(self._line.rstrip("`"))
        ticks = min(begun, 2)
        if (self._line[len(self._line) - ticks :] + reasoning).count("```") % 2:
            self._fenced = not self._fenced
        self._line = (self._line + reasoning).rpartition("\n")[2][-MOST_LINE:]


class Scanner:
    """The unread text, and the text that was read on trial and may be rolled back."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.dropped = 0
        """Number of characters read and no longer in `text`, without those that took the fast path."""
        self.ended = False
        self.holding = False
        self.mentioning = False
        """Whether this trial continues to the end of a call, whatever its reader makes of the parts."""
        self.quick: Quick | None = None
        """Set while only more of the same can come."""
        self.tail = ""
        """The truncated marker with which the answer ended."""
        self._held: list[str] = []
        self._held_from = 0

    def quickly(self, sink: TextSink, other: re.Pattern[str]) -> Quick | None:
        """Return how text for this sink can be passed on unparsed, or None."""
        return None

    def escaping(self, sink: TextSink) -> TextSink:
        """Return a sink that escapes chunks of a string and passes them to the given sink."""
        return lambda text: sink(escape_json(text))

    @property
    def offset(self) -> int:
        """Offset of reading in the whole answer."""
        return self.dropped + self.at

    @property
    def waiting(self) -> int:
        """Number of characters at the end that were not read, or only on trial."""
        if not self.holding:
            return len(self.text) - self.at
        return sum(map(len, self._held)) + len(self.text) - self._held_from

    def append(self, text: str) -> None:
        if self.holding:
            self._held.append(self.text[self._held_from : self.at])
            self._held_from = 0
        self.dropped += self.at
        self.text = self.text[self.at :] + text
        self.at = 0

    # Trials

    def begin_trial(self, back: int = 0) -> None:
        """Begin a trial here, or `back` characters earlier: what is read may be rolled back."""
        self.holding, self._held, self._held_from = True, [], self.at - back

    def commit_trial(self) -> None:
        self.holding = self.mentioning

    def abort_trial(self) -> str:
        """End the trial and return the text read on it."""
        if self.mentioning:
            return ""
        self.holding = False
        return "".join(self._held) + self.text[self._held_from : self.at]

    def unread(self, text: str) -> None:
        """Put text back in front of the unread text."""
        if self.text.endswith(text, 0, self.at):
            self.at -= len(text)
        else:
            self.dropped = self.offset - len(text)
            self.text, self.at = text + self.text[self.at :], 0

    def is_half_of(self, closes: Iterable[str]) -> bool:
        """Whether the unread text is the beginning of a closing marker that the end of the answer cut off."""
        rest = self.text[self.at : self.at + MOST_MARKER]
        return bool(rest) and any(close.startswith(rest) for close in closes)

    # Moves

    def peek(self) -> Wait[str]:
        """Return the next character, "" at the end."""
        while self.at == len(self.text):
            if self.ended:
                return ""
            yield
        return self.text[self.at]

    def space(self) -> Wait[str]:
        """Skip whitespace; return the character after it, "" at the end."""
        while True:
            match = SPACE.match(self.text, self.at)
            self.at = match.end() if match else self.at
            if self.at < len(self.text):
                return self.text[self.at]
            if self.ended:
                return ""
            yield

    def blank(self) -> Wait[str]:
        """Skip whitespace and return it, because it may belong to something."""
        parts: list[str] = []
        while (yield from self.peek()).isspace():
            match = SPACE.match(self.text, self.at)
            assert match is not None
            parts.append(match.group())
            self.at = match.end()
        return "".join(parts)

    def skip(self, layout: str) -> Wait[None]:
        """Skip as much of the layout as is there."""
        for expected in layout:
            if (yield from self.peek()) != expected:
                return
            self.at += 1

    def match(self, marks: MarkerSet) -> Wait[str]:
        """Consume and return the marker at this offset, or return ""."""
        mark = yield from self.peek_marker(marks)
        self.at += len(mark)
        return mark

    def peek_marker(self, marks: MarkerSet) -> Wait[str]:
        """Return the marker at this offset, or "", without consuming it."""
        while (mark := marks.here(self.text, self.at, self.ended)) is None:
            yield
        return mark

    def until(self, marks: MarkerSet, sink: TextSink) -> Wait[str]:
        """Pass the text to the sink up to the first marker; consume and return it. "" at the end."""
        while True:
            start, mark = marks.search(self.text, self.at, self.ended)
            if start > self.at:
                sink(self.text[self.at : start])
            self.at = start + len(mark)
            if mark or self.ended:
                return mark
            if self.at == len(self.text):
                self.quick = self.quickly(sink, marks.first)
            yield
            self.quick = None

    def collect(self, marks: MarkerSet, plausible: re.Pattern[str], most: int = 256) -> Wait[tuple[str, str]]:
        """Return the text up to the first marker, and the marker.

        The marker is "" if the text stops being plausible before it; nothing beyond that point is consumed.
        The pattern must match every prefix of what it matches.
        """
        text = ""
        while True:
            window = self.text[self.at : self.at + most + 1]
            start, mark = marks.search(window, 0, self.ended or self.at + len(window) < len(self.text))
            text += window[:start]
            match = plausible.match(text, 0, most)
            good = match.end() if match else 0
            self.at += start - max(len(text) - good, 0)
            if self.ended and good < len(text) and text[good:] in marks.beginnings:
                # The end of the answer cut the marker off.
                self.tail, self.at = text[good:], len(self.text)
            if good < len(text) or mark or self.ended:
                self.at += len(mark) if good == len(text) else 0
                return text[:good], mark if good == len(text) else ""
            yield

    # JSON

    def _up_to(self, wanted: re.Pattern[str], sink: TextSink) -> Wait[str]:
        """Pass the text to the sink up to a wanted character, which is returned but not consumed; "" at the
        end.
        """
        while True:
            match = wanted.search(self.text, self.at)
            stop = match.start() if match else len(self.text)
            if stop > self.at:
                sink(self.text[self.at : stop])
            self.at = stop
            if match is not None or self.ended:
                return match.group() if match else ""
            self.quick = self.quickly(sink, wanted)
            yield
            self.quick = None

    def json_string(self, sink: TextSink) -> Wait[bool]:
        """Read the rest of a string with its closing quote; return False if the text ended before."""
        while character := (yield from self._up_to(IN_STRING, sink)):
            self.at += 1
            if character == '"':
                sink('"')
                return True
            if character == "\\":
                escaped = yield from self.peek()
                sink("\\" + escaped)
                self.at += len(escaped)
        return False

    def json_container(
        self, sink: TextSink, structure: re.Pattern[str], stops: MarkerSet, depth: int = 0
    ) -> Wait[bool]:
        """Pass an object or a list through unchanged. Return False if the text ends, or a stop marker cuts it
        off.
        """
        while character := (yield from self._up_to(structure, sink)):
            if character in '"{[}]':
                self.at += 1
                sink(character)
                if character == '"':
                    if not (yield from self.json_string(sink)):
                        return False
                    continue
                depth += 1 if character in "{[" else -1
                if depth <= 0:
                    return True
            elif (yield from self.peek_marker(stops)):
                return False
            else:
                sink("" if "\ud800" <= character <= "\udfff" else character)
                self.at += 1
        return False


@lru_cache(maxsize=1024)
def structure_of(stops: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern of the characters that a reader of JSON must inspect outside of strings."""
    firsts = "".join(re.escape(c) for c in {stop[0] for stop in stops})
    return re.compile('["{}\\[\\]\ud800-\udfff' + firsts + "]")


# Assignment of tokens to events.


def assign_tokens(events: Sequence[Event], sizes: Sequence[int], waiting: int, unread: int = 0) -> list[int]:
    """Return how many pending tokens come before all events, as part of earlier output, and how many go with
    each event. The other tokens stay pending.

    `sizes` are the characters of each token; the parser holds back the last `waiting` characters, and
    `unread` characters after them have not reached it. A token that extends into a new part belongs to that
    part. Within a part, the first event takes all.
    """
    shares = [0] * (len(events) + 1)
    taker = 1 if events[0].part_chars is None else 0
    end, token, offset = sum(sizes) - unread, 0, 0
    for number, event in enumerate(events, 1):
        if event.part_chars is None:
            continue
        edge = end - event.part_chars
        while token < len(sizes) and offset < edge and offset + sizes[token] <= edge:
            offset += sizes[token]
            token += 1
            shares[taker] += 1
        taker = number
    while token < len(sizes) and (offset < end - waiting or not waiting + unread):
        offset += sizes[token]
        token += 1
        shares[taker] += 1
    return shares


# Batches of events.


AT_ONCE = 64
"""Maximum number of events taken before other requests have their turn; fewer if they
have `IDS_AT_ONCE` ids.
"""
IDS_AT_ONCE = 512


def take_batch(events: list[Event]) -> tuple[list[Event], list[Event]]:
    """Split events into the first ones, which may be written at once, and the rest."""
    if len(events) == 1:
        return events, []
    ids = 0
    for number, event in enumerate(events[:AT_ONCE], 1):
        ids += len(event.ids)
        if ids >= IDS_AT_ONCE:
            return events[:number], events[number:]
    return events[:AT_ONCE], events[AT_ONCE:]
