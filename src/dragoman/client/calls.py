"""Tool calls of a chat stream, which has no sign for the end of a call: it is found in what comes."""

import re
from collections.abc import Iterator

from msgspec import Struct, field

from dragoman.client.events import CallArguments, CallBegan, CallDone, Token
from dragoman.client.wire import CallDelta, Named
from dragoman.types import ToolCall

_MARK = re.compile(r'["\\{}\[\]]')
CUT_SHORT = frozenset({"length", "content_filter", "abort", "error"})
"""Reasons for which an answer ends in the middle of what it was saying."""


class CallGoesOn(ValueError):
    """More came of a call that was complete, and may have been made."""


class ObjectEnd:
    """Finds the end of a JSON object or list that comes in pieces.

    >>> end = ObjectEnd()
    >>> end.feed('{"a": "}'), end.feed('"}')
    (False, True)
    """

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = self._escaped = self._over = False

    def feed(self, text: str) -> bool:
        """Whether it is over. Raises where it goes on behind its end."""
        at = int(self._escaped and bool(text))
        self._escaped = self._escaped and not text
        while not self._over and (found := _MARK.search(text, at)):
            at, mark = found.end(), found[0]
            if mark == '"':
                self._quoted = not self._quoted
            elif mark == "\\":
                self._escaped, at = at == len(text), at + 1
            elif not self._quoted:
                self._depth += 1 if mark in "{[" else -1
                self._over = self._depth == 0
        if self._over and text[at:].strip():
            raise CallGoesOn("the arguments of a call go on behind their end")
        return self._over


class _Call(Struct):
    number: int
    index: int
    id: str | None
    name: str
    custom: bool
    pieces: list[str] = field(default_factory=list)
    end: ObjectEnd = field(default_factory=ObjectEnd)
    done: bool = False


class Calls:
    """The calls of one choice."""

    def __init__(self, choice: int) -> None:
        self._choice = choice
        self._calls: list[_Call] = []

    def take(self, delta: CallDelta, tokens: list[Token]) -> Iterator[CallBegan | CallArguments | CallDone]:
        said = delta.function or delta.custom or Named()
        call = self._found(delta, said)
        if call is None:
            # A call without arguments, or with a text, shows no end of its own. One that is in the middle of
            # an object may go on beside the next.
            yield from self._close([old for old in self._calls if old.custom or not "".join(old.pieces)])
            call = self._begin(delta, said)
            yield CallBegan(id=call.id, name=call.name, call=call.number, tokens=tokens, choice=self._choice)
            tokens = []
        if said.said or tokens:
            yield CallArguments(text=said.said, call=call.number, tokens=tokens, choice=self._choice)
            call.pieces.append(said.said)
            if not call.custom and call.end.feed(said.said):
                yield from self._close([call])

    def finish(self, reason: str) -> Iterator[CallDone]:
        if reason not in CUT_SHORT:
            yield from self._close(self._calls)

    def _found(self, delta: CallDelta, said: Named) -> _Call | None:
        """The call that a delta goes on with. Some servers give every call the index 0, or none."""
        same = [call for call in self._calls if delta.index is None or call.index == delta.index]
        call = same[-1] if same else None
        is_new = call is not None and said.name and delta.id is not None and delta.id != call.id
        return None if is_new else call

    def _begin(self, delta: CallDelta, said: Named) -> _Call:
        number = len(self._calls)
        index = number if delta.index is None else delta.index
        call = _Call(number, index, delta.id, said.name or "", delta.custom is not None)
        self._calls.append(call)
        return call

    def _close(self, calls: list[_Call]) -> Iterator[CallDone]:
        for call in calls:
            if not call.done:
                call.done = True
                value = ToolCall(id=call.id, name=call.name, arguments="".join(call.pieces))
                yield CallDone(value=value, call=call.number, choice=self._choice)
