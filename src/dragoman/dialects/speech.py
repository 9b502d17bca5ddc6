"""What a machine says: events, some of which are a draft until a call has proved to be one."""

import re
from itertools import count
from secrets import token_hex

from msgspec import Struct

from dragoman.dialects.compiled import Compiled
from dragoman.dialects.declare import Calls
from dragoman.dialects.scan import Quick, Scanner, Sink
from dragoman.dialects.schema import Tools, escaped
from dragoman.folding import coalesce
from dragoman.types import Event, Kind


class State(Struct, frozen=True):
    """What must be as it was when a trial fails."""

    reasoning: bool
    said: bool
    blank: str | None
    calls: int
    awaited: frozenset[frozenset[str]]


class Speaker(Scanner):
    """Reads, and says what it has read. The sinks of the readers are its methods."""

    def __init__(self, compiled: Compiled, tools: Tools) -> None:
        super().__init__()
        self.compiled = compiled
        self.dialect = compiled.dialect
        self.tools = tools
        self.calls = 0
        self.reasoning = False
        self.awaited: frozenset[frozenset[str]] = frozenset()
        """Closing markers that have yet to come, each with its other spellings; they will be no text."""
        self._said = False
        self._blank: list[str] | None = []
        """Whitespace that may turn out to be layout around calls; None after text."""
        self._events: list[Event] = []
        self._draft: list[Event] | None = None
        self._ids: set[str] = set()
        self._before = self.state()
        """How things were when the present trial began."""

    def taken(self) -> list[Event]:
        """What was said since the last time."""
        if not self._events:
            return []
        events, self._events = self._events, []
        if self.compiled.sentinels:
            for event in events:
                event.text = event.text.translate(self.compiled.unseen)
            events = [event for event in events if event.text or event.kind in ("call_open", "call_close")]
        return coalesce(events) if len(events) > 1 else events

    def last_words(self) -> None:
        """An answer that is nothing but whitespace is that."""
        if self._blank and not self._said:
            self._emit("text", "".join(self._blank))

    # Sinks

    def _emit(self, kind: Kind, text: str) -> None:
        if text:
            self._said = True
            into = self._events if self._draft is None else self._draft
            into.append(Event(kind, 0, text, call=self.calls - 1))

    def say(self, text: str) -> None:
        if self._blank is not None:
            if not text.strip():
                self._blank.append(text)
                return
            text = "".join(self._blank) + text
            self._blank = None
        self._emit("text", text)

    def think(self, text: str) -> None:
        self._emit("reasoning", text)

    def arguments(self, text: str) -> None:
        self._emit("call_arguments", text)

    def string_arguments(self, text: str) -> None:
        """A piece of a string, which has yet to be escaped."""
        self._emit("call_arguments", escaped(text))

    @property
    def in_text(self) -> bool:
        """Whether the last thing said was text, and not just whitespace."""
        return not self.reasoning and self._blank is None

    @property
    def sink(self) -> Sink:
        """Where text goes that is no part of a call."""
        return self.think if self.reasoning else self.say

    def quickly(self, sink: Sink, other: re.Pattern[str]) -> Quick | None:
        if sink == self.say:
            return ("text", other, False) if self._blank is None else None
        if sink == self.think:
            return "reasoning", other, False
        if sink in (self.arguments, self.string_arguments):
            return "call_arguments", other, sink == self.string_arguments
        return None

    def drafted(self, event: Event, text: str) -> list[Event]:
        """The event of a text that need not be read: said at once, unless it belongs to a draft."""
        self._said = True
        if self._draft is None:
            return [event]
        self.append(text)
        self.at = len(self.text)
        self._draft.append(event)
        return []

    def escaping(self, sink: Sink) -> Sink:
        return self.string_arguments if sink == self.arguments else super().escaping(sink)

    # Turning points

    def new_paragraph(self, *, reasoning: bool = False) -> None:
        """What was said is over: whitespace from here on may be layout."""
        self.reasoning, self._said, self._blank = reasoning, True, []

    def forget_layout(self) -> None:
        self._blank = None if self._blank is None else []

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
        self.new_paragraph()

    def close_call(self) -> None:
        """The call is complete."""
        if self._draft is not None:
            self._events += self._draft
            self._draft = None
            self.keep()
        self._events.append(Event("call_close", 0, call=self.calls - 1))

    def _id(self, name: str, id_: str | None, shape: Calls) -> str:
        """The id the model wrote, unless it has written it before; else one in the way of its family."""
        numbers = count(self.calls)
        while not id_ or id_ in self._ids:
            if shape.ids == "kimi":
                id_ = f"functions.{name}:{next(numbers)}"
            else:
                id_ = token_hex(5)[:9] if shape.ids == "mistral" else "call_" + token_hex(12)
        self._ids.add(id_)
        return id_

    # Trials

    def state(self) -> State:
        blank = None if self._blank is None else "".join(self._blank)
        return State(self.reasoning, self._said, blank, self.calls, self.awaited)

    def hold(self, back: int = 0) -> None:
        super().hold(back)
        self._before = self.state()

    def retract(self) -> str:
        """The trial has failed: all is as it was, but for the text that was read, which is given back."""
        state = self._before
        self.reasoning, self._said = state.reasoning, state.said
        self._blank = None if state.blank is None else [state.blank]
        self.calls, self.awaited, self._draft = state.calls, state.awaited, None
        return self.give_back()
