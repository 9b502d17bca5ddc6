"""Prompts that are known: a conversation that goes on costs what is new in it, not what it has become.

An agent asks a hundred times with the same messages and two more. To render them all each time, to escape and
to split them and to encode them, costs more with every turn. So the prompts of lately are kept, each with its
messages, and where a request goes on from one of them only a short conversation is rendered (short.py).

That is right for templates that write a message without a look at what is far from it, but for a number. A
template that compares places or counts of messages with a number is not taken (`counts_messages`), nor is one
that gives anything else for a few conversations that are tried first (`KnownPrompts.fits`).

Ids are kept up to a control token: no tokenizer joins anything across one.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias

import msgspec
from jinja2 import nodes
from msgspec import Struct, field
from msgspec.structs import replace

from dragoman.errors import BadRequest, TemplateError
from dragoman.lately import Lately
from dragoman.media import MediaSpan
from dragoman.prompt.encode import Encoded, MessageChain
from dragoman.prompt.short import LEAST_TAIL, Render, Rendering, Short, names_of, shared_start, shorten
from dragoman.prompt.sight import strip_media
from dragoman.prompt.traits import TRIAL_TOOLS, counts_messages, trial_messages
from dragoman.types import Conversation, Message, Traced

if TYPE_CHECKING:
    from dragoman.prompt.seams import GoneOn

MOST_CHARS = 48 * 1024 * 1024
"""Characters of texts that are kept, those of messages and of prompts, and ids."""
LEAST_KEPT = 8 * 1024
"""Characters of a prompt that is kept. To encode a shorter one again costs little."""
LEAST_CHARS = 48 * 1024
"""A shorter prompt is rendered as a whole, unless its template was tried: that would cost more."""
NEW = 12
"""Messages that may come with a turn."""
UNSETTLED = 256
"""Characters at the end of a prompt, which ask for an answer: mostly others stand there next time."""

_encode = msgspec.msgpack.Encoder().encode
to_bytes = partial(str.encode, encoding="utf-8", errors="surrogatepass")


class KeptTurns(Protocol):
    """The turns that are kept."""

    def answers(self, chain: bytes, salt: str) -> Sequence[Traced]: ...

    def begins(self, turn: Traced, text: str, salt: str) -> int | None: ...

    def same_frame(self, turn: Traced, frame: bytes) -> bool: ...


class Joint(NamedTuple):
    """A place in a prompt from which on it can be encoded by itself."""

    chars: int
    """Before it in the text that was rendered, with its marks."""
    plain: int
    """Without these."""
    ids: int
    number: int
    """Of the first message behind it that has to be looked at."""
    margin: int = 0
    """Characters behind it that must be the same, too."""


Split: TypeAlias = Literal["", "client", "end", "template", "tools", "unknown"]
"""Why a prompt does not go on from all ids of the answer before it, if it does not: the client has changed
what was said; the template writes another end, or something else, for it; tools or variables of the template
are others; or those ids are not known."""


class Stitched(Struct, frozen=True):
    text: str
    ids: tuple[int, ...]
    after: "GoneOn | None"
    split: Split = ""


class StitchedIds(Struct, frozen=True):
    """The ids of a prompt in which those of answers were kept (seams.py)."""

    ids: tuple[int, ...]
    text: str
    cuts: tuple[Joint, ...]
    media: tuple[MediaSpan, ...] = ()

    def upto(self, chars: int) -> "StitchedIds":
        """For a text that has so many characters in common with this one."""
        return replace(self, cuts=tuple(cut for cut in self.cuts if cut.chars + cut.margin <= chars))


class HashedText(Struct, frozen=True):
    """A text, and the state of its hash up to a place near its end: what goes on from it is added there."""

    text: str
    settled: int
    state: blake2b

    @classmethod
    def of(cls, text: str, state: blake2b, before: "HashedText | None") -> "HashedText":
        """`state` is that of no text."""
        done = 0
        if before is not None and text.startswith(before.text[: before.settled]):
            state, done = before.state.copy(), before.settled
        settled = max(done, len(text) - UNSETTLED)
        state.update(to_bytes(text[done:settled]))
        return cls(text, settled, state)

    def digest(self) -> bytes:
        state = self.state.copy()
        state.update(to_bytes(self.text[self.settled :]))
        return state.digest()


class KnownPrompt(Struct):
    conversation: Conversation
    rendering: Rendering
    names: dict[str | None, str]
    """Of the calls in it, by their ids."""
    chain: MessageChain
    """Of its messages, or of a beginning: that of a short one is made when it is needed."""
    short: Short | None = None
    encoded: Encoded | None = None
    stitched: StitchedIds | None = None
    hashed: HashedText | None = None
    fenced: "dict[bool, KnownPrompt]" = field(default_factory=dict)
    """The same with fences, by how careful these were set, or those that it goes on from."""

    @property
    def weight(self) -> int:
        # With as many ids as there may be: they are made later.
        return self.rendering.chars + 4 * len(self.rendering.text)

    def hash(self, text: str, state: blake2b) -> bytes:
        """The digest of what the engine is given as text; `state` is that of no text."""
        self.hashed = HashedText.of(text, state, self.hashed)
        return self.hashed.digest()

    def keep(self, before: "KnownPrompt", chars: int) -> None:
        """The ids of another one that has so many characters in common."""
        self.hashed = before.hashed
        self.encoded = before.encoded and before.encoded.upto(chars)
        self.stitched = before.stitched and before.stitched.upto(chars)

    def fence(self, careful: bool, render: Render) -> "KnownPrompt":
        """The same with fences, which `render` sets."""
        before = self.fenced.get(careful)
        made = before and extend(before, self.conversation, render)
        self.fenced[careful] = made or _whole(self.conversation, render(self.conversation))
        return self.fenced[careful]


def _in_a_thread(call: Callable[[], None]) -> None:
    threading.Thread(target=call, name="dragoman-try", daemon=True).start()


class KnownPrompts:
    """The prompts of lately. Threads may share it."""

    def __init__(
        self,
        most_chars: int = MOST_CHARS,
        least_chars: int = LEAST_CHARS,
        try_by: Callable[[Callable[[], None]], None] = _in_a_thread,
    ) -> None:
        """`try_by` has a template tried."""
        self._try_by = try_by
        self._kept = Lately[KnownPrompt](most_chars)
        self._least = least_chars
        self._fits: dict[str | None, bool] = {}

    def render(
        self, conversation: Conversation, owner: str, render: Render, tree: nodes.Template
    ) -> KnownPrompt:
        """With what `render(conversation)` gives."""
        before = self.find(conversation, owner) if _may_go_on(conversation) else None
        made = None
        if before is not None and self._may_extend(before) and self.fits(conversation.template, render, tree):
            made = extend(before, conversation, render)
        if made is None:
            return self.keep(conversation, owner, render(conversation))
        self._put(owner, made, before)
        return made

    def keep(self, conversation: Conversation, owner: str, rendering: Rendering) -> KnownPrompt:
        """One that was rendered as a whole, with the ids of what is known of it."""
        made = _whole(conversation, rendering)
        if _may_go_on(conversation):
            before = self.find(conversation, owner)
            if before is not None and before.rendering.mark == rendering.mark:
                made.keep(before, shared_start(before.rendering.text, rendering.text))
            self._put(owner, made, before)
        return made

    def _put(self, owner: str, made: KnownPrompt, before: KnownPrompt | None) -> None:
        """Of a conversation the last one is kept."""
        if len(made.rendering.text) < min(LEAST_KEPT, self._least):
            return
        if made.conversation.media:
            # It may be kept for long.
            told = strip_media(made.conversation.media)
            made.conversation = replace(made.conversation, media=told)
        self._kept.put(owner, _key_of(made), made, made.weight, before and _key_of(before))

    def find(self, conversation: Conversation, owner: str) -> KnownPrompt | None:
        """The longest that this one goes on from."""
        if owner not in self._kept:
            return None
        messages = conversation.messages
        for count in range(len(messages), max(0, len(messages) - NEW), -1):
            known = self._kept.get(owner, _key(conversation, count))
            if known is not None and _goes_on(known.conversation, conversation):
                return known
        return None

    def _may_extend(self, known: KnownPrompt) -> bool:
        return len(known.rendering.text) >= self._least or known.conversation.template in self._fits

    def fits(self, name: str | None, render: Render, tree: nodes.Template) -> bool:
        """Whether short conversations give what whole ones do, found out once for a template.

        That takes as long as some turns of a long conversation, so none of them waits for it.
        """
        if name not in self._fits:
            self._fits[name] = False
            self._try_by(partial(self._try, name, render, tree))
        return self._fits[name]

    def _try(self, name: str | None, render: Render, tree: nodes.Template) -> None:
        # Limits may be smaller than what it is tried with.
        with suppress(BadRequest):
            self._fits[name] = not counts_messages(tree) and all(map(_tried(render), trial_messages()))


def _whole(conversation: Conversation, rendering: Rendering) -> KnownPrompt:
    """One of which nothing was known."""
    messages = conversation.messages
    return KnownPrompt(conversation, rendering, dict(names_of(messages)), MessageChain().upto(messages))


def _may_go_on(conversation: Conversation) -> bool:
    plain = not (conversation.continue_final_message or conversation.response_prefix)
    return plain and conversation.add_generation_prompt and bool(conversation.messages)


def _key(conversation: Conversation, count: int) -> tuple[Any, ...]:
    messages = conversation.messages
    return count, hash(_encode((messages[0], messages[count - 1]))), conversation.template


def _key_of(prompt: KnownPrompt) -> tuple[Any, ...]:
    return _key(prompt.conversation, len(prompt.conversation.messages))


def _goes_on(known: Conversation, now: Conversation) -> bool:
    """Of what is shown, digests are compared, and how closely it is to be looked at."""
    count, none = len(known.messages), dict[str, Any](messages=(), media={}, places={})
    same = known.messages == now.messages[:count] and replace(known, **none) == replace(now, **none)
    details = ((each.detail, now.media.get(digest)) for digest, each in known.media.items())
    return same and all(shown is not None and shown.detail == detail for detail, shown in details)


def extend(known: KnownPrompt, now: Conversation, render: Render) -> KnownPrompt | None:
    """The known prompt with what is new; None where the whole has to be rendered."""
    before = known.conversation.messages
    new = now.messages[len(before) :]
    names = dict(names_of(new))
    if any(known.names.get(id_, name) != name for id_, name in names.items()):
        return None
    try:
        short = known.short
        if short is None or not short.serves(now, len(before), names.values()):
            short = shorten(known.conversation, known.rendering, short, names.values(), render)
        more = short.go_on(before, now, render) if short else None
    except TemplateError:
        # It may be what was left out that is missed, or else the whole is refused, too.
        return None
    if more is None or more.mark != known.rendering.mark:
        return None
    kept = len(known.rendering.text) - more.instead_of
    text = known.rendering.text[:kept] + more.text
    whole = Rendering(text, more.mark, known.rendering.chars + more.chars, known.rendering.order + more.order)
    messages = before + new
    chain, whole_now = known.chain.upto(messages), replace(now, messages=messages)
    made = KnownPrompt(whole_now, whole, known.names | names, chain, more.short, fenced=dict(known.fenced))
    made.keep(known, kept)
    return made


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
