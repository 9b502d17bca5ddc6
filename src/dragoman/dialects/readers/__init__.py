"""Parsers of calls, one per syntax.

A reader starts after the opening marker. It returns True if the call is complete, and False if there is no
call or it is cut short; the machine then rolls back what the reader did not emit and treats it as text.
"""

import re
from typing import TYPE_CHECKING

from dragoman.dialects.declarations import (
    AttributedCalls,
    BlockCalls,
    BraceCalls,
    Calls,
    JsonCalls,
    NamedCalls,
    PythonCalls,
    TaggedCalls,
    TreeCalls,
)
from dragoman.dialects.marker_tables import MarkerRule, marks_of
from dragoman.dialects.readers.json_calls import read_json_calls, read_named_call
from dragoman.dialects.readers.literals import read_brace_call, read_python_calls
from dragoman.dialects.readers.tagged import INDEX, read_tagged_call, read_tree_call
from dragoman.dialects.scan import MarkerSet, UnrequestedCall, Wait

if TYPE_CHECKING:
    from dragoman.dialects.state_machine import AnswerStateMachine


HEADER = re.compile(r"[\w.\-]*")
FENCE, FENCE_END = MarkerSet(("```json",)), MarkerSet(("```",))


def find_shape(m: "AnswerStateMachine", meaning: MarkerRule) -> Wait[Calls | None]:
    """Return the syntax, among those the marker may lead to, whose beginning is here."""
    if meaning.action == "section":
        return (yield from _in_section(m, meaning))
    shapes = [shape for shape in meaning.shapes if _is_allowed(m, shape)]
    if len(shapes) < 2:
        return shapes[0] if shapes else None
    following = yield from m.space()
    return next((shape for shape in shapes if fits(shape, following)), None)


def _is_allowed(m: "AnswerStateMachine", shape: Calls) -> bool:
    section = shape.section
    return section is None or not section.required or m.is_awaited(section.close)


def _in_section(m: "AnswerStateMachine", meaning: MarkerRule) -> Wait[Calls | None]:
    """Read the opening of a section: the first call's marker, or the end of an empty section."""
    following = yield from m.space()
    for shape in meaning.shapes:
        section = shape.section
        assert section is not None
        if (yield from m.match(marks_of(section.close))):
            m.commit_trial()
            return None
        if isinstance(shape, BlockCalls):
            m.header, text = yield from m.collect(marks_of(shape.open), HEADER)
        elif shape.open:
            text = yield from m.match(marks_of(shape.open))
        else:
            text = following if fits(shape, following) else ""
        if text:
            m.await_close(section.close)
            return shape
    return None


def read_calls(machine: "AnswerStateMachine", shape: Calls) -> Wait[bool]:
    machine.begin_call(shape)
    if isinstance(shape, JsonCalls):
        return (yield from read_json_calls(machine, shape))
    if isinstance(shape, NamedCalls):
        return (yield from read_named_call(machine, shape))
    if isinstance(shape, PythonCalls):
        return (yield from read_python_calls(machine, shape))
    if isinstance(shape, BraceCalls):
        return (yield from read_brace_call(machine, shape))
    assert isinstance(shape, TaggedCalls)
    if isinstance(shape, TreeCalls):
        return (yield from read_tree_call(machine, shape))
    return (yield from read_tagged_call(machine, shape))


def read_mention(machine: "AnswerStateMachine", mark: str, meaning: MarkerRule, mention: str) -> Wait[None]:
    """Read a call that reasoning probably only mentions, with all its contents.

    In the middle of a sentence it is a call only if nothing follows it, so that the model ended with it.
    """
    m = machine
    m.begin_trial(len(mark))
    m.open_part(meaning.core)
    m.at -= len(meaning.core) if meaning.bare else 0
    m.mentioning, m.draft, complete = True, [], False
    shape = yield from find_shape(m, meaning)
    if shape is not None:
        complete = yield from read_calls(m, shape)
    if shape is not None and complete:
        yield from m.close_calls(shape, meaning)
        yield from m.space()
    m.mentioning = False
    if complete and m.draft and mention == "said" and m.holding and m.at == len(m.text):
        try:
            m.take_draft()
            m.close_part()
            m.say_left()
        except UnrequestedCall:
            m.leave_call(m.roll_back())
        return
    text = m.roll_back()
    m.at += 0 if text else len(meaning.core)
    m.emit_reasoning(text or meaning.core)


def read_lone_calls(m: "AnswerStateMachine", shape: JsonCalls) -> Wait[None]:
    """Read calls without a marker that are the whole answer: some models omit the marker, or write a fence
    instead.

    They must name declared tools. Nothing is emitted while this is still possible.
    """
    m.begin_trial()
    m.open_part()
    yield from m.space()
    fence = yield from m.match(FENCE)
    m.mentioning, m.draft, complete = True, [], False
    if (yield from m.space()) == "{":
        complete = yield from read_calls(m, shape)
    if complete and fence:
        yield from m.space()
        complete = bool((yield from m.match(FENCE_END)))
    if complete:
        complete = not (yield from m.space())
    m.mentioning = False
    if complete:
        m.take_draft()
        m.close_part()
        m.say_left()
    else:
        m.unread(m.roll_back())


def take_back(m: "AnswerStateMachine", meaning: MarkerRule, shape: Calls | None) -> None:
    """Roll back a marker without a call. If the end of the answer cut the call off, its special tokens are
    not text.
    """
    cut_off = m.ended and m.at == len(m.text)
    text = m.roll_back()
    if not text and not m.half:
        # A bare call that failed at its first character: consume this character as text.
        m.at += len(meaning.core)
        text = meaning.core
    if cut_off:
        text = _without_structure(m, text, shape)
    elif meaning.shapes[0].silent:
        text = _without_markers(m, text, meaning)
    m.defer_after_marker(text)
    m.sink(text)


def _without_structure(m: "AnswerStateMachine", text: str, shape: Calls | None) -> str:
    """Return the text that is left of a truncated call, without its special tokens and without a partial
    name.
    """
    if not m.compiled.structure.search(text):
        return text
    value = _without_tags(m, text.removesuffix(m.tail), shape)
    name = value.strip()
    if isinstance(shape, NamedCalls) and shape.prefixed:
        name = name.removeprefix(shape.prefixed).rstrip("0123456789").removesuffix(":")
    return "" if any(known.startswith(name) for known in m.tools) else value


def _without_markers(m: "AnswerStateMachine", text: str, meaning: MarkerRule) -> str:
    """Return the text after a marker without its markers: inside a section, its markers and closing markers
    are not text.
    """
    shape = meaning.shapes[0]
    closes = shape.section.close if shape.section else ()
    if meaning.action != "section" and not m.is_awaited(closes):
        return meaning.openings.pattern.sub("", text)
    m.await_close(closes)
    m.await_close(shape.close)
    return _without_tags(m, text, shape)


def _without_tags(m: "AnswerStateMachine", text: str, shape: Calls | None) -> str:
    value = m.compiled.structure.sub("", text)
    if isinstance(shape, AttributedCalls):
        name, _, rest = value.partition(shape.rest[0])
        value = name if INDEX.fullmatch(rest) else value
    return value


def fits(shape: Calls, following: str) -> bool:
    """Whether a call of this syntax may begin with this character."""
    if isinstance(shape, JsonCalls):
        return following == "{" or (following == "[" and shape.list != "never")
    if isinstance(shape, PythonCalls):
        return following == "[" if shape.brackets else following.isidentifier()
    return following not in ("{", "[", "")
