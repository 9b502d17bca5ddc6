"""Finds patterns in text that comes in pieces, in one pass: no cut and no pattern changes what it costs.

All ways through a program are followed at the same time, in the order in which a backtracking matcher would
try them, so that the match is the one that it would have found. What one character does to such a list of
ways is worked out once and then looked up.
"""

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from dragoman.dialects.pattern_syntax import AHEAD, Instruction, Program

MAX_STEPS = 20_000
"""Remembered for one pattern; a text with very many different characters begins anew."""
WORK_PER_CHARACTER = 8
FRESH = -1
"""The source of a way that begins here."""


class Match(NamedTuple):
    start: int
    end: int
    groups: dict[str, tuple[int, int]]


class _Way(NamedTuple):
    place: int
    source: int
    """Which of the ways before it came from."""
    now: tuple[int, ...]
    """Slots that are saved before the character."""
    then: tuple[int, ...]
    """Slots that are saved after it."""


class _State:
    """A list of ways, and what is known of the steps from it."""

    __slots__ = ("before", "places", "seeding", "steps")

    def __init__(self, places: tuple[int, ...], before: str, seeding: bool) -> None:
        self.places = places
        self.before = before
        """The last character, or one of its kind; "^" is no character but the very begin."""
        self.seeding = seeding
        """A way may begin at each character: there is no match yet."""
        self.steps: dict[str, _Step] = {}


class _Step(NamedTuple):
    """What a character does: the ways after it, and perhaps a match that no earlier way can prevent."""

    after: _State
    ways: tuple[_Way, ...]
    match: _Way | None
    matched_before: bool
    """The match ends before the character."""
    same: bool
    """Every way kept what it had saved, so that nothing is to be copied."""


class Pattern:
    """A program, with what was learned of it so far. Shared by all who look for it."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._states: dict[tuple[tuple[int, ...], str, bool], _State] = {}
        self._known = 0

    def state(self, places: tuple[int, ...], before: str, seeding: bool) -> _State:
        key = (places, before if before == "^" else "a" if _is_word(before) else " ", seeding)
        found = self._states.get(key)
        if found is None:
            found = self._states[key] = _State(*key)
        return found

    def step(self, state: _State, character: str) -> _Step:
        """The step that is not known yet; "" is the end of the text."""
        self._known += 1
        if self._known > MAX_STEPS:
            self._known = 0
            self._states.clear()
        stepping = _Stepping(self.program, state, character)
        places = tuple(way.place for way in stepping.ways)
        after = self.state(places, character, state.seeding and stepping.match is None)
        kept = [way == _Way(way.place, number, (), ()) for number, way in enumerate(stepping.ways)]
        same = all(kept) and len(places) == len(state.places)
        step = _Step(after, tuple(stepping.ways), stepping.match, stepping.matched_before, same)
        state.steps[character] = step
        return step

    def find_all(self, text: str) -> Iterator[Match]:
        """All matches that do not overlap. One that would take much more than one pass ends the search."""
        at, left = 0, WORK_PER_CHARACTER * len(text) + MAX_STEPS
        while at <= len(text) and left > 0:
            search = Search(self, text[at - 1 : at] if at else "")
            begun = at
            for at in range(begun, len(text)):
                search.push(text[at], at)
                if search.match is not None and search.settled:
                    break
            else:
                search.end(len(text))
            left -= at + 1 - begun
            if search.match is None:
                return
            yield search.match
            at = max(search.match.end, search.match.start + 1)

    def first_characters(self) -> str:
        """The characters that a match can begin with, as a pattern; "" if that cannot be told."""
        found: set[str] = set()
        seen: set[int] = set()
        todo = [0]
        while todo:
            place = todo.pop()
            if place in seen:
                continue
            seen.add(place)
            one = self.program.code[place]
            if one.op == "match":
                return ""
            if one.op == "char":
                found.add(one.what)
            elif one.op in ("split", "jump"):
                todo += [one.to, one.other] if one.op == "split" else [one.to]
            elif one.what != "^":
                todo.append(place + 1)
        return "|".join(sorted(found))


class _Stepping:
    """Works out one step: `ways`, and perhaps a `match`."""

    def __init__(self, program: Program, state: _State, character: str) -> None:
        self._code = program.code
        self._before = state.before
        self._character = character
        self._entered: set[int] = set()
        self._left: set[int] = set()
        self.ways: list[_Way] = []
        self.match: _Way | None = None
        self.matched_before = False
        sources = [*enumerate(state.places), *([(FRESH, 0)] if state.seeding else [])]
        for source, place in sources:
            if self._enter(place, source):
                break

    def _enter(self, start: int, source: int) -> bool:
        """Follow a way to where it wants the character. True: it matched, and what comes later is void."""
        todo: list[tuple[int, tuple[int, ...]]] = [(start, ())]
        while todo:
            place, now = todo.pop()
            if place in self._entered:
                continue
            self._entered.add(place)
            one = self._code[place]
            if one.op == "match":
                self.match, self.matched_before = _Way(place, source, now, ()), True
                return True
            if one.op == "char":
                fits = bool(self._character) and _fits(one.what, self._character)
                if fits and self._leave(place + 1, source, now):
                    return True
            elif one.op != "assert" or self._holds(one.what):
                todo += _onward(one, place, now)
        return False

    def _leave(self, start: int, source: int, now: tuple[int, ...]) -> bool:
        """Follow a way from behind the character to where it wants to know the next one."""
        todo: list[tuple[int, tuple[int, ...]]] = [(start, ())]
        while todo:
            place, then = todo.pop()
            if place in self._left:
                continue
            self._left.add(place)
            one = self._code[place]
            if one.op == "match":
                self.match, self.matched_before = _Way(place, source, now, then), False
                return True
            if one.op == "char" or (one.op == "assert" and one.what != "^"):
                self.ways.append(_Way(place, source, now, then))
            elif one.op != "assert":
                todo += _onward(one, place, then)
        return False

    def _holds(self, kind: str) -> bool:
        if kind == "^":
            return self._before == "^"
        if kind == "$":
            return not self._character
        here = _is_word(self._before) != _is_word(self._character)
        return here if kind == "b" else not here


def _onward(one: Instruction, place: int, saved: tuple[int, ...]) -> list[tuple[int, tuple[int, ...]]]:
    """Where a way leads from here, the first choice last."""
    if one.op == "split":
        return [(one.other, saved), (one.to, saved)]
    if one.op == "jump":
        return [(one.to, saved)]
    return [(place + 1, (*saved, int(one.what)) if one.op == "save" else saved)]


class Search:
    """Looks for the first match in what is pushed."""

    def __init__(self, pattern: Pattern, before: str = "") -> None:
        self._pattern = pattern
        self._state = pattern.state((), before or "^", True)
        self._saved: list[tuple[int, ...]] = []
        """For each way where it began, and then its slots."""
        self.match: Match | None = None
        self.busy = False
        """A way is under way, or there is a match. If not, characters that begin none may be skipped."""

    @property
    def settled(self) -> bool:
        """The match is what it will be."""
        return not self._saved and self.match is not None

    def push(self, character: str, at: int) -> None:
        step = self._state.steps.get(character) or self._pattern.step(self._state, character)
        if step.match is not None:
            self.busy = True
            self.match = self._matched(step, step.match, at)
        if not step.same:
            self._saved = [self._kept(way, at) for way in step.ways]
            self.busy = bool(self._saved) or self.match is not None
        self._state = step.after

    def end(self, at: int) -> None:
        """There is no more text: what could still come about does not."""
        self.push("", at)
        self._saved = []
        self.busy = self.match is not None

    def skipped(self, last: str) -> None:
        """Characters were left out that no match begins with; this was the last of them."""
        self._state = self._pattern.state((), last, True)

    def pending(self) -> int | None:
        """Where the earliest match begins that may still come about."""
        return self._saved[0][0] if self._saved else None

    def give_up(self, before: int) -> None:
        """Forget the ways that began before this place."""
        kept = [number for number, saved in enumerate(self._saved) if saved[0] >= before]
        if len(kept) < len(self._saved):
            places = tuple(self._state.places[number] for number in kept)
            self._state = self._pattern.state(places, self._state.before, self._state.seeding)
            self._saved = [self._saved[number] for number in kept]
            self.busy = bool(self._saved) or self.match is not None

    def _kept(self, way: _Way, at: int) -> tuple[int, ...]:
        fresh = way.source == FRESH
        saved = (at, *((-1,) * len(self._pattern.program.slots))) if fresh else self._saved[way.source]
        if not (way.now or way.then):
            return saved
        changed = list(saved)
        for slot in way.now:
            changed[slot + 1] = at
        for slot in way.then:
            changed[slot + 1] = at + 1
        return tuple(changed)

    def _matched(self, step: _Step, way: _Way, at: int) -> Match:
        start, *ends = self._kept(way, at)
        slots = dict(zip(self._pattern.program.slots, ends, strict=True))
        end = slots.pop(AHEAD, -1)
        groups = {
            name[:-1]: (begin, slots[name[:-1] + ">"])
            for name, begin in slots.items()
            if name.endswith("<") and begin >= 0 and slots[name[:-1] + ">"] >= 0
        }
        return Match(start, end if end >= 0 else at if step.matched_before else at + 1, groups)


@lru_cache(4096)
def _fits(what: str, character: str) -> bool:
    return re.fullmatch(what, character, re.DOTALL) is not None


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"
