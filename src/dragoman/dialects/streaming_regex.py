"""Regular expressions from a model's files, matched against text that arrives in chunks.

Why not `re`. A pattern of a `response_template` comes from a downloaded file, and the text is a model's
answer: for `re`, both can be crafted so that a match takes years, and `\\s*</tag>` takes seconds when a model
writes endless spaces. Nor can `re` say whether a match would still be the match if more text came, and an
answer must parse alike however it is cut.

How it works (after Thompson and Pike). A pattern is compiled into nodes: one that takes a character, a split
into a first and a second choice, one that saves an offset, one that requires a border (`^`, `$`, `\\b`,
`\\B`), and the match. All threads through the nodes are followed at the same time, character by character, in
the order in which a backtracking matcher would try them. A thread that reaches a node where an earlier one
already is ends there, so there are never more threads than nodes, and time is proportional to the text. A
thread that matches ends all later ones; earlier ones go on, and a match of one of them is better. The final
match is therefore the one that `re` would have found, and it is `settled` when no earlier thread is left.

    pattern  <a+>     text  x < a a > y
                            0 1 2 3 4 5     a thread begins at 1, loops at 2 and 3, matches at 4: settled

The effect of a character on a list of threads is computed once (`_work_out`) and then looked up. Only regular
languages are supported: no back references, no lookbehind, and lookahead only at the end.

`constrain/grammar/expressions.py` also parses expressions, into trees that describe matches from end to end.
Here the order of attempts and the extent of groups count, which such a tree does not have.
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
"""Maximum number of cached steps of one pattern; beyond it, as with very many different characters, the cache
is cleared.
"""
WORK_PER_CHARACTER = 8
FRESH = -1
"""Source of a thread that begins at this character."""
AHEAD = 1
"""Slot for the offset where a lookahead begins and the match ends. Slot 0 is the start; slots after it are
groups.
"""

_CLASS = re.compile(r"\[\^?\]?(?:\\.|\[:|[^\]\\])*\]", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[dDwWsSnrtfv0]|[^\w\s]|\s)")
_COUNT = re.compile(r"\{(\d*)(,?)(\d*)\}")
_GROUP = re.compile(r"\((?:\?(?::|P?<([A-Za-z_]\w*)>))?(?!\?)")
_BORDERS = {"^": "^", "$": "$", r"\A": "^", r"\Z": "$", r"\z": "$", r"\b": "b", r"\B": "B"}
_TIMES: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


_Op: TypeAlias = Literal["char", "split", "save", "border", "match"]


class _Node:
    """One instruction of the compiled pattern."""

    __slots__ = ("op", "other", "slot", "then", "what")

    def __init__(self, op: _Op, then: "_Node | None" = None, what: str = "", slot: int = 0) -> None:
        self.op = op
        self.then = self.other = then or self
        """In a split: the first and the second choice."""
        self.what = what
        """In a char: a pattern of one character. In a border: which one."""
        self.slot = slot


_Piece: TypeAlias = Callable[[_Node], _Node]
"""A part of a pattern as a function: takes the node that follows, and returns the first of its own nodes."""


class PatternMatch(NamedTuple):
    start: int
    end: int
    groups: dict[str, tuple[int, int]]


# Compiling a pattern


def compile_pattern(pattern: str, where: str) -> "StreamingPattern":
    """Compile a pattern, as in `compile_pattern("<think>\\\\s*", "fields.thinking.open_pattern")`; errors
    name `where`.
    """
    if len(pattern) > MAX_PATTERN:
        raise SettingsError(f"{where} has {len(pattern)} characters; at most {MAX_PATTERN} are allowed.")
    return _NodeBuilder(pattern, where).read()


def compile_literals(literals: tuple[str, ...], where: str) -> "StreamingPattern":
    """Compile alternatives of literal texts; the longest that fits wins."""
    ordered = sorted(dict.fromkeys(literals), key=len, reverse=True)
    return _NodeBuilder("|".join(map(re.escape, ordered)), where).read()


class _NodeBuilder:
    def __init__(self, pattern: str, where: str) -> None:
        self._rest = pattern.removeprefix("(?s)")
        self._where = where
        self._nodes = 0
        self._groups: list[str] = []

    def read(self) -> "StreamingPattern":
        try:
            piece = self._alternatives()
            if self._rest:
                self._refuse("has an unmatched )")
            return StreamingPattern(piece(_Node("match")), tuple(self._groups))
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
        """Return the pattern of one character. It is safe for `re`, which cannot backtrack in it."""
        first = self._rest[0]
        if first in "*+?":
            self._refuse("repeats nothing")
        form = {"[": _CLASS, "\\": _ESCAPE}.get(first)
        match = form.match(self._rest) if form else None
        if form and not match:
            self._refuse("has an unsupported class or escape")
        text = match[0] if match else first
        self._take(text)
        if not match and text != ".":
            return re.escape(text)
        try:
            re.compile(text)
        except re.error:
            self._refuse("has an invalid class")
        return text

    def _group(self) -> _Piece:
        ahead = self._take("(?=")
        match = None if ahead else _GROUP.match(self._rest)
        if not ahead and not match:
            self._refuse("has an unsupported kind of group")
        self._take(match[0] if match else "")
        name = match[1] if match else None
        if name in self._groups:
            self._refuse(f"has two groups named {name}")
        slot = AHEAD + 1 + 2 * len(self._groups)
        self._groups += [name] if name else []
        piece = self._alternatives()
        if not self._take(")"):
            self._refuse("has an unclosed (")
        if ahead:
            # Only at the very end: it sets the end of the match and what must follow.
            if self._rest.strip(")"):
                self._refuse("has a lookahead before its end")
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
            self._refuse("has an unsupported repeat")

        def build(then: _Node) -> _Node:
            node = then
            if most is None:
                node = self._split(then, then)
                inside = piece(node)
                node.then, node.other = (then, inside) if lazy else (inside, then)
            for _ in range((most or least) - least):
                node = self._split(piece(node), then, lazy)
            for _ in range(least):
                # A repeated empty expression counts as well, once per repetition.
                self._spend()
                node = piece(node)
            return node

        return build

    def _count(self) -> tuple[int, int | None]:
        if self._rest[:1] in _TIMES:
            pair, self._rest = _TIMES[self._rest[0]], self._rest[1:]
            return pair
        count = _COUNT.match(self._rest)
        if not count or not (count[1] or count[3]):
            return 1, 1
        self._take(count[0])
        least = int(count[1] or 0)
        most = (int(count[3]) if count[3] else None) if count[2] else least
        if max(least, most or 0) > MAX_REPEAT or (most is not None and most < least):
            self._refuse(f"repeats more than {MAX_REPEAT} times, or backwards")
        return least, most


# Following all threads


class _NfaThread(NamedTuple):
    node: _Node
    source: int
    """Index of the earlier thread that this one continues."""
    now: tuple[int, ...]
    """Slots that are saved before the character."""
    then: tuple[int, ...]
    """Slots that are saved after it."""


class _DfaTransition(NamedTuple):
    """Effect of a character: the threads after it, and a match if no earlier thread can prevent it."""

    after: "_DfaState"
    ways: tuple[_NfaThread, ...]
    match: _NfaThread | None
    matched_before: bool
    """Whether the match ends before the character."""
    same: bool
    """Whether all threads keep their slots, so that nothing is copied."""


class _DfaState:
    """Positions of all threads, with the steps computed from there."""

    __slots__ = ("before", "nodes", "seeding", "steps")

    def __init__(self, nodes: tuple[_Node, ...], before: str, seeding: bool) -> None:
        self.nodes = nodes
        self.before = before
        """The last character, or one of its class; "^" stands for the beginning of the text."""
        self.seeding = seeding
        """Whether a thread may begin at each character, because there is no match yet."""
        self.steps: dict[str, _DfaTransition] = {}


class StreamingPattern:
    """A compiled pattern with its cached steps, shared by all searches."""

    def __init__(self, start: _Node, groups: tuple[str, ...]) -> None:
        self.groups = groups
        self.no_slots = (-1,) * (1 + 2 * len(groups))
        self._start = start
        self._known: dict[tuple[tuple[_Node, ...], str, bool], _DfaState] = {}
        self._steps = 0

    def ways(self, nodes: tuple[_Node, ...], before: str, seeding: bool) -> _DfaState:
        key = (nodes, before if before == "^" else "a" if _is_word(before) else " ", seeding)
        state = self._known.get(key)
        if state is None:
            state = self._known[key] = _DfaState(*key)
        return state

    def step(self, state: _DfaState, character: str) -> _DfaTransition:
        """Compute a step that is not cached; "" is the end of the text."""
        self._steps += 1
        if self._steps > MAX_STEPS:
            self._steps = 0
            self._known.clear()
        sources = [*enumerate(state.nodes), *([(FRESH, self._start)] if state.seeding else [])]
        ways, match, matched_before = _work_out(sources, state.before, character)
        after = self.ways(tuple(way.node for way in ways), character, state.seeding and match is None)
        kept = all(way == _NfaThread(way.node, number, (), ()) for number, way in enumerate(ways))
        same = kept and len(ways) == len(state.nodes)
        step = state.steps[character] = _DfaTransition(after, tuple(ways), match, matched_before, same)
        return step

    def find_all(self, text: str) -> Iterator[PatternMatch]:
        """Yield all matches that do not overlap. The search ends when it has done much more than one pass."""
        at, left = 0, WORK_PER_CHARACTER * len(text) + MAX_STEPS
        while at <= len(text) and left > 0:
            search = PatternSearch(self, text[at - 1 : at] if at else "")
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
        """Whether the empty text matches anywhere."""
        inside = {"^": False, "$": False, "b": True, "B": True}
        return any(
            node.op == "match" or AHEAD in saved for node, saved in _follow(self._start, set(), inside)
        )

    def first_characters(self) -> str:
        """Return a pattern of the characters that a match can begin with; "" if any can."""
        anywhere = {"^": False, "$": True, "b": True, "B": True}
        nodes = [node for node, _ in _follow(self._start, set(), anywhere)]
        return "" if any(node.op == "match" for node in nodes) else "|".join(sorted({n.what for n in nodes}))


def _work_out(
    sources: list[tuple[int, _Node]], before: str, character: str
) -> tuple[list[_NfaThread], _NfaThread | None, bool]:
    """Return the threads after a character, a match if there is one, and whether it ends before the
    character.
    """
    border = _is_word(before) != _is_word(character)
    here = {"^": before == "^", "$": not character, "b": border, "B": not border}
    entered: set[_Node] = set()
    left: set[_Node] = set()
    ways: list[_NfaThread] = []
    for source, start in sources:
        for node, now in _follow(start, entered, here):
            if node.op == "match":
                return ways, _NfaThread(node, source, now, ()), True
            if not character or not _fits(node.what, character):
                continue
            for after, then in _follow(node.then, left, _NOT_KNOWN_YET):
                if after.op == "match":
                    return ways, _NfaThread(after, source, now, then), False
                ways.append(_NfaThread(after, source, now, then))
    return ways, None, False


_NOT_KNOWN_YET: dict[str, bool | None] = {"^": False, "$": None, "b": None, "B": None}


def _follow(
    start: _Node, seen: set[_Node], borders: "dict[str, bool] | dict[str, bool | None]"
) -> Iterator[tuple[_Node, tuple[int, ...]]]:
    """Yield the nodes that a thread reaches without a character, first choices first, with the slots it
    saves.

    These nodes are characters, the match, and borders whose truth is not known yet.
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


class PatternSearch:
    """Search for the first match in the characters that are pushed."""

    def __init__(self, pattern: StreamingPattern, before: str = "") -> None:
        self._pattern = pattern
        self._state = pattern.ways((), before or "^", True)
        self._saved: list[tuple[int, ...]] = []
        """Slots of each thread."""
        self.match: PatternMatch | None = None
        self.busy = False
        """Whether a thread is running or there is a match. If not, characters that begin no match may be
        skipped.
        """

    @property
    def settled(self) -> bool:
        """Whether the match is final."""
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
        """End the text: matches that need more of it fail."""
        self.push("", at)
        self._saved = []
        self.busy = self.match is not None

    def skip(self, last: str) -> None:
        """Skip characters that begin no match; `last` is the last of them."""
        self._state = self._pattern.ways((), last, True)

    def pending(self) -> int | None:
        """Return where the earliest match that is still possible begins."""
        return self._saved[0][0] if self._saved else None

    def give_up(self, before: int) -> None:
        """Drop threads that began before this offset."""
        kept = [number for number, saved in enumerate(self._saved) if saved[0] >= before]
        if len(kept) < len(self._saved):
            nodes = tuple(self._state.nodes[number] for number in kept)
            self._state = self._pattern.ways(nodes, self._state.before, self._state.seeding)
            self._saved = [self._saved[number] for number in kept]
            self.busy = bool(self._saved) or self.match is not None

    def _slots(self, way: _NfaThread, at: int) -> tuple[int, ...]:
        saved = (at, *self._pattern.no_slots) if way.source == FRESH else self._saved[way.source]
        if not (way.now or way.then):
            return saved
        changed = list(saved)
        for slot in way.now:
            changed[slot] = at
        for slot in way.then:
            changed[slot] = at + 1
        return tuple(changed)

    def _read_match(self, step: _DfaTransition, way: _NfaThread, at: int) -> PatternMatch:
        start, ahead, *slots = self._slots(way, at)
        ends = zip(self._pattern.groups, slots[::2], slots[1::2], strict=True)
        groups = {name: (begin, end) for name, begin, end in ends if begin >= 0 and end >= 0}
        return PatternMatch(start, ahead if ahead >= 0 else at if step.matched_before else at + 1, groups)


@lru_cache(4096)
def _fits(what: str, character: str) -> bool:
    return re.fullmatch(what, character, re.DOTALL) is not None


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"
