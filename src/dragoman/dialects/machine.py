"""The machine that reads an answer: in text or in reasoning, a marker at a time.

A call is read on trial. Until its name is certain, or till its end where a dialect wants that, what was read
may still turn out to be text, and is then given back as such. Nothing is read twice.
"""

import re
from collections.abc import Generator
from secrets import token_hex

from dragoman.dialects.channels import read_channels
from dragoman.dialects.compiled import Compiled, Meaning, marks_of
from dragoman.dialects.declare import Calls, Spellings
from dragoman.dialects.readers import fits, read_calls
from dragoman.dialects.scan import Marks, Quick, Scanner, Sink, Wait
from dragoman.dialects.schema import Tools, escaped
from dragoman.folding import coalesce
from dragoman.types import Event, Kind

HEADER = re.compile(r"[\w.\-]*")
SPAN = re.compile(r"[\s\d:,\[\]]*")
MOST_SPAN = 256


class Machine(Scanner):
    """Feed it text; it says events. One machine reads one answer."""

    def __init__(self, compiled: Compiled, tools: Tools, *, starts_in_reasoning: bool = False) -> None:
        super().__init__()
        self.compiled = compiled
        self.dialect = compiled.dialect
        self.tools = tools
        self.calls = 0
        self.reasoning = starts_in_reasoning and self.dialect.reasoning is not None
        self._events: list[Event] = []
        self._draft: list[Event] | None = None
        self._blank: list[str] | None = []
        """Whitespace that may turn out to be layout; None after text that is none."""
        self._said = False
        self._ids: set[str] = set()
        self._awaited: list[frozenset[str]] = []
        """Closing markers that have yet to come; where one does, it is no text."""
        self._run: Generator[None, None, None] = self._main()
        if self.reasoning and self.dialect.reasoning and self.dialect.reasoning.preface:
            self.think(self.dialect.reasoning.preface)
        if self.dialect.prepends:
            self.say(self.dialect.prepends)
        next(self._run, None)

    # In and out

    def feed(self, text: str) -> list[Event]:
        if self.quick is not None and not self._events:
            kind, other = self.quick
            if other.search(text) is None and not self.compiled.replaced:
                return [Event(kind, 0, text, call=self.calls - 1)]
        self.append(text.translate(self.compiled.replaced) if self.compiled.replaced else text)
        next(self._run, None)
        return self._taken()

    def finish(self) -> list[Event]:
        self.ended = True
        next(self._run, None)
        if self._blank and not self._said:
            self.emit("text", "".join(self._blank))
        return self._taken()

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        if self.compiled.sentinels:
            for event in events:
                event.text = event.text.translate(self.compiled.unseen)
            events = [event for event in events if event.text or event.kind in ("call_open", "call_close")]
        return coalesce(events) if len(events) > 1 else events

    def emit(self, kind: Kind, text: str) -> None:
        if text:
            self._said = True
            into = self._events if self._draft is None else self._draft
            into.append(Event(kind, 0, text, call=self.calls - 1))

    def say(self, text: str) -> None:
        """Text for the reader, unless it is layout around calls."""
        if self._blank is not None:
            if not text.strip():
                self._blank.append(text)
                return
            text = "".join(self._blank) + text
            self._blank = None
        self.emit("text", text)

    def think(self, text: str) -> None:
        self.emit("reasoning", text)

    def arguments(self, text: str) -> None:
        self.emit("call_arguments", text)

    def string_arguments(self, text: str) -> None:
        """A piece of a string, which has yet to be escaped."""
        self.emit("call_arguments", escaped(text))

    def quickly(self, sink: Sink, other: re.Pattern[str], escaped: re.Pattern[str]) -> Quick | None:
        if sink == self.say:
            return ("text", other) if self._blank is None else None
        if sink == self.think:
            return "reasoning", other
        if self._draft is None and sink in (self.arguments, self.string_arguments):
            return "call_arguments", other if sink == self.arguments else escaped
        return None

    def escaping(self, sink: Sink) -> Sink:
        return self.string_arguments if sink == self.arguments else super().escaping(sink)

    # Calls, for the readers

    def begin_call(self, shape: Calls) -> None:
        """A call may begin here; what is read is on trial."""
        if not self.holding:
            self.hold()
        if shape.whole and self._draft is None:
            self._draft = []

    def open_call(self, name: str, id_: str | None, shape: Calls) -> None:
        """The name is certain. What follows is said as it comes, unless the shape wants the whole."""
        if not shape.whole:
            self.keep()
        into = self._events if self._draft is None else self._draft
        into.append(Event("call_open", 0, name, call=self.calls, call_id=self._id(name, id_, shape)))
        self.calls += 1
        self.reasoning, self._said, self._blank = False, True, []

    def close_call(self) -> None:
        """The call is complete."""
        if self._draft is not None:
            self._events += self._draft
            self._draft = None
            self.keep()
        self._events.append(Event("call_close", 0, call=self.calls - 1))

    def _id(self, name: str, id_: str | None, shape: Calls) -> str:
        if not id_ or id_ in self._ids:
            made_up = {
                "call": "call_" + token_hex(12),
                "mistral": token_hex(5)[:9],
                "kimi": f"functions.{name}:{self.calls}",
            }
            id_ = made_up[shape.ids]
        self._ids.add(id_)
        return id_

    # The two states

    def _main(self) -> Generator[None, None, None]:
        if self.dialect.channels is not None:
            yield from read_channels(self, self.dialect.channels)
            return
        while True:
            table = self.compiled.reasoning if self.reasoning else self.compiled.text
            mark = yield from self.until(table.marks, self.think if self.reasoning else self.say)
            if not mark:
                return
            yield from self.obey(mark, table.meanings[mark])

    def obey(self, mark: str, meaning: Meaning) -> Wait[None]:
        action = meaning.action
        if action in ("section", "call"):
            yield from self._try(mark, meaning)
            return
        if action == "span":
            self.hold(len(mark))
            _, end = yield from self.collect(Marks((meaning.until,)), SPAN, MOST_SPAN)
            given = self.give_back()
            self.give_text("" if end else given)
        elif action == "back":
            self.at -= len(meaning.core)
            self._leave_reasoning()
        elif action == "end":
            if not self._expected(meaning.core):
                self.give_text(mark)
                return
            self._blank = None if self._blank is None else []
        elif action == "open":
            self._leave_reasoning()
            self.reasoning = True
        elif action == "close":
            self._leave_reasoning()
        yield from self.skip(meaning.trail)

    def _leave_reasoning(self) -> None:
        self.reasoning, self._said, self._blank = False, True, []

    def give_text(self, text: str) -> None:
        (self.think if self.reasoning else self.say)(text)

    def _await(self, closes: Spellings) -> None:
        if closes:
            self._awaited.append(frozenset(spelling.strip() for spelling in closes))

    def _expected(self, close: str) -> bool:
        """Whether a closing marker closes something that was opened."""
        group = next((group for group in self._awaited if close in group), None)
        if group is not None:
            self._awaited.remove(group)
        return group is not None

    # Trials

    def _try(self, mark: str, meaning: Meaning) -> Wait[None]:
        """A call may follow. If none does, the marker and what was read after it are text."""
        self.hold(len(mark))
        reasoning, awaited, first = self.reasoning, list(self._awaited), self.calls
        if meaning.bare:
            self.at -= len(meaning.core)
        shape = yield from self._shape(meaning)
        if shape is not None:
            complete = yield from read_calls(self, shape)
            if complete or (self.calls > first and not self.holding):
                yield from self._close(shape, meaning)
        if self.holding:
            self._awaited, self.reasoning = awaited, reasoning
            self._take_back(meaning, cut_off=shape is not None and shape.late and self._at_end())
        else:
            yield from self.skip(meaning.trail if shape is None else "")

    def _at_end(self) -> bool:
        return self.ended and self.at == len(self.text)

    def _take_back(self, meaning: Meaning, *, cut_off: bool) -> None:
        self.calls -= sum(event.kind == "call_open" for event in self._draft or ())
        self._draft = None
        given = self.give_back()
        if not given:
            self.at += len(meaning.core)
            given = meaning.core
        if meaning.shapes[0].silent:
            given = meaning.openings.pattern.sub("", given)
        if self.reasoning and meaning.core in self.compiled.ends_reasoning:
            self._leave_reasoning()
        if not cut_off:
            self.give_text(given)

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
        return any(section.close[0].strip() in group for group in self._awaited)

    def _in_section(self, meaning: Meaning) -> Wait[Calls | None]:
        """After the opening of a section: the first call, or the end of an empty one."""
        following = yield from self.space()
        for shape in meaning.shapes:
            section = shape.section
            if section is None:
                continue
            if (yield from self.match(marks_of(section.close))):
                self.keep()
                return None
            if section.header:
                _, found = yield from self.collect(marks_of(shape.open), HEADER)
            elif shape.open:
                found = yield from self.match(marks_of(shape.open))
            else:
                found = "bare" if fits(shape, following) else ""
            if found:
                self._await(section.close)
                return shape
        return None

    def _close(self, shape: Calls, meaning: Meaning) -> Wait[None]:
        """After a call its closing marker, if it is there. What may still come is no text then."""
        if meaning.action == "call" and shape.section is not None:
            closes = frozenset(spelling.strip() for spelling in shape.section.close)
            if closes not in self._awaited:
                self._await(shape.section.close)
        if shape.close:
            yield from self.space()
            if not (yield from self.match(marks_of(shape.close))):
                self._await(shape.close)
