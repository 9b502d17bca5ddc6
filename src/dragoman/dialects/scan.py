"""Reading text that comes in pieces. What is built on these few moves cannot tell how it was cut.

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

Readers call them with `yield from`, and are called so themselves; `Wait[T]` is the type of all of them. So a
`yield` anywhere goes up to `Machine.feed`, which gives back what was said so far; the next `feed` appends
text and goes on in the very place where the reader was:

    feed("...<tool_")   until() finds no marker, but its beginning: says "...", keeps "<tool_", yields
    feed("call>{")      until() goes on, finds "<tool_call>", and returns it

Why cuts cannot matter. A move answers only when more text could not change its answer. `Marks` is where that
is decided: "[" is not yet the marker "[" as long as "[TOOL_CALLS]" may come, and "<tool" at the end of the
text is held back, since it may be the beginning of "<tool_call>". When the answer has `ended`, all that is
here is all there is. A reader that uses nothing but moves inherits this, and never looks at `text` itself
unless a move has said what is in it.

Trials. After a marker, a reader does not know yet whether a call follows. `hold` says that what is read from
here on may have to be given back; `keep` ends the trial, and `give_back` returns all that was read on it, to
be said as text. Text is kept, not reread: time is proportional to the text whatever fails.

    text      ... <tool_call> {"nam   e" ...
    at                        ^ what was read before is gone, but for what is held
    append    drops what was read, and keeps the part that is on trial in `_held`

A trial may be told to go on to the end of a call whatever becomes of its parts (`mentioning`): so calls are
read that reasoning only mentions, and then given back whole. `ThoughtMargin` knows where that is.

The quick path. While `until` or a JSON value waits, all that can come is more of the same, unless one of a
few characters is in it. The move leaves in `quick` what those are and of what kind the text is, and
`Machine.feed` passes a piece without any of them straight on, without a generator: one search for a token.

Lone surrogates in the text are special tokens, each as one private character (see compiled.py).
"""

import re
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import lru_cache
from typing import TypeAlias, TypeVar

from dragoman.dialects.declare import find_mention
from dragoman.dialects.schema import escape_json
from dragoman.types import Event, Kind

T = TypeVar("T")
Wait: TypeAlias = Generator[None, None, T]
Sink: TypeAlias = Callable[[str], object]
Quick: TypeAlias = tuple[Kind, re.Pattern[str], Callable[[str], str | None] | None]
"""The kind of what is coming, what would be something else, and what the text goes through, if anything: it
may give back another one.
"""

MOST_MARKER = 64
MOST_PIECES, MOST_LINE = 65536, 1024
"""Of reasoning, what is kept to be looked at, and of its present line."""
SPACE = re.compile(r"\s*")
IN_STRING = re.compile(r'["\\\ud800-\udfff]')
"""What a reader of JSON strings must look at. Lone surrogates stand for special tokens, see `compiled`."""


class IsCall(Exception):
    """What is read on trial has proved to be a call, where nobody asked for calls."""


class Marks:
    """Markers to look for at the same time. The leftmost wins, and of those that start there the longest."""

    def __init__(self, marks: Iterable[str]) -> None:
        self.all = sorted(set(marks), key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, self.all)) or r"(?!)")
        firsts = "".join(sorted({re.escape(mark[0]) for mark in self.all})) + "\ud800-\udfff"
        self.first = re.compile(f"[{firsts}]")
        """What a marker begins with, or a special token that is none here."""
        self.beginnings = {mark[:size] for mark in self.all for size in range(1, len(mark))}
        self._longest = max(map(len, self.all), default=1)

    def search(self, text: str, at: int, ended: bool) -> tuple[int, str]:
        """Where the first marker starts, and which it is; "" if it may only have begun, or is not there."""
        found = self.pattern.search(text, at)
        limit = found.start() if found else len(text)
        if ended:
            return limit, found.group() if found else ""
        begun = self._find_begun(text, max(at, len(text) - self._longest + 1), limit)
        if begun < limit or not found:
            return begun, ""
        # `[` is here, and `[TOOL_CALLS]` may be.
        undecided = len(text) - limit < self._longest and text[limit:] in self.beginnings
        return limit, "" if undecided else found.group()

    def here(self, text: str, at: int, ended: bool) -> str | None:
        """The marker that stands here, "" if none does, None if that is not certain yet."""
        rest = text[at : at + self._longest]
        if not self.all:
            return ""
        if not ended and (not rest or rest in self.beginnings) and at + len(rest) == len(text):
            return None
        found = self.pattern.match(text, at)
        return found.group() if found else ""

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


class ThoughtMargin:
    """What reasoning said so far, as much as tells whether a marker in it is only mentioned: whether a code
    fence is open, and the present line. Each piece is looked at once.
    """

    def __init__(self) -> None:
        self._pieces: deque[str] = deque(maxlen=MOST_PIECES)
        self._line = ""
        self._fenced = False
        self.note = self._pieces.append
        """For each piece, so it has to be quick."""

    def find_mention(self, layout: str) -> str:
        """As `declare.find_mention`, for a marker that stands after this layout."""
        self._look()
        return find_mention(self._line + layout, fenced=self._fenced)

    def _look(self) -> None:
        said = "".join(self._pieces)
        self._pieces.clear()
        # A fence may be cut in two.
        begun = len(self._line) - len(self._line.rstrip("`"))
        ticks = min(begun, 2)
        if (self._line[len(self._line) - ticks :] + said).count("```") % 2:
            self._fenced = not self._fenced
        self._line = (self._line + said).rpartition("\n")[2][-MOST_LINE:]


class Scanner:
    """The text that was not read yet, and what was read on trial and may have to be given back."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.dropped = 0
        """How much was read and is no longer in `text`, but for what passed on the quick path."""
        self.ended = False
        self.holding = False
        self.mentioning = False
        """Whether this trial goes on to the end of a call, whatever its reader makes of the parts."""
        self.quick: Quick | None = None
        """Set while all that can come is more of the same."""
        self.tail = ""
        """The beginning of the marker that was looked for where the answer ended."""
        self._held: list[str] = []
        self._held_from = 0

    def quickly(self, sink: Sink, other: re.Pattern[str]) -> Quick | None:
        """What text for this sink becomes as it stands, while nothing else is in it."""
        return None

    def escaping(self, sink: Sink) -> Sink:
        """A sink for pieces of a string, which are escaped on their way to the other."""
        return lambda text: sink(escape_json(text))

    @property
    def place(self) -> int:
        """Where reading is, in a count that `text` does not begin anew with each piece."""
        return self.dropped + self.at

    @property
    def waiting(self) -> int:
        """How many characters at the end were not read, or only on trial."""
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

    def hold(self, back: int = 0) -> None:
        """What is read from here on, or from `back` characters ago, may have to be given back."""
        self.holding, self._held, self._held_from = True, [], self.at - back

    def keep(self) -> None:
        self.holding = self.mentioning

    def give_back(self) -> str:
        """What was read on trial."""
        if self.mentioning:
            return ""
        self.holding = False
        return "".join(self._held) + self.text[self._held_from : self.at]

    def unread(self, text: str) -> None:
        """Put text back in front of what is to be read."""
        if self.text.endswith(text, 0, self.at):
            self.at -= len(text)
        else:
            self.dropped = self.place - len(text)
            self.text, self.at = text + self.text[self.at :], 0

    def is_half_of(self, closes: Iterable[str]) -> bool:
        """Whether all that is left is the beginning of a closing marker, which the end has cut off."""
        rest = self.text[self.at : self.at + MOST_MARKER]
        return bool(rest) and any(close.startswith(rest) for close in closes)

    # Moves

    def peek(self) -> Wait[str]:
        """The next character, "" at the end."""
        while self.at == len(self.text):
            if self.ended:
                return ""
            yield
        return self.text[self.at]

    def space(self) -> Wait[str]:
        """Skip whitespace; the character after it, "" at the end."""
        while True:
            found = SPACE.match(self.text, self.at)
            self.at = found.end() if found else self.at
            if self.at < len(self.text):
                return self.text[self.at]
            if self.ended:
                return ""
            yield

    def blank(self) -> Wait[str]:
        """Skip whitespace, which is given back: it may yet be a part of something."""
        parts: list[str] = []
        while (yield from self.peek()).isspace():
            found = SPACE.match(self.text, self.at)
            assert found is not None
            parts.append(found.group())
            self.at = found.end()
        return "".join(parts)

    def skip(self, layout: str) -> Wait[None]:
        """Skip as much of the layout as is there."""
        for expected in layout:
            if (yield from self.peek()) != expected:
                return
            self.at += 1

    def match(self, marks: Marks) -> Wait[str]:
        """The marker that stands here, which is read, or ""."""
        mark = yield from self.stands(marks)
        self.at += len(mark)
        return mark

    def stands(self, marks: Marks) -> Wait[str]:
        """The marker that stands here, or ""; nothing is read."""
        while (mark := marks.here(self.text, self.at, self.ended)) is None:
            yield
        return mark

    def until(self, marks: Marks, sink: Sink) -> Wait[str]:
        """Give the text to the sink up to the first marker, which is read; "" at the end."""
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

    def collect(self, marks: Marks, plausible: re.Pattern[str], most: int = 256) -> Wait[tuple[str, str]]:
        """The text up to the first marker, and the marker.

        There is no marker if the text stops being plausible before it, and nothing is read beyond that point.
        The pattern must take every beginning of what it takes.
        """
        text = ""
        while True:
            window = self.text[self.at : self.at + most + 1]
            start, mark = marks.search(window, 0, self.ended or self.at + len(window) < len(self.text))
            text += window[:start]
            found = plausible.match(text, 0, most)
            good = found.end() if found else 0
            self.at += start - max(len(text) - good, 0)
            if self.ended and good < len(text) and text[good:] in marks.beginnings:
                # The end has cut off the marker.
                self.tail, self.at = text[good:], len(self.text)
            if good < len(text) or mark or self.ended:
                self.at += len(mark) if good == len(text) else 0
                return text[:good], mark if good == len(text) else ""
            yield

    # JSON

    def _up_to(self, wanted: re.Pattern[str], sink: Sink) -> Wait[str]:
        """Give the text to the sink up to a character that is wanted, which is not read; "" at the end."""
        while True:
            found = wanted.search(self.text, self.at)
            stop = found.start() if found else len(self.text)
            if stop > self.at:
                sink(self.text[self.at : stop])
            self.at = stop
            if found is not None or self.ended:
                return found.group() if found else ""
            self.quick = self.quickly(sink, wanted)
            yield
            self.quick = None

    def json_string(self, sink: Sink) -> Wait[bool]:
        """The rest of a string, its closing quote included; False if the text ended before."""
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
        self, sink: Sink, structure: re.Pattern[str], stops: Marks, depth: int = 0
    ) -> Wait[bool]:
        """An object or a list, as it stands. False where the text ends, or a stop cuts it off."""
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
            elif (yield from self.stands(stops)):
                return False
            else:
                sink("" if "\ud800" <= character <= "\udfff" else character)
                self.at += 1
        return False


@lru_cache(maxsize=1024)
def structure_of(stops: tuple[str, ...]) -> re.Pattern[str]:
    """What a reader of JSON outside of strings must look at."""
    firsts = "".join(re.escape(c) for c in {stop[0] for stop in stops})
    return re.compile('["{}\\[\\]\ud800-\udfff' + firsts + "]")


# Which of the tokens that were read go with which event.


def share_tokens(said: Sequence[Event], sizes: Sequence[int], waiting: int, unread: int = 0) -> list[int]:
    """How many of the tokens that wait come before all events, as part of what was said earlier, and how many
    go with each event. The others wait on.

    `sizes` are the characters that each token has brought; the reader holds back the last `waiting` of them,
    and behind these `unread` ones have not reached it. A token that reaches into a new part is that part's.
    Within a part, the first event takes all.
    """
    shares = [0] * (len(said) + 1)
    taker = 1 if said[0].begins is None else 0
    end, token, place = sum(sizes) - unread, 0, 0
    for number, event in enumerate(said, 1):
        if event.begins is None:
            continue
        edge = end - event.begins
        while token < len(sizes) and place < edge and place + sizes[token] <= edge:
            place += sizes[token]
            token += 1
            shares[taker] += 1
        taker = number
    while token < len(sizes) and (place < end - waiting or not waiting + unread):
        place += sizes[token]
        token += 1
        shares[taker] += 1
    return shares


# What is told at once.


AT_ONCE = 64
"""Events that are taken before others have their turn, or as few as have about so many ids:"""
IDS_AT_ONCE = 512


def portion(events: list[Event]) -> tuple[list[Event], list[Event]]:
    """As many of the first as may be written at once, and the others."""
    if len(events) == 1:
        return events, []
    ids = 0
    for number, event in enumerate(events[:AT_ONCE], 1):
        ids += len(event.ids)
        if ids >= IDS_AT_ONCE:
            return events[:number], events[number:]
    return events[:AT_ONCE], events[AT_ONCE:]
