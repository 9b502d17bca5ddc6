"""The readers of calls, one for each way to write them.

A reader begins after the opening marker. It returns True if the call was complete, and False if what is here
is none or was cut short; what it did not say by then is given back as text by the machine.
"""

from typing import TYPE_CHECKING

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
from dragoman.dialects.scan import Wait

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


def fits(shape: Calls, following: str) -> bool:
    """Whether a call of this shape may begin with this character."""
    if isinstance(shape, JsonCalls):
        return following == "{" or (following == "[" and shape.list != "never")
    if isinstance(shape, PythonCalls):
        return following == "[" if shape.brackets else following.isidentifier()
    return following not in ("{", "[", "")
