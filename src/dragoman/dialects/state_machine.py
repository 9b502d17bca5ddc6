"""State machine that parses an answer: in text or in reasoning, marker by marker.

A call is read on trial. Until its name is certain, or until its end if the dialect requires that, the text
read so far may still turn out to be text and is then rolled back. Nothing is read twice except the beginning
of an answer that might have been a call without a marker.

An answer is a sequence of parts: reasoning, text, calls, each with the markers around it. A reader of tokens
needs the part of every token, including tokens without text, so the first event of a part says where it
begins (`Event.part_chars`). That offset is `_edge`: the marker that opens the part or, if there is none, the
end of what closed the part before. Layout between two parts belongs to the earlier one.
"""

import re
from collections.abc import Generator

from msgspec import Struct

from dragoman.dialects.channels import read_channels
from dragoman.dialects.declarations import Calls, Spellings
from dragoman.dialects.marker_tables import SENTINEL, CompiledDialect, MarkerRule, marks_of
from dragoman.dialects.readers import find_shape, read_calls, read_lone_calls, read_mention, take_back
from dragoman.dialects.scan import MarkerSet, MentionTracker, Quick, Scanner, TextSink, UnrequestedCall, Wait
from dragoman.dialects.schema import ToolDeclarations, escape_json
from dragoman.types import Event, EventKind, coalesce

SPAN = re.compile(r"[\s\d:,\[\]]*")
LONE_STARTS = frozenset("{` \n\t\r")
"""Characters that may begin a call that is the whole answer."""


class TrialState(Struct, frozen=True):
    """State to restore when a trial fails."""

    reasoning: bool
    said: bool
    blank: str | None
    calls: int
    expected_closers: frozenset[frozenset[str]]
    header: str
    part: tuple[EventKind | None, int, bool]


class EventEmitter(Scanner):
    """Emits events, some of which stay a draft until a call is certain.

    Its methods are the sinks of the readers.
    """

    def __init__(self, compiled: CompiledDialect, tools: ToolDeclarations) -> None:
        super().__init__()
        self.compiled = compiled
        self.dialect = compiled.dialect
        self.tools = tools
        self.calls = 0
        self.reasoning = False
        self.expected_closers: frozenset[frozenset[str]] = frozenset()
        """Closing markers still to come, each with its other spellings; they will not be text."""
        self._said = False
        self._blank: list[str] | None = []
        """Whitespace that may turn out to be layout around calls; None after text."""
        self._events: list[Event] = []
        self.draft: list[Event] | None = None
        self._ids: set[str] = set()
        self._part: EventKind | None = None
        """Kind of the part that is being emitted; a call counts as its arguments."""
        self._edge = 0
        """Offset (`offset`) at which the next part would begin."""
        self._opened = False
        """Whether a marker has opened the next part and nothing of it was emitted yet."""
        self._margin: MentionTracker | None = None
        """Recent reasoning, in dialects where a call may end it."""
        self.lone = compiled.lone if tools.lenient else None
        """Syntax of calls that are the whole answer; None if that is no longer possible."""
        self._left: list[str] = []
        """Text inside a call that is not part of it: see `set_aside`."""
        self.heads_text = False
        """Whether `header` belongs before the next text, because no call has used it."""
        self.header = ""
        """A word before a call: its name, or else text."""
        self.half = ""
        """Truncated marker at the end of the answer."""
        self._suspended: list[str] | None = None
        """Reasoning since a call marker that led to no call: see `defer_after_marker`."""
        self._suspended_at = (0, 0)
        """Offset at which the part with the suspended text begins if it is reasoning, and if it is text."""
        self._before = self.state()
        """State when the current trial began."""

    def take_events(self) -> list[Event]:
        """Return the events since the last call of this method."""
        if not self._events:
            return []
        events, self._events = self._events, []
        end = self.dropped + len(self.text)
        for event in events:
            if event.part_chars is not None:
                event.part_chars = end - event.part_chars
        if self.compiled.sentinels:
            for event in events:
                event.text = event.text.translate(self.compiled.unseen)
            events = [event for event in events if event.text or event.kind in ("call_open", "call_close")]
        return coalesce(events) if len(events) > 1 else events

    def last_words(self) -> None:
        """Finish the answer: suspended reasoning that never closed becomes text, and so does an answer that
        is only whitespace.
        """
        if self._suspended is not None:
            text, self._suspended = "".join(self._suspended), None
            self.new_paragraph()
            self._edge = self._suspended_at[1]
            self.emit_text(text)
        if self._blank and not self._said:
            self._emit("text", "".join(self._blank))

    # Sinks

    def _emit(self, kind: EventKind, text: str) -> None:
        if text:
            self._said = True
            self._append(Event(kind, 0, text, call=self.calls - 1), kind)

    def _append(self, event: Event, part: EventKind) -> None:
        if event.kind == "call_open" or (part != self._part and event.text.translate(self.compiled.unseen)):
            self._part, event.part_chars = part, self._edge
        self._opened = self._opened and part != self._part
        (self._events if self.draft is None else self.draft).append(event)

    def emit_text(self, text: str) -> None:
        if self.heads_text and self.header and text.strip():
            self.header, text = "", f"{self.header}\n{text}"
        if self._blank is not None:
            if not text.strip():
                self._blank.append(text)
                return
            text = "".join(self._blank) + text
            self._blank = self.lone = None
        self._emit("text", text)

    def emit_reasoning(self, text: str) -> None:
        if self._margin is not None:
            self._margin.note(text)
        if self._suspended is not None:
            self._suspended.append(text)
        else:
            self._emit("reasoning", text)

    def defer_after_marker(self, text: str) -> None:
        """A call marker in reasoning led to no call. If reasoning is closed later, the text was part of it;
        otherwise reasoning ended here. Emit nothing until then.
        """
        if self.reasoning and self._margin is not None and text and self._suspended is None:
            self._suspended, self._suspended_at = [], (self._edge, self.offset - len(text))
            self._opened = False

    def resume(self) -> None:
        """Emit the suspended text as reasoning."""
        if self._suspended is not None:
            thought, self._suspended = "".join(self._suspended), None
            edge, opened = self._edge, self._opened
            self._edge = self._suspended_at[0]
            self._emit("reasoning", thought)
            self._edge, self._opened = edge, opened

    def arguments(self, text: str) -> None:
        self._emit("call_arguments", text)

    def string_arguments(self, text: str) -> None:
        """Escape a chunk of a string and emit it as arguments."""
        self._emit("call_arguments", escape_json(text))

    def set_aside(self, text: str) -> None:
        """Set aside text inside a call that is neither frame nor argument; it becomes text after the call."""
        if text:
            self._left.append(text)

    def say_left(self) -> None:
        if self._left and not self.mentioning:
            left, self._left = "".join(self._left), []
            self.sink(left)

    @property
    def in_text(self) -> bool:
        """Whether the last emitted event was text other than whitespace."""
        return not self.reasoning and self._blank is None

    @property
    def sink(self) -> TextSink:
        """Sink for text outside of calls."""
        return self.emit_reasoning if self.reasoning else self.emit_text

    def quickly(self, sink: TextSink, other: re.Pattern[str]) -> Quick | None:
        if sink == self.emit_text:
            return ("text", other, None) if self._blank is None and self._part == "text" else None
        if sink == self.emit_reasoning:
            quick = self._part == "reasoning" and self._suspended is None
            return ("reasoning", other, self._margin.note if self._margin else None) if quick else None
        if sink in (self.arguments, self.string_arguments):
            return "call_arguments", other, escape_json if sink == self.string_arguments else None
        return None

    def say_or_draft(self, event: Event, text: str) -> list[Event]:
        """Return the event of text that needs no parsing; if a draft is open, add it there and return
        nothing.
        """
        self._said = True
        if self.draft is None:
            return [event]
        self.append(text)
        self.at = len(self.text)
        self.draft.append(event)
        return []

    def escaping(self, sink: TextSink) -> TextSink:
        return self.string_arguments if sink == self.arguments else super().escaping(sink)

    # Turning points

    def open_part(self, marker: str = "") -> None:
        """Mark the beginning of a part at the marker just read, or here; further markers
        are inside the part.
        """
        if not self._opened:
            self._edge, self._opened = self.offset - len(marker), True

    def close_part(self) -> None:
        """End the current part here, except for whitespace that may still be text."""
        self._edge, self._opened = self._edge if self._blank else self.offset, False

    def new_paragraph(self, *, reasoning: bool = False) -> None:
        """End the current paragraph: whitespace from here on may be layout."""
        self.reasoning, self._said, self._blank = reasoning, True, []

    def forget_layout(self) -> None:
        self._blank = None if self._blank is None else []

    def begin_call(self, shape: Calls) -> None:
        """Begin a call; what is read from here is on trial."""
        if not self.holding:
            self.begin_trial()
        self.open_part()
        if shape.whole and self.draft is None:
            self.draft = []

    def open_call(self, name: str, id_: str | None, shape: Calls) -> None:
        """Open a call whose name is certain. Its text is emitted as it comes, unless the syntax needs the
        whole call.
        """
        if not self.mentioning and (not shape.whole or name in self.tools):
            self._confirm_call()
            self._events += self.draft or ()
            self.draft = None
            self.commit_trial()
        if self.header not in (name, f"{name}.{name}"):
            self.set_aside(self.header)
        self.header = ""
        text = shape.make_id(name, id_, self.calls, self._ids)
        opening = Event("call_open", 0, name, call=self.calls, call_id=text)
        self._append(opening, "call_arguments")
        self.calls += 1
        self.new_paragraph()

    def close_call(self) -> None:
        """End a call that is complete."""
        closing = Event("call_close", 0, call=self.calls - 1)
        if self.draft is not None:
            self.draft.append(closing)
            self.take_draft()
        else:
            self._events.append(closing)
        self.close_part()
        self.say_left()

    def take_draft(self) -> None:
        """Emit the held-back events: they are calls."""
        if self.draft is not None and not self.mentioning:
            draft, self.draft = self.draft, None
            self._confirm_call()
            self._events += draft
            self.commit_trial()

    def _confirm_call(self) -> None:
        """Confirm that this is a call, so suspended text before it was reasoning."""
        if not self.compiled.calls:
            raise UnrequestedCall
        self.resume()

    # Trials

    def state(self) -> TrialState:
        blank = None if self._blank is None else "".join(self._blank)
        part = (self._part, self._edge, self._opened)
        return TrialState(
            self.reasoning, self._said, blank, self.calls, self.expected_closers, self.header, part
        )

    def begin_trial(self, back: int = 0) -> None:
        if not self.mentioning:
            super().begin_trial(back)
            self._before = self.state()

    def roll_back(self) -> str:
        """Roll back a failed trial: restore the state, and return the text that was read."""
        if self.mentioning:
            return ""
        state = self._before
        self.reasoning, self._said = state.reasoning, state.said
        self._blank = None if state.blank is None else [state.blank]
        self.calls, self.expected_closers, self.draft, self._left = (
            state.calls,
            state.expected_closers,
            None,
            [],
        )
        self.header, (self._part, self._edge, self._opened) = state.header, state.part
        return self.abort_trial().removesuffix(self.half)


class AnswerStateMachine(EventEmitter):
    """Parser of one answer: `feed` takes text and returns events.

    With `verbatim`, everything after the beginning of the text is text: a marker in it is a quotation.
    """

    def __init__(
        self,
        compiled: CompiledDialect,
        tools: ToolDeclarations,
        *,
        starts_in_reasoning: bool = False,
        verbatim: bool = False,
    ) -> None:
        super().__init__(compiled, tools)
        self.verbatim = verbatim
        self.lone = None if verbatim else self.lone
        thinking = self.dialect.reasoning
        if thinking is not None and thinking.ended_by_call:
            self._margin = MentionTracker()
        if starts_in_reasoning and thinking is not None:
            self.reasoning = True
            self.emit_reasoning(thinking.preface)
        if self.dialect.prepends:
            self.emit_text(self.dialect.prepends)
        self._between_calls = False
        self._run: Generator[None, None, None] = self._main()
        next(self._run, None)

    def feed(self, text: str) -> list[Event]:
        if self.compiled.replaced:
            text = text.translate(self.compiled.replaced)
        # Fast path for most tokens: only more of the same can come, and the text has no character of a
        # marker.
        if self.quick is not None and not self._events:
            kind, other, change = self.quick
            if other.search(text) is None:
                output = text if change is None else change(text) or text
                return self.say_or_draft(Event(kind, 0, output, call=self.calls - 1), text)
        self.append(text)
        next(self._run, None)
        return self.take_events()

    def finish(self) -> list[Event]:
        self.ended = True
        rest = self.text[self.at :]
        if rest in self.compiled.halves:
            self.half, self.at = rest, len(self.text)
        if self._between_calls and self.is_half_of(
            close for group in self.expected_closers for close in group
        ):
            self.at = len(self.text)
        next(self._run, None)
        self.last_words()
        return self.take_events()

    def _main(self) -> Generator[None, None, None]:
        if self.dialect.channels is not None:
            yield from read_channels(self, self.dialect.channels)
            return
        while True:
            yield from self._read_lone_calls()
            table = self.compiled.reasoning if self.reasoning else self.compiled.text
            self._between_calls = True
            mark = yield from self.until(table.marks, self.sink)
            self._between_calls = False
            if not mark:
                return
            if self.verbatim and self._is_quoted(mark):
                self.sink(mark)
            else:
                yield from self.apply_marker(mark, table.meanings[mark])

    def _read_lone_calls(self) -> Wait[None]:
        lone = None if self.reasoning or self.calls else self.lone
        if lone is not None and (yield from self.peek()) in LONE_STARTS:
            yield from read_lone_calls(self, lone)

    def _is_quoted(self, mark: str) -> bool:
        """Whether a marker is inside text. A special token never is, nor is the marker that ends the text."""
        special = not self.compiled.unseen.keys().isdisjoint(map(ord, mark))
        return self.in_text and not special and mark.strip() != self.dialect.text_close.strip()

    def apply_marker(self, mark: str, meaning: MarkerRule) -> Wait[None]:
        """Apply the action of a marker."""
        match meaning.action:
            case "section" | "call":
                if self.reasoning and (mention := self._find_mention(mark, meaning)):
                    yield from read_mention(self, mark, meaning, mention)
                else:
                    yield from self._try(mark, meaning)
                return
            case "open":
                self.open_part(meaning.core)
                self.new_paragraph(reasoning=True)
                self._margin = self._margin and MentionTracker()
            case "close":
                self.resume()
                self.new_paragraph()
                self.close_part()
            case "back":
                self.at -= len(meaning.core)
                self.resume()
                self.new_paragraph()
                self.close_part()
            case "drop" if self.dialect.text_open.startswith(meaning.core) and not self._blank:
                self.open_part(meaning.core)
            case "span":
                yield from self._drop_span(mark, meaning)
            case "end" if self._take_awaited(meaning.core):
                self.forget_layout()
            case "end":
                self.sink(mark)
                return
        yield from self.skip(meaning.trail)
        if not self._opened:
            self.close_part()

    def _find_mention(self, mark: str, meaning: MarkerRule) -> str:
        """Return how reasoning only mentions a call here, or "". A special token always means a call."""
        if self._margin is None or SENTINEL.search(mark):
            return ""
        return self._margin.find_mention(mark.removesuffix(meaning.core))

    def _drop_span(self, mark: str, meaning: MarkerRule) -> Wait[None]:
        self.begin_trial(len(mark))
        _, end = yield from self.collect(MarkerSet((meaning.until,)), SPAN)
        text = self.abort_trial()
        self.sink("" if end else text)

    # Closing markers

    def await_close(self, closes: Spellings) -> None:
        if closes:
            self.expected_closers |= {frozenset(spelling.strip() for spelling in closes)}

    def is_awaited(self, closes: Spellings) -> bool:
        return any(close.strip() in group for group in self.expected_closers for close in closes)

    def _take_awaited(self, close: str) -> bool:
        """Whether a closing marker closes something that was opened."""
        groups = {group for group in self.expected_closers if close in group}
        self.expected_closers -= groups
        return bool(groups)

    # Trials

    def _try(self, mark: str, meaning: MarkerRule) -> Wait[None]:
        """Try to read a call. If there is none, the marker and the text after it are text."""
        self.begin_trial(len(mark))
        self.open_part(meaning.core)
        if meaning.bare:
            self.at -= len(meaning.core)
        shape = yield from find_shape(self, meaning)
        try:
            if shape is not None:
                complete = yield from read_calls(self, shape)
                if complete or not self.holding:
                    yield from self.close_calls(shape, meaning)
        except UnrequestedCall:
            self.leave_call(self.roll_back())
            return
        if self.holding:
            take_back(self, meaning, shape)
        else:
            if shape is None:
                yield from self.skip(meaning.trail)
            self.close_part()
            self.say_left()

    def leave_call(self, text: str) -> None:
        """Emit a call as text, because the client requested no calls; it still ends reasoning."""
        self.resume()
        self.new_paragraph()
        self._edge = self.offset - len(text)
        self.emit_text(text)

    def close_calls(self, shape: Calls, meaning: MarkerRule) -> Wait[None]:
        """Read the closing marker after a call if it is there. Expected closing markers that come later are
        not text.
        """
        if shape.section is not None and meaning.action == "call":
            self.await_close(shape.section.close)
        if shape.close:
            yield from self.space()
            closes = marks_of(shape.close)
            if not (yield from self.match(closes)):
                self.await_close(shape.close)
                self.at = len(self.text) if self.ended and self.is_half_of(closes.all) else self.at
