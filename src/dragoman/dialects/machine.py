"""The machine that reads an answer: in text or in reasoning, a marker at a time.

A call is read on trial. Until its name is certain, or till its end where a dialect wants that, what was read
may still turn out to be text, and is then given back as such. Nothing is read twice.
"""

import re
from collections.abc import Generator, Iterable

from dragoman.dialects.channels import read_channels
from dragoman.dialects.compiled import Compiled, Meaning, marks_of
from dragoman.dialects.declare import Calls, Spellings
from dragoman.dialects.readers import fits, read_calls
from dragoman.dialects.scan import Marks, Wait
from dragoman.dialects.schema import Tools, escaped
from dragoman.dialects.speech import Speaker
from dragoman.types import Event

HEADER = re.compile(r"[\w.\-]*")
MOST_MARKER = 64
SPAN = re.compile(r"[\s\d:,\[\]]*")


class Machine(Speaker):
    """Feed it text; it says events. One machine reads one answer.

    `verbatim` says that text, once it has begun, is all that comes: a marker in it is a quotation.
    """

    def __init__(
        self, compiled: Compiled, tools: Tools, *, starts_in_reasoning: bool = False, verbatim: bool = False
    ) -> None:
        super().__init__(compiled, tools)
        self.verbatim = verbatim
        thinking = self.dialect.reasoning
        if starts_in_reasoning and thinking is not None:
            self.reasoning = True
            self.think(thinking.preface)
        if self.dialect.prepends:
            self.say(self.dialect.prepends)
        self._between_calls = False
        self._run: Generator[None, None, None] = self._main()
        next(self._run, None)

    def feed(self, text: str) -> list[Event]:
        if self.compiled.replaced:
            text = text.translate(self.compiled.replaced)
        # Most tokens end here: all that can come is more of the same, and nothing else is in this one.
        if self.quick is not None and not self._events:
            kind, other, to_escape = self.quick
            if other.search(text) is None:
                said = escaped(text) if to_escape else text
                return self.drafted(Event(kind, 0, said, call=self.calls - 1), text)
        self.append(text)
        next(self._run, None)
        return self.taken()

    def finish(self) -> list[Event]:
        self.ended = True
        if self._between_calls and self._half_of(close for group in self.awaited for close in group):
            self.at = len(self.text)
        next(self._run, None)
        self.last_words()
        return self.taken()

    def _main(self) -> Generator[None, None, None]:
        if self.dialect.channels is not None:
            yield from read_channels(self, self.dialect.channels)
            return
        while True:
            table = self.compiled.reasoning if self.reasoning else self.compiled.text
            self._between_calls = True
            mark = yield from self.until(table.marks, self.sink)
            self._between_calls = False
            if not mark:
                return
            if self.verbatim and self._quoted(mark):
                self.sink(mark)
            else:
                yield from self.obey(mark, table.meanings[mark])

    def _quoted(self, mark: str) -> bool:
        """Whether a marker stands inside of text. A special token never does, nor does what ends the text."""
        special = not self.compiled.unseen.keys().isdisjoint(map(ord, mark))
        return self.in_text and not special and mark.strip() != self.dialect.text_close.strip()

    def obey(self, mark: str, meaning: Meaning) -> Wait[None]:
        """Do what a marker means."""
        match meaning.action:
            case "section" | "call":
                yield from self._try(mark, meaning)
                return
            case "open":
                self.new_paragraph(reasoning=True)
            case "close":
                self.new_paragraph()
            case "back":
                self.at -= len(meaning.core)
                self.new_paragraph()
            case "span":
                yield from self._drop_span(mark, meaning)
            case "end" if self._expected(meaning.core):
                self.forget_layout()
            case "end":
                self.sink(mark)
                return
        yield from self.skip(meaning.trail)

    def _drop_span(self, mark: str, meaning: Meaning) -> Wait[None]:
        self.hold(len(mark))
        _, end = yield from self.collect(Marks((meaning.until,)), SPAN)
        given = self.give_back()
        self.sink("" if end else given)

    # Closing markers

    def _await(self, closes: Spellings) -> None:
        if closes:
            self.awaited |= {frozenset(spelling.strip() for spelling in closes)}

    def _expected(self, close: str) -> bool:
        """Whether a closing marker closes something that was opened."""
        groups = {group for group in self.awaited if close in group}
        self.awaited -= groups
        return bool(groups)

    # Trials

    def _try(self, mark: str, meaning: Meaning) -> Wait[None]:
        """A call may follow. If none does, the marker and what was read after it are text."""
        self.hold(len(mark))
        if meaning.bare:
            self.at -= len(meaning.core)
        shape = yield from self._shape(meaning)
        if shape is not None:
            complete = yield from read_calls(self, shape)
            if complete or not self.holding:
                yield from self._close(shape, meaning)
        if self.holding:
            dropped = shape is not None and shape.late and self.ended and self.at == len(self.text)
            self._take_back(meaning, dropped=dropped)
        elif shape is None:
            yield from self.skip(meaning.trail)

    def _take_back(self, meaning: Meaning, *, dropped: bool) -> None:
        given = self.retract()
        if not given:
            # A bare call that failed at its first character: at least this one is read, as text.
            self.at += len(meaning.core)
            given = meaning.core
        if meaning.shapes[0].silent:
            given = meaning.openings.pattern.sub("", given)
        if self.reasoning and meaning.core in self.compiled.ends_reasoning:
            self.new_paragraph()
        self.sink("" if dropped else given)

    def _shape(self, meaning: Meaning) -> Wait[Calls | None]:
        """Of the calls that the marker may lead to, the one whose beginning is here."""
        if meaning.action == "section":
            return (yield from self._in_section(meaning))
        shapes = [shape for shape in meaning.shapes if self._allowed(shape)]
        if len(shapes) < 2:
            return shapes[0] if shapes else None
        following = yield from self.space()
        return next((shape for shape in shapes if fits(shape, following)), None)

    def _allowed(self, shape: Calls) -> bool:
        section = shape.section
        if section is None or not section.required:
            return True
        return any(section.close[0].strip() in group for group in self.awaited)

    def _in_section(self, meaning: Meaning) -> Wait[Calls | None]:
        """After the opening of a section: the first call, or the end of an empty one."""
        following = yield from self.space()
        for shape in meaning.shapes:
            section = shape.section
            assert section is not None
            if (yield from self.match(marks_of(section.close))):
                self.keep()
                return None
            if section.header:
                _, found = yield from self.collect(marks_of(shape.open), HEADER)
            elif shape.open:
                found = yield from self.match(marks_of(shape.open))
            else:
                found = following if fits(shape, following) else ""
            if found:
                self._await(section.close)
                return shape
        return None

    def _close(self, shape: Calls, meaning: Meaning) -> Wait[None]:
        """After a call its closing marker, if it is there. What may still come is no text then."""
        if shape.section is not None and meaning.action == "call":
            self._await(shape.section.close)
        if shape.close:
            yield from self.space()
            closes = marks_of(shape.close)
            if not (yield from self.match(closes)):
                self._await(shape.close)
                self.at = len(self.text) if self.ended and self._half_of(closes.all) else self.at

    def _half_of(self, closes: Iterable[str]) -> bool:
        """Whether all that is left is the beginning of a closing marker, which the end has cut off."""
        rest = self.text[self.at : self.at + MOST_MARKER]
        return bool(rest) and any(close.startswith(rest) for close in closes)
