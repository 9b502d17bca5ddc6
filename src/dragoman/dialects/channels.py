"""Parser of answers in blocks, whose header says whether a block is reasoning, text or a call."""

import re
from typing import TYPE_CHECKING

from msgspec import Struct

from dragoman.dialects.declarations import Channels, NamedCalls
from dragoman.dialects.marker_tables import SPECIAL, SPELLED, marks_of
from dragoman.dialects.scan import MarkerSet, Wait, structure_of

if TYPE_CHECKING:
    from dragoman.dialects.state_machine import AnswerStateMachine

NAME = re.compile(r"\s*[\w.\-:/]*")
RECIPIENT = "[^\\s<\ud800-\udfff]*"
MARK = f"(?:<(?:\\|[{SPELLED}]*>?)?|[\ud800-\udfff])"
# Recipients, and markers followed by one word each; the body's type may follow either.
TAIL = (
    rf"(?:\s(?:t(?:o(?:={RECIPIENT}(?:\s\w*)?)?)?)?"
    rf"|{MARK}\s*[\w.:/\-]*(?:\s(?:to={RECIPIENT}(?:\s\w*)?|\w*))?)*"
)
# One word and its tail. Further words mean that the text is prose, not a header.
HEADER = re.compile("\\s*[\\w.:/=\\-]*" + TAIL)
MOST_HEADER = 256
ASIDE = frozenset({"assistant", "to=assistant", "to=user", "json", "code"})
"""Words of a header that do not affect its block: the speaker, the user as recipient, the format."""
CALL = NamedCalls()
"""The call syntax of a block: only JSON, without markers."""


class BlockHeader(Struct, frozen=True):
    """Contents of a block's header."""

    kind: str = ""
    """Channel, or recipient in dialects without channels."""
    tool: str = ""
    other: str = ""
    """Unknown words; they become text."""


def read_channels(m: "AnswerStateMachine", ch: Channels) -> Wait[None]:
    reader = ChannelReader(m, ch)
    yield from reader.first_header()
    while (yield from reader.outside()):
        pass


class ChannelReader:
    def __init__(self, machine: "AnswerStateMachine", channels: Channels) -> None:
        self.m = machine
        self.ch = channels
        self.body = MarkerSet((channels.body,))
        self.ends = marks_of(channels.ends, channels.start)
        headers = tuple(word for word in channels.header if word == channels.channel)
        self.between = marks_of(channels.start, headers, channels.ends)

    def first_header(self) -> Wait[None]:
        """Read the first header. An answer begins with a header whose opening is in the
        prompt, or with text.
        """
        self.m.begin_trial()
        self.m.open_part()
        if not (yield from self._header(_beginning(self.ch))):
            self.m.unread(self.m.roll_back())

    def outside(self) -> Wait[bool]:
        """Read text up to the next block, and the block. Return False at the end of the answer."""
        m, ch = self.m, self.ch
        mark = yield from m.until(self.between, m.emit_text)
        if not mark:
            return False
        if mark in ch.ends:
            m.close_part()
            return True
        m.begin_trial(len(mark))
        m.open_part(mark)
        if mark not in ch.start:
            m.at -= len(mark)
        plausible = HEADER if ch.channel else _beginning(ch)
        if not (yield from self._header(plausible)):
            cut_off = m.ended and m.at == len(m.text)
            text = m.roll_back()
            if cut_off:
                m.emit_text(self._read(text.removeprefix(mark), cut_off=True).other)
            else:
                m.emit_text(mark)
                m.unread(text[len(mark) :])
        return True

    def _header(self, plausible: re.Pattern[str]) -> Wait[bool]:
        """Read a header and its body. Return True also for a header cut off by the end of the answer: it is
        dropped.
        """
        m = self.m
        header, text = yield from m.collect(self.body, plausible, MOST_HEADER)
        if text:
            yield from self._block(header)
            return True
        if not m.ended or m.at < len(m.text) or not self._begins(header):
            return False
        m.commit_trial()
        return True

    def _begins(self, header: str) -> bool:
        """Whether the text is the beginning of a header and nothing else. Models put a space before `to`."""
        written = header.lstrip()
        if written.startswith(self.ch.header or ("\0",)):
            return not self._read(header, cut_off=True).other
        return header[:1] == " " and any(word.startswith(written) for word in self.ch.header if written)

    def _read(self, header: str, *, cut_off: bool = False) -> BlockHeader:
        """Parse a header. The last channel and the last recipient count. If it is `cut_off`, its last word
        may be incomplete.
        """
        ch = self.ch
        half_marker = header[header.rfind("<") :] if cut_off and "<" in header else ""
        if half_marker and ch.body.startswith(half_marker):
            header = header.removesuffix(half_marker)
        words = SPECIAL.sub(" ", header).split()
        kind, tool, others = "", "", list[str]()
        kinds = ch.reasoning | ch.text
        half = words.pop() if cut_off and words and not header[-1:].isspace() else ""
        for word in words:
            recipient = word.removeprefix(ch.recipient) if word.startswith(ch.recipient) else ""
            if (word if ch.channel else recipient) in kinds:
                kind = word if ch.channel else recipient
            elif (name := self._find_tool(recipient)) and word not in ASIDE:
                others += [ch.recipient + ch.call + tool] if tool else []
                tool = name
            elif word not in ASIDE and word != ch.recipient:
                others.append(word)
        if half and not self._may_become_known(half):
            others.append(half)
        if cut_off and tool and tool not in self.m.tools:
            others.append(ch.recipient + ch.call + tool)
        return BlockHeader(kind, tool, " ".join(others))

    def _find_tool(self, recipient: str) -> str:
        """Return the name of the tool that the block calls, or "". A declared tool's name needs no prefix."""
        declared = recipient in self.m.tools
        return recipient.removeprefix(self.ch.call) if declared or recipient.startswith(self.ch.call) else ""

    def _may_become_known(self, half: str) -> bool:
        ch, lead = self.ch, self.ch.recipient + self.ch.call
        kinds = ch.reasoning | ch.text
        known = [*ASIDE, lead, *(kinds if ch.channel else (ch.recipient + kind for kind in kinds))]
        return any(word.startswith(half) for word in (*known, *(lead + name for name in self.m.tools)))

    def _block(self, written: str) -> Wait[None]:
        m, ch = self.m, self.ch
        header = self._read(written)
        if header.tool:
            yield from self._call(header)
        elif header.kind in ch.reasoning and not m.compiled.reasons:
            yield from self._leave_as_it_is()
        elif not ch.header and not header.kind:
            m.emit_text(m.abort_trial())
        else:
            m.commit_trial()
            if header.kind in ch.reasoning:
                m.new_paragraph(reasoning=True)
            m.sink(header.other and header.other + "\n")
            yield from self._say_body()
            if header.kind in ch.reasoning:
                m.new_paragraph()

    def _say_body(self) -> Wait[str]:
        m = self.m
        end = yield from m.until(self.ends, m.sink)
        self._reread(end)
        return end

    def _leave_as_it_is(self) -> Wait[None]:
        """Emit header and body as text, because the caller wants no separation."""
        self.m.emit_text(self.m.abort_trial())
        end = yield from self._say_body()
        self.m.emit_text("" if end in self.ch.start else end)

    def _reread(self, end: str) -> None:
        """End the block. A marker that opens the next block also ends this one and is read again."""
        if end in self.ch.start:
            self.m.at -= len(end)
        self.m.close_part()

    def _call(self, header: BlockHeader) -> Wait[None]:
        m = self.m
        if not m.compiled.calls:
            yield from self._leave_as_it_is()
            return
        m.set_aside(header.other)
        if m.dialect.calls:
            m.commit_trial()
            yield from self._tagged_body(header.tool)
        else:
            yield from self._json_body(header.tool)

    def _json_body(self, name: str) -> Wait[None]:
        m = self.m
        following = yield from m.space()
        if not self.ch.header and following != "{":
            m.emit_text(m.abort_trial())
            return
        m.open_call(name, None, CALL)
        complete = False
        if following == "{":
            stops = marks_of(self.ch.ends)
            complete = yield from m.json_container(m.arguments, structure_of(tuple(stops.all)), stops)
        if complete:
            m.close_call()
        end = yield from m.until(self.ends, m.emit_text if complete else m.arguments)
        self._reread(end)
        if end and not complete:
            m.close_call()
        m.say_left()

    def _tagged_body(self, name: str) -> Wait[None]:
        """Read calls in the dialect's own syntax, up to the end of the block. The name in the block's header
        is the name of a call in it; if it is not, it becomes text.
        """
        m = self.m
        table = m.compiled.text
        marks = marks_of(tuple(table.meanings), self.ch.ends, self.ch.start)
        m.header, m.heads_text = name, True
        while True:
            mark = yield from m.until(marks, m.emit_text)
            if not mark or mark in self.ends.all:
                m.heads_text = False
                m.emit_text(m.header)
                m.header = ""
                m.say_left()
                self._reread(mark)
                return
            yield from m.apply_marker(mark, table.meanings[mark])


def _beginning(ch: Channels) -> re.Pattern[str]:
    """Compile the pattern of the header that an answer begins with; it also matches every prefix of one."""
    if not ch.header:
        return NAME
    words = []
    for word in ch.header:
        # Only a marker may follow a recipient, so "to=x is the syntax" is text.
        part = HEADER.pattern if word == ch.channel else RECIPIENT + (TAIL if ch.channel else r"\s*")
        for character in reversed(word[1:]):
            part = f"(?:{re.escape(character)}{part})?"
        words.append(re.escape(word[0]) + part)
    return re.compile(r"\s*(?:" + "|".join(words) + ")?")
