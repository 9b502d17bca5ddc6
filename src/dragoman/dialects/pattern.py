"""Regular expressions of a model's files, found in text that comes in pieces.

Why not `re`. A pattern of a `response_template` is somebody's file, and the text is a model's answer: for
`re`, both can be made so that a match takes years, and `\\s*</tag>` takes seconds where a model falls into
writing spaces. Nor can `re` say whether a match that it found would still be one, or another one, if more
text came, and an answer must be read alike however it is cut.

How it works (after Thompson and Pike). A pattern is read into nodes: one that takes a character, a split
into a first and a second choice, one that saves a place, one that wants a border (`^`, `$`, `\\b`, `\\B`),
and the match. All ways through the nodes are followed at the same time, a character at a time, in the order
in which a backtracking matcher would try them. A way that comes to a node where an earlier one is already
ends there, so there are never more ways than nodes, and the time is proportional to the text. A way that
matches ends all that are later than itself; the earlier ones go on, and if one of those matches, its match is
the better one. So the match is the one that `re` would have found, and it is `settled` when no earlier way
is left.

    pattern  <a+>     text  x < a a > y
                            0 1 2 3 4 5     a way begins at 1, loops at 2 and 3, matches at 4: settled

What one character does to a list of ways is worked out once (`_work_out`) and then looked up.
Only what a regular language has is read: no back references, no looks behind, and ahead only at the end.

`constrain/grammar/expressions.py` reads expressions as well, into trees that say what matches from end to
end. Here it matters what is tried first, and which part a group has matched; no such tree says that.
"""

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Literal, NamedTuple, NoReturn, TypeAlias

from dragoman.errors import SettingsError

MAX_PATTERN = 1000
MAX_NODES = 4000
MAX_REPEAT = 200
MAX_STEPS = 20_000
"""Remembered for one pattern; a text with very many different characters begins anew."""
WORK_PER_CHARACTER = 8
FRESH = -1
"""The source of a way that begins here."""
AHEAD = 1
"""The slot for where a look ahead begins, and the match ends. Slot 0 is where it begins; then come groups."""

_CLASS = re.compile(r"\[\^?\]?(?:\\.|\[:|[^\]\\])*\]", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[dDwWsSnrtfv0]|[^\w\s]|\s)")
_COUNT = re.compile(r"\{(\d*)(,?)(\d*)\}")
_GROUP = re.compile(r"\((?:\?(?::|P?<([A-Za-z_]\w*)>))?(?!\?)")
_BORDERS = {"^": "^", "$": "$", r"\A": "^", r"\Z": "$", r"\z": "$", r"\b": "b", r"\B": "B"}
_TIMES: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


_Op: TypeAlias = Literal["char", "split", "save", "border", "match"]


class _Node:
    """One thing to do on the way to a match."""

    __slots__ = ("op", "other", "slot", "then", "what")

    def __init__(self, op: _Op, then: "_Node | None" = None, what: str = "", slot: int = 0) -> None:
        self.op = op
        self.then = self.other = then or self
        """Of a split: what is tried first, and what is tried second."""
        self.what = what
        """Of a char: a pattern of one character. Of a border: which."""
        self.slot = slot


_Piece: TypeAlias = Callable[[_Node], _Node]
"""A part of a pattern: given the node that follows, it makes its own, and gives the first of them."""


class Match(NamedTuple):
    start: int
    end: int
    groups: dict[str, tuple[int, int]]


# Reading a pattern


def compile_pattern(pattern: str, where: str) -> "Pattern":
    """`compile_pattern("<think>\\\\s*", "fields.thinking.open_pattern")`; an error says `where`."""
    if len(pattern) > MAX_PATTERN:
        raise SettingsError(f"{where} has {len(pattern)} characters; {MAX_PATTERN} are the most.")
    return _NodeBuilder(pattern, where).read()


def compile_literals(literals: tuple[str, ...], where: str) -> "Pattern":
    """Any of these texts; the longest, where several fit."""
    ordered = sorted(dict.fromkeys(literals), key=len, reverse=True)
    return _NodeBuilder("|".join(map(re.escape, ordered)), where).read()


class _NodeBuilder:
    def __init__(self, pattern: str, where: str) -> None:
        self._rest = pattern.removeprefix("(?s)")
        self._where = where
        self._nodes = 0
        self._groups: list[str] = []

    def read(self) -> "Pattern":
        try:
            piece = self._alternatives()
            if self._rest:
                self._refuse("has a ) too many")
            return Pattern(piece(_Node("match")), tuple(self._groups))
        except RecursionError:
            self._refuse("is nested too deeply")

    def _refuse(self, why: str) -> NoReturn:
        raise SettingsError(f"{self._where}: the pattern {why}, at {self._rest[:20]!r}.")

    def _node(self, op: _Op, then: _Node, what: str = "", slot: int = 0) -> _Node:
        self._spend()
        return _Node(op, then, what, slot)

    def _split(self, first: _Node, second: _Node, lazy: bool = False) -> _Node:
        node = self._node("split", second if lazy else first)
        node.other = first if lazy else second
        return node

    def _spend(self) -> None:
        self._nodes += 1
        if self._nodes > MAX_NODES:
            self._refuse("is too large with its repeats written out")

    def _take(self, text: str) -> bool:
        if not self._rest.startswith(text):
            return False
        self._rest = self._rest[len(text) :]
        return True

    def _alternatives(self) -> _Piece:
        branches = [self._sequence()]
        while self._take("|"):
            branches.append(self._sequence())

        def build(then: _Node) -> _Node:
            *firsts, node = (branch(then) for branch in branches)
            for first in reversed(firsts):
                node = self._split(first, node)
            return node

        return build

    def _sequence(self) -> _Piece:
        pieces: list[_Piece] = []
        while self._rest and self._rest[0] not in "|)":
            pieces.append(self._repeat(self._atom()))

        def build(then: _Node) -> _Node:
            for piece in reversed(pieces):
                then = piece(then)
            return then

        return build

    def _atom(self) -> _Piece:
        if self._rest[0] == "(":
            return self._group()
        for text in (self._rest[:1], self._rest[:2]):
            if text in _BORDERS:
                self._take(text)
                return lambda then: self._node("border", then, _BORDERS[text])
        what = self._character()
        return lambda then: self._node("char", then, what)

    def _character(self) -> str:
        """The pattern of one character, which `re` itself may read: it cannot go back and forth in it."""
        first = self._rest[0]
        if first in "*+?":
            self._refuse("repeats nothing")
        form = {"[": _CLASS, "\\": _ESCAPE}.get(first)
        found = form.match(self._rest) if form else None
        if form and not found:
            self._refuse("has something that is not supported")
        text = found[0] if found else first
        self._take(text)
        if not found and text != ".":
            return re.escape(text)
        try:
            re.compile(text)
        except re.error:
            self._refuse("has a class that cannot be read")
        return text

    def _group(self) -> _Piece:
        ahead = self._take("(?=")
        found = None if ahead else _GROUP.match(self._rest)
        if not ahead and not found:
            self._refuse("has a kind of group that is not supported")
        self._take(found[0] if found else "")
        name = found[1] if found else None
        if name in self._groups:
            self._refuse(f"names two groups {name}")
        slot = AHEAD + 1 + 2 * len(self._groups)
        self._groups += [name] if name else []
        piece = self._alternatives()
        if not self._take(")"):
            self._refuse("has a ( that is not closed")
        if ahead:
            # Only at the very end, where it says how far the match goes and what must follow.
            if self._rest.strip(")"):
                self._refuse("looks ahead elsewhere than at its end")
            return lambda then: self._node("save", piece(then), slot=AHEAD)
        if not name:
            return piece
        return lambda then: self._node("save", piece(self._node("save", then, slot=slot + 1)), slot=slot)

    def _repeat(self, piece: _Piece) -> _Piece:
        least, most = self._count()
        if (least, most) == (1, 1):
            return piece
        lazy = self._take("?")
        if self._rest[:1] in ("+", "*"):
            self._refuse("has a repeat that is not supported")

        def build(then: _Node) -> _Node:
            node = then
            if most is None:
                node = self._split(then, then)
                inside = piece(node)
                node.then, node.other = (then, inside) if lazy else (inside, then)
            for _ in range((most or least) - least):
                node = self._split(piece(node), then, lazy)
            for _ in range(least):
                # Nothing at all may be repeated too, and that many times.
                self._spend()
                node = piece(node)
            return node

        return build

    def _count(self) -> tuple[int, int | None]:
        if self._rest[:1] in _TIMES:
            found, self._rest = _TIMES[self._rest[0]], self._rest[1:]
            return found
        count = _COUNT.match(self._rest)
        if not count or not (count[1] or count[3]):
            return 1, 1
        self._take(count[0])
        least = int(count[1] or 0)
        most = (int(count[3]) if count[3] else None) if count[2] else least
        if max(least, most or 0) > MAX_REPEAT or (most is not None and most < least):
            self._refuse(f"repeats more than {MAX_REPEAT} times, or backwards")
        return least, most


# Following all ways


class _Way(NamedTuple):
    node: _Node
    source: int
    """Which of the ways before it came from."""
    now: tuple[int, ...]
    """Slots that are saved before the character."""
    then: tuple[int, ...]
    """Slots that are saved after it."""


class _WayStep(NamedTuple):
    """What a character does: the ways after it, and perhaps a match that no earlier way can prevent."""

    after: "_Ways"
    ways: tuple[_Way, ...]
    match: _Way | None
    matched_before: bool
    """The match ends before the character."""
    same: bool
    """Every way kept what it had saved, so that nothing is to be copied."""


class _Ways:
    """Where all ways are, and what is known of the steps from there."""

    __slots__ = ("before", "nodes", "seeding", "steps")

    def __init__(self, nodes: tuple[_Node, ...], before: str, seeding: bool) -> None:
        self.nodes = nodes
        self.before = before
        """The last character, or one of its kind; "^" is no character but the very begin."""
        self.seeding = seeding
        """A way may begin at each character: there is no match yet."""
        self.steps: dict[str, _WayStep] = {}


class Pattern:
    """The nodes, with what was learned of them so far. Shared by all who look for it."""

    def __init__(self, start: _Node, groups: tuple[str, ...]) -> None:
        self.groups = groups
        self.no_slots = (-1,) * (1 + 2 * len(groups))
        self._start = start
        self._known: dict[tuple[tuple[_Node, ...], str, bool], _Ways] = {}
        self._steps = 0

    def ways(self, nodes: tuple[_Node, ...], before: str, seeding: bool) -> _Ways:
        key = (nodes, before if before == "^" else "a" if _is_word(before) else " ", seeding)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = _Ways(*key)
        return found

    def step(self, state: _Ways, character: str) -> _WayStep:
        """The step that is not known yet; "" is the end of the text."""
        self._steps += 1
        if self._steps > MAX_STEPS:
            self._steps = 0
            self._known.clear()
        sources = [*enumerate(state.nodes), *([(FRESH, self._start)] if state.seeding else [])]
        ways, match, matched_before = _work_out(sources, state.before, character)
        after = self.ways(tuple(way.node for way in ways), character, state.seeding and match is None)
        kept = all(way == _Way(way.node, number, (), ()) for number, way in enumerate(ways))
        same = kept and len(ways) == len(state.nodes)
        step = state.steps[character] = _WayStep(after, tuple(ways), match, matched_before, same)
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

    @property
    def matches_nothing(self) -> bool:
        """The empty text matches, wherever it is."""
        inside = {"^": False, "$": False, "b": True, "B": True}
        return any(
            node.op == "match" or AHEAD in saved for node, saved in _follow(self._start, set(), inside)
        )

    def first_characters(self) -> str:
        """The characters that a match can begin with, as a pattern; "" if that cannot be told."""
        anywhere = {"^": False, "$": True, "b": True, "B": True}
        found = [node for node, _ in _follow(self._start, set(), anywhere)]
        return "" if any(node.op == "match" for node in found) else "|".join(sorted({n.what for n in found}))


def _work_out(
    sources: list[tuple[int, _Node]], before: str, character: str
) -> tuple[list[_Way], _Way | None, bool]:
    """The ways after a character, and perhaps a match; whether that ends before the character."""
    border = _is_word(before) != _is_word(character)
    here = {"^": before == "^", "$": not character, "b": border, "B": not border}
    entered: set[_Node] = set()
    left: set[_Node] = set()
    ways: list[_Way] = []
    for source, start in sources:
        for node, now in _follow(start, entered, here):
            if node.op == "match":
                return ways, _Way(node, source, now, ()), True
            if not character or not _fits(node.what, character):
                continue
            for after, then in _follow(node.then, left, _NOT_KNOWN_YET):
                if after.op == "match":
                    return ways, _Way(after, source, now, then), False
                ways.append(_Way(after, source, now, then))
    return ways, None, False


_NOT_KNOWN_YET: dict[str, bool | None] = {"^": False, "$": None, "b": None, "B": None}


def _follow(
    start: _Node, seen: set[_Node], borders: "dict[str, bool] | dict[str, bool | None]"
) -> Iterator[tuple[_Node, tuple[int, ...]]]:
    """Where a way leads without a character, first choices first, and the slots that are saved on it.

    That is to characters, to the match, and to borders of which it is not known whether they are there.
    """
    todo: list[tuple[_Node, tuple[int, ...]]] = [(start, ())]
    while todo:
        node, saved = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op == "split":
            todo += [(node.other, saved), (node.then, saved)]
        elif node.op == "save":
            todo.append((node.then, (*saved, node.slot)))
        elif node.op != "border" or borders[node.what] is None:
            yield node, saved
        elif borders[node.what]:
            todo.append((node.then, saved))


class Search:
    """Looks for the first match in what is pushed."""

    def __init__(self, pattern: Pattern, before: str = "") -> None:
        self._pattern = pattern
        self._state = pattern.ways((), before or "^", True)
        self._saved: list[tuple[int, ...]] = []
        """For each way its slots."""
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
            self.match = self._read_match(step, step.match, at)
        if not step.same:
            self._saved = [self._slots(way, at) for way in step.ways]
            self.busy = bool(self._saved) or self.match is not None
        self._state = step.after

    def end(self, at: int) -> None:
        """There is no more text: what could still come about does not."""
        self.push("", at)
        self._saved = []
        self.busy = self.match is not None

    def skip(self, last: str) -> None:
        """Characters were left out that no match begins with; this was the last of them."""
        self._state = self._pattern.ways((), last, True)

    def pending(self) -> int | None:
        """Where the earliest match begins that may still come about."""
        return self._saved[0][0] if self._saved else None

    def give_up(self, before: int) -> None:
        """Forget the ways that began before this place."""
        kept = [number for number, saved in enumerate(self._saved) if saved[0] >= before]
        if len(kept) < len(self._saved):
            nodes = tuple(self._state.nodes[number] for number in kept)
            self._state = self._pattern.ways(nodes, self._state.before, self._state.seeding)
            self._saved = [self._saved[number] for number in kept]
            self.busy = bool(self._saved) or self.match is not None

    def _slots(self, way: _Way, at: int) -> tuple[int, ...]:
        saved = (at, *self._pattern.no_slots) if way.source == FRESH else self._saved[way.source]
        if not (way.now or way.then):
            return saved
        changed = list(saved)
        for slot in way.now:
            changed[slot] = at
        for slot in way.then:
            changed[slot] = at + 1
        return tuple(changed)

    def _read_match(self, step: _WayStep, way: _Way, at: int) -> Match:
        start, ahead, *slots = self._slots(way, at)
        ends = zip(self._pattern.groups, slots[::2], slots[1::2], strict=True)
        groups = {name: (begin, end) for name, begin, end in ends if begin >= 0 and end >= 0}
        return Match(start, ahead if ahead >= 0 else at if step.matched_before else at + 1, groups)


@lru_cache(4096)
def _fits(what: str, character: str) -> bool:
    return re.fullmatch(what, character, re.DOTALL) is not None


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"
