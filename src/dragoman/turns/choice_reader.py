"""Turns steps into events: detokenizes ids, finds stop strings, parses the model's dialect."""

import codecs
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import product
from typing import TypeAlias

from dragoman.dialects.declarations import Dialect
from dragoman.dialects.marker_tables import CompiledDialect, compile_dialect
from dragoman.dialects.parser import AnswerReader, PlainReader
from dragoman.dialects.scan import assign_tokens
from dragoman.dialects.schema import NO_TOOLS, ToolDeclarations
from dragoman.dialects.state_machine import AnswerStateMachine
from dragoman.engines.protocol import Tokenizer
from dragoman.prompt.encode import replace_surrogates
from dragoman.turns.spec import ParseOptions
from dragoman.types import AnswerTranscript, Event, FinishReason, Step, TokenLogprob

# Ids to text, one at a time: a table of pieces, and a UTF-8 decoder for characters split between ids.


_decoder = codecs.getincrementaldecoder("utf-8")


class TokenTable:
    """Text and bytes of every id, built once per model. An id whose bytes are not whole characters has no
    text.
    """

    def __init__(self, pieces: Sequence[bytes], special: frozenset[int] = frozenset()) -> None:
        self.bytes = pieces
        self.shown = [_whole(piece) for piece in pieces]
        self.hidden = ["" if id_ in special else text for id_, text in enumerate(self.shown)]
        self.special = special
        self.marks: Mapping[int, str] = {}

    def marked(self, marks: Mapping[int, str]) -> "TokenTable":
        """Return a copy in which some special ids become a private character, shown or not."""
        table = TokenTable([], self.special)
        table.bytes, table.marks = self.bytes, marks
        table.shown, table.hidden = self.shown.copy(), self.hidden.copy()
        for id_, mark in marks.items():
            table.shown[id_] = table.hidden[id_] = mark
        return table

    def __len__(self) -> int:
        return len(self.bytes)

    def text(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        reader = Detokenizer(self, skip_special=skip_special)
        return "".join(map(reader.feed, ids)) + reader.flush()


class Detokenizer:
    """Detokenizes ids: `feed` returns the text that an id completes, empty while a character is
    incomplete.
    """

    __slots__ = ("_bytes", "_decoder", "_marks", "_open", "_texts")

    def __init__(self, pieces: TokenTable, *, skip_special: bool) -> None:
        self._texts = pieces.hidden if skip_special else pieces.shown
        self._bytes = pieces.bytes
        self._marks = pieces.marks
        self._decoder = _decoder("replace")
        self._open = False

    def feed(self, id_: int) -> str:
        text = self._texts[id_]
        if not self._open:
            if text is not None:
                return text
            self._open = True
        elif id_ in self._marks:
            return self.flush() + self._marks[id_]
        # An empty text is a skipped special token, which must not end an incomplete character.
        return self._advance(b"" if text == "" else self._bytes[id_])

    def _advance(self, piece: bytes) -> str:
        out = self._decoder.decode(piece)
        self._open = bool(self._decoder.getstate()[0])
        return out

    def flush(self) -> str:
        """Return what is left at the end or at a marker; an incomplete character becomes U+FFFD."""
        self._open = False
        return self._decoder.decode(b"", True)


def _whole(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None


# Stop strings, found however the text is split: one automaton per stop string, fed one character at a time.
# The first complete string wins; of two that complete at the same character, the longer one.


MOST_TABLES = 64
"""Cached failure tables: the stop strings of one request, which all its answers share."""


class StopFinder:
    def __init__(self, stops: Sequence[str], *, keep: bool = False) -> None:
        self.stops = sorted(stops, key=len, reverse=True)
        self.keep = keep
        self._failures = [_failure_table(stop) for stop in self.stops]
        self._states = [0] * len(stops)
        self._first = frozenset(stop[0] for stop in stops)
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Return the text that is safe to emit, and the stop string that matched; the rest may become a stop
        string.
        """
        if not self._held and self._first.isdisjoint(text):
            return text, None
        whole = self._held + text
        for position, char in enumerate(text, len(self._held) + 1):
            for number, stop in enumerate(self.stops):
                if self._advance(number, stop, char):
                    self._held = ""
                    return whole[: position if self.keep else position - len(stop)], stop
        keep_from = len(whole) - max(self._states)
        self._held = whole[keep_from:]
        return whole[:keep_from], None

    def flush(self) -> str:
        """Return the held text at the end: it is plain text after all."""
        held, self._held = self._held, ""
        return held

    def _advance(self, number: int, stop: str, char: str) -> bool:
        state, failure = self._states[number], self._failures[number]
        while state and stop[state] != char:
            state = failure[state - 1]
        if stop[state] == char:
            state += 1
        self._states[number] = state
        return state == len(stop)


@lru_cache(MOST_TABLES)
def _failure_table(stop: str) -> list[int]:
    """Knuth-Morris-Pratt: for each prefix, the length of its longest proper prefix that is also a suffix."""
    table = [0] * len(stop)
    length = 0
    for position in range(1, len(stop)):
        while length and stop[position] != stop[length]:
            length = table[length - 1]
        if stop[position] == stop[length]:
            length += 1
        table[position] = length
    return table


# Calls of custom tools, whose argument is a text: the model writes `{"input": "..."}`, and that string is the
# text.


INPUT = "input"
OPENING = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
# A high surrogate waits for what follows, which may be the low one.
WHOLE = re.compile(
    r"""(?: [^"\\]
          | \\["\\/bfnrt]
          | \\u(?![dD][89abAB])[0-9a-fA-F]{4}
          | \\u[dD][89abAB][0-9a-fA-F]{2} (?: \\u[0-9a-fA-F]{4} | (?=[^\\]|\\[^u]) )
        )*""",
    re.VERBOSE,
)


class InputUnwrapper:
    """Unwraps the string of an input object: chunks of `{"input": "a\\\\nb"}` give `a`, a newline and `b` in
    chunks.
    """

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


class CustomCallReader:
    """An answer reader that unwraps the arguments of calls to custom tools."""

    def __init__(self, reader: AnswerReader, names: Collection[str]) -> None:
        self._reader = reader
        self._names = names
        self._open: dict[int, InputUnwrapper] = {}

    @property
    def waiting(self) -> int:
        return self._reader.waiting

    def feed(self, text: str) -> list[Event]:
        return self._unquote(self._reader.feed(text))

    def finish(self) -> list[Event]:
        return self._unquote(self._reader.finish())

    def _unquote(self, events: Sequence[Event]) -> list[Event]:
        kept = []
        for event in events:
            if event.kind == "call_open" and event.text in self._names:
                self._open[event.call] = InputUnwrapper()
            elif event.kind == "call_arguments" and event.call in self._open:
                event.text = self._open[event.call].feed(event.text)
                if not event.text:
                    continue
            kept.append(event)
        return kept


# A model's dialect: the text of its ids, and how to parse it.


MakeReader: TypeAlias = Callable[[bool, Sequence[int]], AnswerReader]
"""Creates the reader of one answer from whether the prompt has opened reasoning, and the prompt's ids."""
MOST_PROMPT_IDS = 4096
"""The last ids of a prompt that a response_template gets."""


class ModelDialect:
    """The compiled dialect of a model, built once. Marker tokens become the dialect's private characters."""

    def __init__(self, dialect: Dialect, tokenizer: Tokenizer, *, plain: TokenTable | None = None) -> None:
        """With `plain`, it is for engines that return text, in which markers are ordinary characters."""
        self.dialect = dialect
        self._tokenizer = tokenizer
        special = frozenset[str]() if plain else frozenset(tokenizer.special_ids)
        self.plain = plain or TokenTable(tokenizer.pieces, frozenset(tokenizer.special_ids.values()))
        self._tables: dict[tuple[tuple[int, str], ...], TokenTable] = {(): self.plain}
        self._compiled = {
            (calls, reasoning): compile_dialect(dialect, special, calls=calls, reasoning=reasoning)
            for calls, reasoning in product((True, False), repeat=2)
        }
        self._pieces = {
            (calls, reasoning): self._mark(calls, compiled_dialect, tokenizer)
            for (calls, reasoning), compiled_dialect in self._compiled.items()
        }
        if dialect.response_template is not None:
            # A response_template's patterns match text that includes special tokens.
            shown = self.plain.marked({id_: token for token, id_ in tokenizer.special_ids.items()})
            self._pieces = dict.fromkeys(self._pieces, shown)

    @cached_property
    def ends(self) -> list[str]:
        """The texts of the end tokens, for engines that leave them in their output."""
        return [self.plain.text([id_]) for id_ in sorted(self._tokenizer.end_ids)]

    @cached_property
    def as_text(self) -> "ModelDialect":
        """The same for engines that return text."""
        return ModelDialect(self.dialect, self._tokenizer, plain=self.plain)

    def _mark(self, calls: bool, compiled: CompiledDialect, tokenizer: Tokenizer) -> TokenTable:
        marks = {tokenizer.special_ids[token]: mark for token, mark in compiled.sentinels.items()}
        if not calls and self.dialect.channels is None:
            # Without calls, call markers are ordinary special tokens: skipped, or shown on demand.
            met = "".join([*compiled.text.meanings, *compiled.reasoning.meanings])
            marks = {id_: mark for id_, mark in marks.items() if mark in met}
        key = tuple(marks.items())
        if key not in self._tables:
            self._tables[key] = self.plain.marked(marks)
        return self._tables[key]

    def pieces(self, reading: ParseOptions | None) -> TokenTable:
        return self.plain if reading is None else self._pieces[reading.calls, reading.reasoning]

    def readers(self, reading: ParseOptions | None) -> MakeReader:
        make = self._readers(reading)
        if reading is None or not reading.custom:
            return make
        names = reading.custom
        return lambda in_reasoning, prompt: CustomCallReader(make(in_reasoning, prompt), names)

    def _readers(self, reading: ParseOptions | None) -> MakeReader:
        if reading is None or self.dialect.name == "plain":
            return lambda in_reasoning, prompt: PlainReader()
        if self.dialect.response_template is not None:
            return lambda in_reasoning, prompt: self._own_reader(reading, prompt)
        compiled = self._compiled[reading.calls, reading.reasoning]
        tools = ToolDeclarations(reading.tools) if reading.tools else NO_TOOLS
        apart, verbatim = reading.reasoning, reading.verbatim
        return lambda in_reasoning, prompt: AnswerStateMachine(
            compiled, tools, starts_in_reasoning=in_reasoning and apart, verbatim=verbatim
        )

    def _own_reader(self, reading: ParseOptions, prompt: Sequence[int]) -> AnswerReader:
        text = self.plain.text(prompt[-MOST_PROMPT_IDS:])
        reader: AnswerReader = self.dialect.response_template.reader(text, reading.tools)
        return reader


# One continuation: from steps over ids, text and stop strings to events.


class ChoiceReader:
    """Reads the steps of one choice into events. An id belongs to the event that has its text.

    An id without text belongs to the part that its marker opens or closes: the dialect's reader says where
    parts begin, and ids of the part before get an event of their own.
    """

    def __init__(
        self,
        choice: int,
        text: Detokenizer,
        stops: StopFinder | None,
        dialect: AnswerReader,
        *,
        min_tokens: int = 0,
        hidden_ids: frozenset[int] = frozenset(),
        most_calls: int | None = None,
        text_logprobs: bool = False,
        remembers: bool = False,
    ) -> None:
        self.choice = choice
        self.transcript = AnswerTranscript() if remembers else None
        self.count = 0
        self.ids: list[int] = []
        """All sampled ids."""
        self.logprobs: list[float] = []
        self.reasoning_count = 0
        self.over = False
        self.in_text = False
        """Whether the engine returns text."""
        self._ends = frozenset[str]()
        self._text = text
        self._stops = stops
        self._dialect = dialect
        self._min_tokens = min_tokens
        self._hidden_ids = hidden_ids
        self._most_calls = most_calls
        self._text_logprobs = text_logprobs
        """Report log probabilities of text only."""
        self._enough = False
        self._ids: list[int] = []
        self._sizes: list[int] = []
        """The number of characters of each id that waits for an event."""
        self._unread = 0
        """The number of characters held back because they may begin a stop string."""
        self._logprobs: list[TokenLogprob] = []
        self._part = ""
        """The kind of the current part."""

    def read(self, step: Step, events: list[Event]) -> None:
        """Append the events of a step."""
        logprobs = step.logprobs
        # The id that ends an answer is not part of its text, even if special tokens are shown.
        last = len(step.ids) - 1 if step.finish == "stop" else -1
        for position, id_ in enumerate(step.ids):
            self.count += 1
            self._ids.append(id_)
            self.ids.append(id_)
            if logprobs is not None:
                self._logprobs.append(logprobs[position])
                self.logprobs.append(logprobs[position].logprob)
            if position == last and id_ in self._hidden_ids:
                self._sizes.append(0)
                continue
            text = self._text.feed(id_)
            size = len(text)
            if text and self._stops is not None and self.count >= self._min_tokens:
                text, stop = self._stops.feed(text)
                self._unread += size - len(text)
                if stop is not None:
                    self._say(text, size, events)
                    self._finish(events, "stop", stop)
                    return
            self._say(text, size, events)
            if self._enough:
                self._finish(events, "stop", None)
                return
        if step.finish is not None:
            self._finish(events, step.finish, step.stop_id, step.error)

    def switch_to_text(self, dialect: AnswerReader, ends: Collection[str]) -> None:
        """Switch to an engine that returns text, read by `read_text`. The answer also ends at one of the
        `ends`.
        """
        asked = self._stops.stops if self._stops else []
        self.in_text = True
        self._dialect = dialect
        self._ends = frozenset(ends).difference(asked)
        if self._ends:
            self._stops = StopFinder([*asked, *self._ends], keep=bool(self._stops and self._stops.keep))

    def read_text(self, text: str, tokens: int, events: list[Event]) -> None:
        """Read text from the engine; it has no ids."""
        self.count += tokens
        stop = None
        if text and self._stops is not None and self.count >= self._min_tokens:
            text, stop = self._stops.feed(text)
        before = len(events)
        if text:
            self._share(self._dialect.feed(text), events)
        if any(event.kind == "reasoning" for event in events[before:]):
            self.reasoning_count += tokens
        if stop is not None or self._enough:
            self._finish(events, "stop", stop)
            if stop in self._ends:
                # It is the model's own end, not a stop string of the request.
                events[-1].stop = None

    def fail(self, error: Exception, events: list[Event]) -> None:
        """End with an error, and drop the text held back."""
        self.over = True
        events.append(Event("finish", self.choice, "", self._ids, None, "error", None, error))

    def _finish(
        self,
        events: list[Event],
        finish: FinishReason,
        stop: str | int | None,
        error: Exception | None = None,
    ) -> None:
        self.over = True
        if not isinstance(stop, str) and not self._enough:
            self._flush(events)
        self._share(self._dialect.finish(), events)
        logprobs = None if self._text_logprobs else self._logprobs or None
        events.append(Event("finish", self.choice, "", self._ids, logprobs, finish, stop, error))
        self._ids, self._logprobs = [], []

    def _flush(self, events: list[Event]) -> None:
        """Emit the text that was held back: the answer ends without a stop string."""
        text = self._text.flush()
        if self._sizes:
            self._sizes[-1] += len(text)
        if self._stops is not None:
            shown, hit = self._stops.feed(text)
            text, self._unread = shown if hit else shown + self._stops.flush(), 0
        if text:
            self._share(self._dialect.feed(text), events)

    def _say(self, text: str, size: int, events: list[Event]) -> None:
        """Read the text that the newest id completes; the id has brought `size` characters."""
        value = self._dialect.feed(text) if text else ()
        if len(value) != 1 or self._sizes or value[0].part_chars is not None:
            self._sizes.append(size)
            self._share(value, events)
            return
        # The usual case: no other id waits, and the id continues the current part.
        (event,) = value
        event.choice, event.ids = self.choice, self._ids
        self._ids = []
        if self._logprobs:
            event.logprobs, self._logprobs = self._logprobs, []
            if self._text_logprobs and event.kind != "text":
                event.logprobs = None
        if event.kind == "reasoning":
            self.reasoning_count += 1
        if self.transcript is not None:
            self.transcript.add(event)
        events.append(event)

    def _share(self, result: Sequence[Event], events: list[Event]) -> None:
        """Assign the waiting ids to several events: each id goes with the part that it belongs to."""
        if not result or self._enough:
            return
        unseen, *shares = assign_tokens(result, self._sizes, self._dialect.waiting, self._unread)
        if unseen:
            result, shares = [Event("unseen", 0), *result], [unseen, *shares]
        for event, share in zip(result, shares, strict=True):
            if event.kind == "call_open" and event.call == self._most_calls:
                # Calls beyond the limit are dropped; their ids go with the finish event.
                self._enough = True
                return
            event.choice, event.ids = self.choice, self._ids[:share]
            event.logprobs = self._logprobs[:share] or None
            if self._text_logprobs:
                keep_text_logprobs(event, self._sizes[:share])
            del self._ids[:share], self._sizes[:share], self._logprobs[:share]
            self._part = self._part if event.part_chars is None else event.kind
            self.reasoning_count += share if self._part == "reasoning" else 0
            if self.transcript is not None:
                self.transcript.add(event)
            events.append(event)


def keep_text_logprobs(event: Event, sizes: Sequence[int]) -> None:
    """Keep only the log probabilities of an event's text: those of its last tokens, counted by characters."""
    if event.kind != "text" or event.logprobs is None:
        event.logprobs = None
        return
    before, characters = list(sizes), 0
    # Tokens without characters belong to the token after them.
    while before and (characters < len(event.text) or not before[-1]):
        characters += before.pop()
    event.logprobs = event.logprobs[len(before) :] or None
