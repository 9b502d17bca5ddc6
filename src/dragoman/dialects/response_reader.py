"""Parser driven by a `response_template`: text in, events out, independent of how the text is cut."""

import re
from secrets import token_hex
from typing import TYPE_CHECKING

from msgspec import Struct

from dragoman.dialects.response_values import (
    MalformedRegion,
    Value,
    fill_in,
    open_json,
    read_call_list,
    read_value,
)
from dragoman.dialects.schema import ToolDeclarations
from dragoman.dialects.streaming_regex import PatternMatch, PatternSearch
from dragoman.types import Event, ToolCall

if TYPE_CHECKING:
    from dragoman.dialects.response_template import ResponseTemplate, TemplateField

MAX_HELD = 4096
"""Maximum length of a marker, in characters: no more text is held back."""


class _WatchedMarker:
    """A marker to search for."""

    def __init__(self, field: "TemplateField", opens: bool, before: str) -> None:
        pattern = field.open if opens else field.close
        assert pattern is not None
        self.field = field
        self.opens = opens
        self.first = pattern.first_characters()
        self.search = PatternSearch(pattern, before)

    def rank(self, match: PatternMatch) -> tuple[int, int, bool, str]:
        """Sort key, less is better: the earliest match, then the longest."""
        return (match.start, match.start - match.end, not self.opens, self.field.name)


class _FieldTrimmer:
    """Removes the whitespace around a field's text, also when calls come in between."""

    def __init__(self, field: "TemplateField") -> None:
        self._strips = bool(field.args.get("strip", True))
        self._held: list[str] = []
        self._begun = False

    def feed(self, text: str) -> str:
        if not self._strips:
            return text
        if not self._begun:
            text = text.lstrip()
        solid = text.rstrip()
        if not solid:
            self._held.append(text)
            return ""
        self._begun = True
        value = "".join([*self._held, solid])
        self._held = [text[len(solid) :]]
        return value

    def drop(self) -> None:
        """Drop held whitespace: it was in the prompt, or a joiner replaces it."""
        self._held = []

    def begin_again(self) -> None:
        self._held, self._begun = [], False


class _OpenRegion(Struct):
    """The region being read. Outside of all regions its field is the one without an
    opening marker, if any.
    """

    field: "TemplateField | None"
    captures: dict[str, str]
    source: list[str]
    """Text with its markers, if the field does not stream."""
    body: list[str]


class ResponseTemplateReader:
    """Parser of one answer, created by `ResponseTemplate.reader`."""

    def __init__(self, template: "ResponseTemplate", begun: str, tools: ToolDeclarations) -> None:
        self._template = template
        self._tools = tools
        self._held = ""
        """Text not emitted yet, from offset `_base` on; `_scanned` of its characters were searched."""
        self._base = 0
        self._scanned = 0
        self._last = ""
        self._calls = 0
        self._region = _OpenRegion(template.implicit, {}, [], [])
        self._trims = {field.name: _FieldTrimmer(field) for field in template.fields}
        self._times: dict[str, int] = {}
        self._events: list[Event] = []
        self._part = ""
        self._edge = 0
        """Where the region begins, as in `Event.part_chars`."""
        self._silent = len(begun)
        """Number of characters that were in the prompt; they produce no events."""
        self._watch()
        self.feed(begun)
        for trim in self._trims.values():
            trim.drop()

    @property
    def waiting(self) -> int:
        return len(self._held)

    def feed(self, text: str) -> list[Event]:
        self._held += text
        while (pair := self._scan()) is not None:
            self._commit(*pair)
        self._release(self._free())
        return self._take_events()

    def finish(self) -> list[Event]:
        end = self._base + len(self._held)
        while (pair := self._scan(last=True)) is not None and pair[1].start < end:
            self._commit(*pair)
        self._release(self._base + len(self._held))
        self._close("")
        return self._take_events()

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        for event in events:
            if event.part_chars is not None:
                event.part_chars = self._base + len(self._held) - event.part_chars
        return events

    def _watch(self) -> None:
        """Set up the searches: the end of the region or, outside of all regions, every opening marker."""
        field, implicit = self._region.field, self._template.implicit
        watched = [(field, False)] if field is not None and field.close is not None else []
        if field is implicit:
            watched += [(opened, True) for opened in self._template.fields if opened.open is not None]
        self._watches = [_WatchedMarker(target, opens, self._last) for target, opens in watched]
        firsts = [watch.first for watch in self._watches]
        self._busy = False
        # If a marker may begin with any character, none can be skipped.
        self._first = re.compile("|".join(firsts), re.DOTALL) if firsts and all(firsts) else None
        self._scanned = 0

    def _scan(self, last: bool = False) -> tuple[_WatchedMarker, PatternMatch] | None:
        """Return the next certain marker in the held text, if there is one."""
        held, size, searches = self._held, len(self._held), [watch.search for watch in self._watches]
        while self._scanned < size:
            # Nothing is skipped at the very beginning, where an empty match may be.
            if not self._busy and self._base + self._scanned and not self._skip():
                break
            character, offset = held[self._scanned], self._base + self._scanned
            self._scanned += 1
            self._busy = matched = False
            for search in searches:
                search.push(character, offset)
                if search.busy:
                    self._busy = True
                    matched = matched or search.match is not None
            if matched and (pair := self._certain()) is not None:
                return pair
            if offset - MAX_HELD > self._base:
                self._give_up(offset - MAX_HELD)
        if last:
            for watch in self._watches:
                watch.search.end(self._base + size)
            return self._certain()
        return None

    def _skip(self) -> bool:
        """Advance to the next character that a marker may begin with; return False if there is none."""
        if self._first is None and self._watches:
            return True
        match = self._first.search(self._held, self._scanned) if self._first else None
        offset = match.start() if match else len(self._held)
        if offset > self._scanned:
            for watch in self._watches:
                watch.search.skip(self._held[offset - 1])
        self._scanned = offset
        return match is not None

    def _certain(self) -> tuple[_WatchedMarker, PatternMatch] | None:
        settled = [(watch, watch.search.match) for watch in self._watches if watch.search.settled]
        ranked = [(watch.rank(match), watch, match) for watch, match in settled if match is not None]
        if not ranked:
            return None
        _, watch, match = min(ranked, key=lambda one: one[0])
        waiting = [offset for one in self._watches if (offset := one.search.pending()) is not None]
        return None if waiting and min(waiting) <= match.start else (watch, match)

    def _give_up(self, before: int) -> None:
        for watch in self._watches:
            watch.search.give_up(before)
        self._busy = any(watch.search.busy for watch in self._watches)

    def _free(self) -> int:
        """Return the offset up to which the text is certainly in no marker."""
        offsets = [self._base + self._scanned]
        if not self._busy:
            return offsets[0]
        for watch in self._watches:
            pending, match = watch.search.pending(), watch.search.match
            offsets += [] if pending is None else [pending]
            offsets += [] if match is None else [match.start]
        return min(offsets)

    def _commit(self, watch: _WatchedMarker, match: PatternMatch) -> None:
        self._release(match.start)
        marker = self._held[: match.end - match.start]
        base = self._base
        captures = {name: self._held[a - base : b - base] for name, (a, b) in match.groups.items()}
        if watch.opens:
            self._close("")
            self._edge = self._base
            self._region = _OpenRegion(watch.field, captures, [marker], [])
            self._begin(watch.field)
        else:
            self._region.captures |= captures
            self._close(marker)
            self._edge = self._base + len(marker)
        self._take(len(marker))
        self._watch()

    def _take(self, count: int) -> str:
        """Remove and return the next characters of the held text."""
        taken, self._held = self._held[:count], self._held[count:]
        self._base += count
        self._scanned -= count
        self._last = taken[-1:] or self._last
        return taken

    def _release(self, until: int) -> None:
        """Add the held text up to this offset to the region."""
        text, field = self._take(until - self._base), self._region.field
        if not text or field is None:
            return
        if field.streams:
            self._say(field, text)
        else:
            self._region.source.append(text)
            self._region.body.append(text)

    def _begin(self, field: "TemplateField") -> None:
        """Begin a region of a field. Texts that are joined are trimmed separately."""
        times = self._times[field.name] = self._times.get(field.name, 0) + 1
        if field.join is not None and field.streams and times > 1:
            self._trims[field.name].begin_again()
            self._tell(field, field.join)

    def _say(self, field: "TemplateField", text: str) -> None:
        quiet = max(self._silent - (self._base - len(text)), 0)
        trim = self._trims[field.name]
        if quiet:
            trim.feed(text[:quiet])
            trim.drop()
        self._tell(field, trim.feed(text[quiet:]))

    def _tell(self, field: "TemplateField", text: str) -> None:
        if text and self._base > self._silent:
            self._append(Event("reasoning" if field.kind == "reasoning" else "text", 0, text))

    def _append(self, event: Event) -> None:
        if event.kind != self._part:
            self._part, event.part_chars = event.kind, self._edge
        self._events.append(event)

    def _close(self, marker: str) -> None:
        """End the region and emit what was held."""
        region = self._region
        self._region = _OpenRegion(self._template.implicit, {}, [], [])
        if region.field is None or region.field.streams or not region.source:
            return
        try:
            self._deliver(region.field, region)
        except MalformedRegion:
            text = "".join([*region.source, marker])
            if self._base > self._silent:
                self._append(Event("text", 0, text))

    def _deliver(self, field: "TemplateField", region: _OpenRegion) -> None:
        body = "".join(region.body)
        value = _value(field, body, region.captures)
        if field.kind == "calls":
            for call in read_call_list(value, self._tools):
                self._call(call)
            # The tokens of several calls in one region cannot be told apart: all belong to the first.
            self._part = ""
        else:
            decoded = open_json(value)
            self._tell(field, decoded if isinstance(decoded, str) else body.strip())

    def _call(self, call: ToolCall) -> None:
        if self._base <= self._silent:
            return
        number, self._calls = self._calls, self._calls + 1
        id_ = call.id or f"call_{token_hex(12)}"
        self._append(Event("call_open", 0, call.name, call=number, call_id=id_))
        self._events += [
            Event("call_arguments", 0, call.arguments, call=number),
            Event("call_close", 0, call=number),
        ]


def _value(field: "TemplateField", body: str, captures: dict[str, str]) -> Value:
    value = read_value(body, field.content, field.args, field.tags)
    if field.transform is None:
        return value
    if not field.transform_each:
        return fill_in(field.transform, {**captures, "content": value})
    items = open_json(value)
    if not isinstance(items, list):
        raise MalformedRegion
    scopes = [open_json(item) for item in items]
    if not all(isinstance(scope, dict) for scope in scopes):
        raise MalformedRegion
    return [fill_in(field.transform, {**captures, **scope}) for scope in scopes]
