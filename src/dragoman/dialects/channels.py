"""Answers in blocks. The header of a block says whether it is reasoning, text or a call."""

import re
from typing import TYPE_CHECKING

from dragoman.dialects.compiled import marks_of
from dragoman.dialects.declare import Channels, NamedCalls
from dragoman.dialects.scan import Marks, Wait, structure_of

if TYPE_CHECKING:
    from dragoman.dialects.machine import Machine

WORD = re.compile(r"[\w.\-:/]+")
NAME = re.compile(r"\s*[\w.\-:/]*")
# A word; then markers with a word each, and recipients. Further words are those of prose.
HEADER = re.compile(
    "\\s*[\\w.:/=\\-]*(?:\\s(?:t(?:o(?:=[^\\s<\ud800-\udfff]*(?:\\s\\w*)?)?)?)?|(?:<[^<>\\s]*>?|[\ud800-\udfff])\\s*[\\w.:/\\-]*)*"
)
MOST_HEADER = 256
CALL = NamedCalls()
"""A call of a block has no syntax of its own but its JSON."""


def read_channels(m: "Machine", ch: Channels) -> Wait[None]:
    reader = ChannelReader(m, ch)
    yield from reader.first_header()
    while (yield from reader.outside()):
        pass


class ChannelReader:
    def __init__(self, machine: "Machine", channels: Channels) -> None:
        self.m = machine
        self.ch = channels
        self.body = Marks((channels.body,))
        self.ends = marks_of(channels.ends, channels.start)
        headers = tuple(word for word in channels.header if word == channels.channel)
        self.between = marks_of(channels.start, headers, channels.ends)

    def first_header(self) -> Wait[None]:
        """An answer begins with a header, because the prompt ends with what precedes one, or with text."""
        self.m.hold()
        self.m.open_part()
        if not (yield from self._header(_beginning(self.ch))):
            self.m.unread(self.m.retract())

    def outside(self) -> Wait[bool]:
        """Text up to the next block, and the block. False at the end."""
        m, ch = self.m, self.ch
        mark = yield from m.until(self.between, m.say)
        if not mark:
            return False
        if mark in ch.ends:
            m.close_part()
            return True
        m.hold(len(mark))
        m.open_part(mark)
        if mark not in ch.start:
            m.at -= len(mark)
        if not (yield from self._header(HEADER if ch.header else NAME)):
            given = m.retract()
            m.say(mark)
            m.unread(given[len(mark) :])
        return True

    def _header(self, plausible: re.Pattern[str]) -> Wait[bool]:
        """A header and its body. A header that the end cuts off is nothing."""
        m = self.m
        header, found = yield from m.collect(self.body, plausible, MOST_HEADER)
        if found:
            yield from self._block(header)
            return True
        cut_off = m.ended and m.at == len(m.text) and header.lstrip().startswith(self.ch.header or ("\0",))
        if cut_off:
            m.keep()
        return cut_off

    def _block(self, header: str) -> Wait[None]:
        m, ch = self.m, self.ch
        recipient = self._after(header, ch.recipient) if ch.recipient else header.strip()
        kind = self._after(header, ch.channel) if ch.channel else recipient
        if recipient.startswith(ch.call) and recipient not in ch.reasoning | ch.text | {""}:
            yield from self._call(recipient.removeprefix(ch.call))
        elif kind in ch.reasoning and m.compiled.reasons:
            m.keep()
            m.new_paragraph(reasoning=True)
            yield from self._say_body()
            m.new_paragraph()
        elif kind in ch.reasoning:
            yield from self._leave_as_it_is()
        elif kind in ch.text and (not ch.channel or not recipient):
            m.keep()
            yield from self._say_body()
        else:
            m.keep()
            end = yield from m.until(self.ends, lambda text: None)
            self._reread(end)

    def _after(self, header: str, word: str) -> str:
        """The last word that follows another one in the header."""
        at = header.rfind(word)
        found = WORD.match(header, at + len(word)) if at >= 0 else None
        return found.group() if found else ""

    def _say_body(self) -> Wait[str]:
        m = self.m
        end = yield from m.until(self.ends, m.sink)
        self._reread(end)
        return end

    def _leave_as_it_is(self) -> Wait[None]:
        """Header and body as text, because nobody wants them told apart."""
        self.m.say(self.m.give_back())
        end = yield from self._say_body()
        self.m.say("" if end in self.ch.start else end)

    def _reread(self, end: str) -> None:
        """The block is over. What begins the next one also ends this one."""
        if end in self.ch.start:
            self.m.at -= len(end)
        self.m.close_part()

    def _call(self, name: str) -> Wait[None]:
        m = self.m
        if not m.compiled.calls:
            yield from self._leave_as_it_is()
        elif m.dialect.calls:
            m.keep()
            yield from self._tagged_body()
        else:
            yield from self._json_body(name)

    def _json_body(self, name: str) -> Wait[None]:
        m = self.m
        following = yield from m.space()
        if not self.ch.header and following != "{":
            m.say(m.give_back())
            return
        m.open_call(name, None, CALL)
        complete = False
        if following == "{":
            stops = marks_of(self.ch.ends)
            complete = yield from m.json_container(m.arguments, structure_of(tuple(stops.all)), stops)
        if complete:
            m.close_call()
        end = yield from m.until(self.ends, m.say if complete else m.arguments)
        self._reread(end)
        if end and not complete:
            m.close_call()

    def _tagged_body(self) -> Wait[None]:
        """Calls in the syntax of the dialect, up to the end of the block."""
        m = self.m
        table = m.compiled.text
        marks = marks_of(tuple(table.meanings), self.ch.ends, self.ch.start)
        while True:
            mark = yield from m.until(marks, m.say)
            if not mark or mark in self.ends.all:
                self._reread(mark)
                return
            yield from m.obey(mark, table.meanings[mark])


def _beginning(ch: Channels) -> re.Pattern[str]:
    """Takes the header that an answer begins with, and every beginning of it."""
    if not ch.header:
        return NAME
    words = []
    for word in ch.header:
        # After a recipient nothing but a marker may follow, so that "to=x is the syntax" is text.
        part = (
            HEADER.pattern
            if word == ch.channel
            else "[^\\s<\ud800-\udfff]*\\s*(?:[<\ud800-\udfff][\\s\\S]*)?"
        )
        for character in reversed(word[1:]):
            part = f"(?:{re.escape(character)}{part})?"
        words.append(re.escape(word[0]) + part)
    return re.compile(r"\s*(?:" + "|".join(words) + ")?")
