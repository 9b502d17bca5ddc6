"""The readers of calls, one for each way to write them.

A reader begins after the opening marker. It returns True if the call was complete, and False if what is here
is none or was cut short; what it did not say by then is given back as text by the machine.
"""

from typing import TYPE_CHECKING

from dragoman.dialects.compiled import Meaning
from dragoman.dialects.declare import (
    BraceCalls,
    Calls,
    JsonCalls,
    NamedCalls,
    PythonCalls,
    TaggedCalls,
    TreeCalls,
)
from dragoman.dialects.readers.json_calls import read_json_calls, read_named_call
from dragoman.dialects.readers.literals import read_brace_call, read_python_calls
from dragoman.dialects.readers.tagged import read_tagged_call, read_tree_call
from dragoman.dialects.scan import IsCall, Wait

if TYPE_CHECKING:
    from dragoman.dialects.machine import Machine


def read_calls(machine: "Machine", shape: Calls) -> Wait[bool]:
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


def read_mention(machine: "Machine", mark: str, meaning: Meaning, mention: str) -> Wait[None]:
    """A call that reasoning seems only to be about, with all that is in it.

    In the middle of a sentence it is a call if nothing follows it: then it is what the model ends with.
    """
    m = machine
    m.hold(len(mark))
    m.open_part(meaning.core)
    m.at -= len(meaning.core) if meaning.bare else 0
    m.mentioning, m.draft, complete = True, [], False
    shape = yield from m.find_shape(meaning)
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
        except IsCall:
            m.leave_call(m.retract())
        return
    given = m.retract()
    m.at += 0 if given else len(meaning.core)
    m.think(given or meaning.core)


def fits(shape: Calls, following: str) -> bool:
    """Whether a call of this shape may begin with this character."""
    if isinstance(shape, JsonCalls):
        return following == "{" or (following == "[" and shape.list != "never")
    if isinstance(shape, PythonCalls):
        return following == "[" if shape.brackets else following.isidentifier()
    return following not in ("{", "[", "")
