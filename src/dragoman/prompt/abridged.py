"""A conversation without its middle: rendered instead of the whole, it shows the text of the new messages.

    the messages         head  middle ............  tail  new
    known, as text       HHHH  MMMMMMMMMMMMMMMMMMM  TTTT  g       g: what asks for an answer
    short, before        HHHH                       TTTT  g       `AbridgedConversation`
    short, now           HHHH                       TTTT  NNNN g  the one rendering that is made
    the prompt now       HHHH  MMMMMMMMMMMMMMMMMMM  TTTT  NNNN g  = known up to the change, and the new end

Everything that a template may inspect stays in the short conversation: the beginning, the last user message
with its neighbours, the tools that are called, and in the same places (before the last user message or after
it) a message of every kind that was left out. Signs that a template inspects more lead back to the full
rendering:

- the short text before must be the known text with parts left out, which is not so for a template that counts
  or alternates;
- the short text now must be that of before up to the end of what was known: a template that writes old
  messages differently once something new is there (most drop reasoning when a user message comes) does so
  here, too.

Numbers. Some templates number all calls of a conversation, and have smaller numbers where some are left out.
For these a second short conversation is rendered, with fewer rounds of calls, or one more, and one tool.
Where the ends of the two differ are such numbers, all of them by as much as there are fewer calls; and all of
them differ from those of the known text by what was left out, which is to be added to those in the new end.
"""

import itertools
import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from dragoman.types import Conversation, Message

LEAST_TAIL, MOST_TAIL = 8, 20
"""Messages at the end of a short conversation."""
LEAST_LEFT_OUT = 4
"""With fewer messages in the middle, a short conversation is not worth it."""
LEAST_MESSAGES = LEAST_TAIL + LEAST_LEFT_OUT
LONGEST_USE = MOST_TAIL - LEAST_TAIL
"""Maximum number of messages added to a short conversation before it is made anew."""


class Rendering(Struct, frozen=True):
    """What a template writes for a conversation."""

    text: str
    """Text with marks."""
    mark: str
    chars: int
    """Characters of the input; the difference of two conversations is that of their messages."""
    order: tuple[tuple[str, bool], ...] = ()
    """With fences: the roles of the messages, and which messages have fences."""


Render: TypeAlias = Callable[[Conversation], Rendering]
"""Function that renders a whole conversation."""


class Numbering(Struct, frozen=True):
    """How a template numbers parts of a conversation, shown by a second conversation with other rounds of
    calls.
    """

    places: tuple[int, ...]
    rendering: Rendering
    step: int
    """Difference of the numbers in the second conversation."""
    shift: int
    """Difference of the numbers in the whole conversation."""
    behind: str
    """The character before each number, not a digit: otherwise adjacent digits would be part of it."""


class NewTail(Struct, frozen=True):
    """New end of a conversation's text."""

    text: str
    replaced_chars: int
    """Number of characters at the end that it replaces."""
    mark: str
    chars: int
    order: tuple[tuple[str, bool], ...]
    short: "AbridgedConversation"


class AbridgedConversation(Struct, frozen=True):
    """A conversation without its middle."""

    places: tuple[int, ...]
    """Indices of the known conversation's messages that are in it."""
    tools: tuple[dict[str, Any], ...]
    """Tools that are called in it."""
    last: Message
    made_at: int
    """Number of messages of the known conversation when it was made."""
    rendering: Rendering
    tail: int
    """Characters at its end that equal the known text, except for numbers."""
    unseen: frozenset[tuple[str, bool, bool]]
    """Kinds of messages that were left out and have none behind them: they may have a number."""
    numbering: Numbering | None = None

    @property
    def settled(self) -> int | None:
        """Number of characters up to the end of the last message's text; None if it cannot be found.

        The text after it asks for an answer, and changes once that is given.
        """
        words = _WORD.findall(_last_text(self.last)[-LAST_WORDS:])
        number = self.rendering.text.rfind(words[-1]) if words else -1
        return number + len(words[-1]) if number >= len(self.rendering.text) - self.tail else None

    def is_reusable(self, now: Conversation, count: int, called: Iterable[str]) -> bool:
        """Whether it is still short compared with this many known messages, and has the called tools."""
        missing = {*called} - {*map(_tool_name, self.tools)}
        return count <= self.made_at + LONGEST_USE and not (missing and _pick_tools(now.tools, missing))

    def go_on(self, known: Sequence[Message], now: Conversation, render: Render) -> NewTail | None:
        """Return what is new at the end of the known text; None if the whole must be rendered."""
        new = now.messages[len(known) :]
        few = tuple(known[offset] for offset in self.places) + new
        if any(message.role in _SYSTEM or _kind(message) in self.unseen for message in new):
            return None
        if not _refers_to_itself(few):
            return None
        before, rendering = self.rendering, render(replace(now, messages=few, tools=self.tools))
        same, settled = common_prefix_length(before.text, rendering.text), self.settled
        if before.mark != rendering.mark or settled is None or same < settled:
            return None
        instead_of, text, numbering = len(before.text) - same, rendering.text[same:], self.numbering
        added = tuple(range(len(known), len(now.messages)))
        if numbering is not None:
            few = tuple(known[position] for position in numbering.places) + new
            other = render(replace(now, messages=few, tools=self.tools[:1]))
            numbered = _number_end(numbering, before.text, text, other.text, instead_of)
            if numbered is None:
                return None
            text = numbered
            numbering = replace(numbering, places=numbering.places + added, rendering=other)
        tail = self.tail + len(rendering.text) - len(before.text)
        more = now.messages[-1], self.made_at, rendering, tail, self.unseen, numbering
        short = AbridgedConversation(self.places + added, self.tools, *more)
        order = rendering.order[len(before.order) :]
        return NewTail(text, instead_of, rendering.mark, rendering.chars - before.chars, order, short)


def shorten(
    whole: Conversation,
    known: Rendering,
    before: AbridgedConversation | None,
    called: Iterable[str],
    render: Render,
) -> AbridgedConversation | None:
    """Build a short conversation. `before` is the one used so far; `called` are tools that the new messages
    call.
    """
    offsets = _places(whole.messages)
    if offsets is None:
        return None
    few = tuple(whole.messages[offset] for offset in offsets)
    # Keep the tools it had: a loop of calls uses the same ones.
    names = {*called, *(name for _, name in names_of(few)), *map(_tool_name, before.tools if before else ())}
    tools = _pick_tools(whole.tools, names) or whole.tools[:1]
    rendering = render(replace(whole, messages=few, tools=tools))
    # Number of parts: the head, the kept parts of the middle, and each tool, which may be anywhere.
    runs = 1 + sum(after != before + 1 for before, after in itertools.pairwise(offsets)) + len(tools)
    end = shared_end(rendering.text, known.text)
    more = len(whole.messages), rendering, end, _unseen(whole.messages, offsets)
    short = AbridgedConversation(offsets, tools, whole.messages[-1], *more)
    numbered = _with_other_rounds(whole.messages, offsets)
    if numbered is None:
        return short if _is_part(rendering.text[: len(rendering.text) - end], known.text, runs) else None
    few = tuple(whole.messages[position] for position in numbered)
    other = render(replace(whole, messages=few, tools=tools[:1]))
    return _check_numbers(short, numbered, other, known.text, runs)


def _unseen(messages: Sequence[Message], offsets: Sequence[int]) -> frozenset[tuple[str, bool, bool]]:
    behind = 1 + max({*range(len(messages))} - {*offsets}, default=-1)
    left_out = {_kind(message) for offset, message in enumerate(messages[:behind]) if offset not in offsets}
    return frozenset(left_out - {*map(_kind, messages[behind:])})


def _kind(message: Message) -> tuple[str, bool, bool]:
    return message.role, bool(message.tool_calls), _shows(message)


def _shows(message: Message) -> bool:
    """Whether it has an image or audio: some templates number them."""
    return isinstance(message.content, list) and any("media" in part for part in message.content)


def _pick_tools(tools: tuple[dict[str, Any], ...], names: Container[Any]) -> tuple[dict[str, Any], ...]:
    return tuple(tool for tool in tools if _tool_name(tool) in names)


def _tool_name(tool: dict[str, Any]) -> Any:
    return tool.get("function", tool).get("name")


# Numbers

_DIGITS = re.compile(r"([0-9]+)")
LONGEST_NUMBER = 9
LEAST_NUMBERED = 3
"""Minimum number of messages at the end of the second conversation."""


def _with_other_rounds(messages: Sequence[Message], offsets: Sequence[int]) -> tuple[int, ...] | None:
    """Choose messages with fewer calls, or with the first calls that were left out; None if none were.

    Fewer are cheaper to render. But each kind of message at the end must stay: it may have a number.
    """
    roles, left_out = [message.role for message in messages], {*range(len(messages))} - {*offsets}
    first_call = min((position for position in left_out if messages[position].tool_calls), default=None)
    if first_call is None:
        return None
    tail = 1 + max(left_out)
    kinds = {*map(_kind, messages[tail:])}
    for first in range(len(roles) - LEAST_NUMBERED, tail, -1):
        fewer = tuple(offset for offset in offsets if not tail <= offset < first)
        calls = any(message.tool_calls for message in messages[tail:first])
        if calls and kinds == {*map(_kind, messages[first:])} and _joins(roles, fewer):
            return fewer
    more = tuple(sorted({*offsets, *_round(roles, first_call)}))
    return more if _joins(roles, more) else None


def _check_numbers(
    short: AbridgedConversation, offsets: tuple[int, ...], other: Rendering, known: str, runs: int
) -> AbridgedConversation | None:
    """Return the short conversation, with its numbers if any; None if it is not a part of the known one."""
    text = short.rendering.text
    tail, numbers = _compare_ends(text, other.text, known[-2 * len(text) :])
    if not numbers:
        return short if _is_part(text[: len(text) - short.tail], known, runs) else None
    if len(numbers) > 1 or not _is_part(_mask(text[: len(text) - tail]), _mask(known), runs):
        return None
    ((step, shift, behind),) = numbers
    return replace(short, tail=tail, numbering=Numbering(offsets, other, step, shift, behind))


def _compare_ends(short: str, other: str, known: str) -> tuple[int, set[tuple[int, int, str]]]:
    """Return the number of characters with which all three texts end, except for numbers, and how these
    differ.

    A difference is the step, the shift, and the character before the number.
    """
    tail, items = 0, set[tuple[int, int, str]]()
    texts = [_DIGITS.split(text)[::-1] for text in (short, other, known)]
    for offset, (one, second, third) in enumerate(zip(*texts, strict=False)):
        step, shift = _difference(one, second), _difference(one, third)
        if one == second == third:
            tail += len(one)
        elif step and shift is not None and offset + 1 < len(texts[0]):
            tail += len(one)
            items.add((step, shift, texts[0][offset + 1][-1:]))
        else:
            return tail + min(shared_end(one, second), shared_end(one, third)), items
    return tail, items


def _difference(one: str, other: str) -> int | None:
    """Return the difference of two numbers without leading zeros, else None."""
    if max(len(one), len(other)) > LONGEST_NUMBER or not (one.isdecimal() and other.isdecimal()):
        return None
    plain = str(int(one)) == one and str(int(other)) == other
    return int(other) - int(one) if plain else None


def _number_end(numbering: Numbering, before: str, text: str, other: str, instead_of: int) -> str | None:
    """Return the new end with the numbers of the whole, if the replaced text has none."""
    old = numbering.rendering.text
    kept = old[: len(old) - instead_of]
    if before[len(before) - instead_of :] != old[len(kept) :] or not other.startswith(kept):
        return None
    pieces, others = _DIGITS.split(text), _DIGITS.split(other[len(kept) :])
    if len(pieces) != len(others) or (text[:1].isdecimal() and kept[-1:].isdecimal()):
        return None
    stands_behind = kept
    for offset, (one, second) in enumerate(zip(pieces, others, strict=True)):
        if one != second:
            if _difference(one, second) != numbering.step or stands_behind[-1:] != numbering.behind:
                return None
            pieces[offset] = str(int(one) + numbering.shift)
        stands_behind = one or stands_behind
    return "".join(pieces)


def _mask(text: str) -> str:
    return _DIGITS.sub("0", text)


# What is left out


def _is_part(short: str, whole: str, runs: int) -> bool:
    """Whether a text consists of at most this many pieces of another, in order."""
    at = 0
    for _ in range(runs):
        low, high, number = 0, len(short), at
        while low < high:
            middle = (low + high + 1) // 2
            offset = whole.find(short[:middle], at, None if at else middle)
            low, high, number = (middle, high, offset) if offset >= 0 else (low, middle - 1, number)
        short, at = short[low:], number + low
    return not short


def _places(messages: Sequence[Message]) -> tuple[int, ...] | None:
    """Return the indices of the messages of a short conversation; None if it would not be short."""
    roles = [message.role for message in messages]
    count = len(roles)
    if count < LEAST_MESSAGES or not {"assistant", "user"} <= {*roles}:
        return None
    head = _after_results(roles, roles.index("assistant") + 1)
    user = count - 1 - roles[::-1].index("user")
    asked = range(user - (roles[user - 1] == "assistant"), _after_results(roles, user + 2))
    shapes = [_shape(message, position > user) for position, message in enumerate(messages)]
    for tail in range(count - LEAST_TAIL, max(head, count - MOST_TAIL), -1):
        if roles[tail - 1 : tail + 1] != roles[head - 1 : head + 1]:
            continue
        positions = {*range(head), *asked, *range(tail, count)}
        known = {shapes[location] for location in positions}
        for offset in range(tail - 1, head - 1, -1):
            if shapes[offset] not in known:
                positions.update(_round(roles, offset))
                known.update(shapes[index] for index in _round(roles, offset))
        kept = sorted(positions)
        if count - len(kept) >= LEAST_LEFT_OUT and _joins(roles, kept):
            return tuple(kept)
    return None


def _joins(roles: Sequence[str], offsets: Sequence[int]) -> bool:
    """Whether all neighbours in a short conversation have such neighbours in the whole one."""
    return all(
        after == before + 1 or roles[before : before + 2] == roles[after - 1 : after + 1]
        for before, after in itertools.pairwise(offsets)
    ) and not any(roles[position] in _SYSTEM for position in {*range(len(roles))} - {*offsets})


def _round(roles: Sequence[str], offset: int) -> range:
    """Return a message with the calls that it is the result of and their other results."""
    start = offset
    while roles[start] in _RESULTS and start:
        start -= 1
    return range(start, _after_results(roles, start + 1))


_WORD = re.compile(r"\w+")
LAST_WORDS = 256
"""Maximum number of characters in which the last word of a message is searched for."""


def _last_text(message: Message) -> str:
    if isinstance(message.content, str):
        return message.content
    texts = [part.get("text") for part in message.content or ()]
    return next((text for text in reversed(texts) if isinstance(text, str)), "")


_SYSTEM = ("system", "developer")
_RESULTS = ("tool", "function")


def _after_results(roles: Sequence[str], offset: int) -> int:
    """Return the first index from this one on that is not a tool result."""
    while offset < len(roles) and roles[offset] in _RESULTS:
        offset += 1
    return min(offset, len(roles))


def _shape(message: Message, late: bool) -> tuple[Any, ...]:
    """Return everything by which a template may write one message differently from the next."""
    content, thought = (
        type(field) if field else repr(field) for field in (message.content, message.reasoning)
    )
    thinks = message.role == "assistant" and isinstance(message.content, str) and "think" in message.content
    calls = min(len(message.tool_calls), 2)
    return message.role, content, thought, thinks, calls, message.name is None, late, _shows(message)


def _refers_to_itself(messages: Sequence[Message]) -> bool:
    """Whether all calls that results refer to are in a short conversation."""
    calls = {call.id for message in messages for call in message.tool_calls}
    return all(message.tool_call_id in calls for message in messages if message.tool_call_id is not None)


def names_of(messages: Iterable[Message]) -> Iterator[tuple[str | None, str]]:
    return ((call.id, call.name) for message in messages for call in message.tool_calls)


def common_prefix_length(one: str, other: str) -> int:
    """Return the number of leading characters that two texts share."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def shared_end(one: str, other: str) -> int:
    """Return the number of trailing characters that two texts share."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one.endswith(other[len(other) - middle :]):
            low = middle
        else:
            high = middle - 1
    return low
