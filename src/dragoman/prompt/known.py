"""Prompts that are known: a conversation that goes on costs what is new in it, not what it has become.

An agent asks a hundred times with the same messages and two more. To render them all each time, to escape and
to split them and to encode them, costs more with every turn. So the prompts of lately are kept, each with its
messages, and where a request goes on from one of them only a short conversation is rendered:

    the messages         head  middle ............  tail  new
    known, as text       HHHH  MMMMMMMMMMMMMMMMMMM  TTTT  g       g: what asks for an answer
    short, before        HHHH                       TTTT  g       `Short`
    short, now           HHHH                       TTTT  NNNN g  the one rendering that is made
    the prompt now       HHHH  MMMMMMMMMMMMMMMMMMM  TTTT  NNNN g  = known up to the change, and the new end

That is right for templates that write a message without a look at what is far from it. What they do look at
is kept in the short conversation: what comes first, the last user's message with what stands around it,
those tools that are called, and in the same places (before the last user's message or after it) a message of
every shape that was left out.
What would tell that a template is not of that kind leads back to the whole rendering:

- the short text before must be the known text with parts left out, which a template that counts, numbers or
  alternates does not give;
- the short text now must be that of before up to the end of what was known: a template that writes old
  messages differently once something new is there (most drop reasoning when a user speaks) does so here, too;
- a template that compares places or counts of messages with a number is not taken (`counts_messages`), nor is
  one that gives anything else for a few conversations that are tried first (`KnownPrompts.fits`).

Ids are kept up to a control token: no tokenizer joins anything across one.
"""

import itertools
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import msgspec
from jinja2 import nodes
from msgspec import Struct, field
from msgspec.structs import replace

from dragoman.errors import TemplateError
from dragoman.prompt.encode import Encoded, MessageChain
from dragoman.prompt.traits import TRIAL_TOOLS, counts_messages, trial_messages
from dragoman.types import Conversation, Message

MOST_CHARS = 48 * 1024 * 1024
"""Characters of texts that are kept, those of messages and of prompts, and ids."""
LEAST_CHARS = 48 * 1024
"""A shorter prompt is rendered as a whole: that costs less than to try its template would."""
NEW = 12
"""Messages that may come with a turn."""
LEAST_TAIL, MOST_TAIL = 8, 20
"""Messages at the end that a short conversation has."""
LEAST_LEFT_OUT = 4
"""With fewer messages in the middle, nothing is won."""
LEAST_MESSAGES = LEAST_TAIL + LEAST_LEFT_OUT
LONGEST_USE = MOST_TAIL - LEAST_TAIL
"""Messages that may be added to a short conversation before it is made anew."""

_encode = msgspec.msgpack.Encoder().encode


class Rendering(Struct, frozen=True):
    """What a template writes for a conversation."""

    text: str
    """With marks in it."""
    mark: str
    chars: int
    """Of what was rendered; that of two conversations differs by what one has more."""
    order: tuple[tuple[str, bool], ...] = ()
    """Where there are fences: the roles of the messages, and which of them have some."""


Render: TypeAlias = Callable[[Conversation], Rendering]
"""Renders all of a conversation."""


class Short(Struct, frozen=True):
    """A conversation without its middle."""

    places: tuple[int, ...]
    """The messages of the known one that are in it, by their numbers."""
    tools: tuple[dict[str, Any], ...]
    """Those that are called in it."""
    last: Message
    made_at: int
    """Messages of the known one when it was made."""
    rendering: Rendering
    tail: int
    """Characters at its end that are those of the known text, too."""

    @property
    def settled(self) -> int | None:
        """Characters up to the end of what the last message says; None where it is not to be found.

        What follows there asks for an answer, and is another text once that is given.
        """
        words = _WORD.findall(_last_text(self.last)[-LAST_WORDS:])
        found = self.rendering.text.rfind(words[-1]) if words else -1
        return found + len(words[-1]) if found >= len(self.rendering.text) - self.tail else None


class KnownPrompt(Struct):
    conversation: Conversation
    rendering: Rendering
    names: dict[str | None, str]
    """Of the calls in it, by their ids."""
    chain: MessageChain
    short: Short | None = None
    encoded: Encoded | None = None
    fenced: "dict[bool, KnownPrompt]" = field(default_factory=dict)
    """The same with fences, by how careful these were set, or those that it goes on from."""

    @property
    def weight(self) -> int:
        ids = len(self.encoded.ids) * 8 if self.encoded else 0
        return self.rendering.chars + 2 * len(self.rendering.text) + ids

    def fence(self, careful: bool, render: Render) -> "KnownPrompt":
        """The same with fences, which `render` sets."""
        before = self.fenced.get(careful)
        made = before and extend(before, self.conversation, render)
        self.fenced[careful] = made or _whole(self.conversation, render(self.conversation))
        return self.fenced[careful]


class KnownPrompts:
    """The prompts of lately. Threads may share it; of the owner with the most the least lately used go."""

    def __init__(self, most_chars: int = MOST_CHARS, least_chars: int = LEAST_CHARS) -> None:
        self._most, self._least = most_chars, least_chars
        self._kept: dict[str, OrderedDict[tuple[Any, ...], KnownPrompt]] = {}
        self._weights: Counter[str] = Counter()
        self._fits: dict[str | None, bool] = {}
        self._lock = threading.Lock()

    def render(
        self, conversation: Conversation, owner: str, render: Render, tree: nodes.Template
    ) -> KnownPrompt:
        """With what `render(conversation)` gives."""
        if not _may_go_on(conversation):
            return _whole(conversation, render(conversation))
        before = self.find(conversation, owner)
        made = None
        if before is not None and self.fits(conversation.template, render, tree):
            made = extend(before, conversation, render)
        if made is None:
            made = _whole(conversation, render(conversation))
        if len(made.rendering.text) >= self._least:
            self._put(made, owner, before)
        return made

    def find(self, conversation: Conversation, owner: str) -> KnownPrompt | None:
        """The longest that this one goes on from."""
        mine = self._kept.get(owner)
        if not mine:
            return None
        messages = conversation.messages
        for count in range(len(messages), max(0, len(messages) - NEW), -1):
            known = mine.get(_key(conversation, count))
            if known is not None and _goes_on(known.conversation, conversation):
                return known
        return None

    def fits(self, name: str | None, render: Render, tree: nodes.Template) -> bool:
        """Whether short conversations give what whole ones do, found out once for a template."""
        if name not in self._fits:
            self._fits[name] = not counts_messages(tree) and all(map(_tried(render), trial_messages()))
        return self._fits[name]

    def _put(self, prompt: KnownPrompt, owner: str, before: KnownPrompt | None) -> None:
        """In the place of the one that it goes on from: of a conversation the last one is kept."""
        with self._lock:
            mine = self._kept.setdefault(owner, OrderedDict())
            for each in (before, prompt):
                if each is not None:
                    key = _key(each.conversation, len(each.conversation.messages))
                    gone = mine.pop(key, None)
                    self._weights[owner] -= gone.weight if gone else 0
            mine[key] = prompt
            self._weights[owner] += prompt.weight
            while self._weights.total() > self._most:
                self._drop(max(self._weights, key=self._weights.__getitem__))

    def _drop(self, owner: str) -> None:
        _, gone = self._kept[owner].popitem(last=False)
        self._weights[owner] -= gone.weight
        if not self._kept[owner]:
            del self._kept[owner], self._weights[owner]


def _whole(conversation: Conversation, rendering: Rendering) -> KnownPrompt:
    """One of which nothing was known."""
    messages = conversation.messages
    return KnownPrompt(conversation, rendering, dict(_names(messages)), MessageChain().upto(messages))


def _may_go_on(conversation: Conversation) -> bool:
    plain = not (conversation.continue_final_message or conversation.response_prefix)
    return plain and conversation.add_generation_prompt and bool(conversation.messages)


def _key(conversation: Conversation, count: int) -> tuple[Any, ...]:
    messages = conversation.messages
    return count, hash(_encode((messages[0], messages[count - 1]))), conversation.template


def _goes_on(known: Conversation, now: Conversation) -> bool:
    count = len(known.messages)
    return known.messages == now.messages[:count] and replace(known, messages=()) == replace(now, messages=())


# A conversation without its middle


def extend(known: KnownPrompt, now: Conversation, render: Render) -> KnownPrompt | None:
    """The known prompt with what is new; None where the whole has to be rendered."""
    count = len(known.conversation.messages)
    new = now.messages[count:]
    names = dict(_names(new))
    if any(known.names.get(id_, name) != name for id_, name in names.items()):
        return None
    try:
        short = known.short
        called = _called_tools(now.tools, new)
        if short is None or count > short.made_at + LONGEST_USE or any(t not in short.tools for t in called):
            short = _shorten(known, new, render)
        if short is None or not _is_whole(known.conversation, short.places, new):
            return None
        few = tuple(known.conversation.messages[place] for place in short.places)
        rendering = render(replace(now, messages=few + new, tools=short.tools))
    except TemplateError:
        # It may be what was left out that is missed, or else the whole is refused, too.
        return None
    same = _settled(known.rendering, short, rendering)
    if same is None:
        return None
    before = short.rendering
    kept = len(known.rendering.text) - (len(before.text) - same)
    text = known.rendering.text[:kept] + rendering.text[same:]
    chars = known.rendering.chars + rendering.chars - before.chars
    order = known.rendering.order + rendering.order[len(before.order) :]
    whole = Rendering(text, rendering.mark, chars, order)
    messages = known.conversation.messages + new
    head = len(before.text) - short.tail
    places = (*short.places, *range(count, len(messages)))
    longer = Short(places, short.tools, messages[-1], short.made_at, rendering, len(rendering.text) - head)
    encoded = known.encoded and known.encoded.upto(kept)
    whole_now = replace(now, messages=messages)
    more = longer, encoded, dict(known.fenced)
    return KnownPrompt(whole_now, whole, known.names | names, known.chain.upto(messages), *more)


def _settled(known: Rendering, short: Short, now: Rendering) -> int | None:
    """How many characters are as they were; None where that is not all that was known."""
    before, settled = short.rendering, short.settled
    same = shared_start(before.text, now.text)
    if not before.mark == now.mark == known.mark or settled is None or same < settled:
        return None
    return same


def _shorten(known: KnownPrompt, new: Sequence[Message], render: Render) -> Short | None:
    whole = known.conversation
    places = _places(whole.messages)
    if places is None:
        return None
    few = tuple(whole.messages[place] for place in places)
    tools = _called_tools(whole.tools, [*few, *new]) or whole.tools[:1]
    made = render(replace(whole, messages=few, tools=tools))
    end = shared_end(made.text, known.rendering.text)
    # The head, what is kept of the middle, and each of the tools, which may stand wherever they like.
    runs = 1 + sum(after != before + 1 for before, after in itertools.pairwise(places)) + len(tools)
    if not _is_part(made.text[: len(made.text) - end], known.rendering.text, runs):
        return None
    return Short(places, tools, whole.messages[-1], len(whole.messages), made, end)


def _called_tools(
    tools: tuple[dict[str, Any], ...], messages: Iterable[Message]
) -> tuple[dict[str, Any], ...]:
    names = {name for _, name in _names(messages)}
    return tuple(tool for tool in tools if tool.get("function", tool).get("name") in names)


def _is_part(short: str, whole: str, runs: int) -> bool:
    """Whether a text is made of so many pieces of another one, in their order."""
    at = 0
    for _ in range(runs):
        low, high, found = 0, len(short), at
        while low < high:
            middle = (low + high + 1) // 2
            place = whole.find(short[:middle], at, None if at else middle)
            low, high, found = (middle, high, place) if place >= 0 else (low, middle - 1, found)
        short, at = short[low:], found + low
    return not short


def _places(messages: Sequence[Message]) -> tuple[int, ...] | None:
    """The numbers of those that a short conversation has; None where it would not be short."""
    roles = [message.role for message in messages]
    count = len(roles)
    if count < LEAST_MESSAGES or not {"assistant", "user"} <= {*roles}:
        return None
    head = _after_results(roles, roles.index("assistant") + 1)
    user = count - 1 - roles[::-1].index("user")
    asked = range(user - (roles[user - 1] == "assistant"), _after_results(roles, user + 2))
    shapes = [_shape(message, place > user) for place, message in enumerate(messages)]
    for tail in range(count - LEAST_TAIL, max(head, count - MOST_TAIL), -1):
        if roles[tail - 1 : tail + 1] != roles[head - 1 : head + 1]:
            continue
        places = {*range(head), *asked, *range(tail, count)}
        known = {shapes[place] for place in places}
        for place in range(tail - 1, head - 1, -1):
            if shapes[place] not in known:
                places.update(_round(roles, place))
                known.update(shapes[each] for each in _round(roles, place))
        kept = sorted(places)
        if count - len(kept) >= LEAST_LEFT_OUT and _joins(roles, kept):
            return tuple(kept)
    return None


def _joins(roles: Sequence[str], places: Sequence[int]) -> bool:
    """Whether what stands side by side in a short conversation has such neighbours in the whole one, too."""
    return all(
        after == before + 1 or roles[before : before + 2] == roles[after - 1 : after + 1]
        for before, after in itertools.pairwise(places)
    ) and not any(roles[place] in _SYSTEM for place in {*range(len(roles))} - {*places})


def _round(roles: Sequence[str], place: int) -> range:
    """A message, with the calls that it is the result of and with their other results."""
    start = place
    while roles[start] in _RESULTS and start:
        start -= 1
    return range(start, _after_results(roles, start + 1))


_WORD = re.compile(r"\w+")
LAST_WORDS = 256
"""Characters in which the last word of a message is looked for."""


def _last_text(message: Message) -> str:
    if isinstance(message.content, str):
        return message.content
    texts = [part.get("text") for part in message.content or ()]
    return next((text for text in reversed(texts) if isinstance(text, str)), "")


_SYSTEM = ("system", "developer")
_RESULTS = ("tool", "function")


def _after_results(roles: Sequence[str], place: int) -> int:
    """The first number from this one on that is not of what a tool says."""
    while place < len(roles) and roles[place] in _RESULTS:
        place += 1
    return min(place, len(roles))


def _shape(message: Message, late: bool) -> tuple[Any, ...]:
    """What a template may go by when it writes one message in another way than the next."""
    content, thought = (type(each) if each else repr(each) for each in (message.content, message.reasoning))
    thinks = message.role == "assistant" and isinstance(message.content, str) and "think" in message.content
    calls = min(len(message.tool_calls), 2)
    return message.role, content, thought, thinks, calls, message.name is None, late


def _is_whole(known: Conversation, places: Iterable[int], new: Sequence[Message]) -> bool:
    """Whether all that stands in a short conversation is there that something in it refers to."""
    if any(message.role in _SYSTEM for message in new):
        return False
    messages = [*(known.messages[place] for place in places), *new]
    calls = {call.id for message in messages for call in message.tool_calls}
    return all(message.tool_call_id in calls for message in messages if message.tool_call_id is not None)


def _names(messages: Iterable[Message]) -> Iterator[tuple[str | None, str]]:
    return ((call.id, call.name) for message in messages for call in message.tool_calls)


def shared_start(one: str, other: str) -> int:
    """How many characters two texts begin with in common."""
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
    """How many characters two texts end with in common."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one.endswith(other[len(other) - middle :]):
            low = middle
        else:
            high = middle - 1
    return low


# A template that is tried


def _tried(render: Render) -> Callable[[Sequence[Message]], bool]:
    """Whether a conversation that grows is rendered as it is when it is rendered as a whole."""

    def tried(messages: Sequence[Message]) -> bool:
        known: KnownPrompt | None = None
        for count in range(LEAST_TAIL * 2, len(messages) + 1):
            if messages[count - 1].role == "assistant":
                continue
            now = Conversation(messages=tuple(messages[:count]), tools=TRIAL_TOOLS)
            try:
                whole = render(now)
            except TemplateError:
                known = None
                continue
            short = known and extend(known, now, render)
            if short and short.rendering != whole:
                return False
            known = short or _whole(now, whole)
        return True

    return tried
