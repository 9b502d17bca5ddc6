"""Cache of rendered and encoded prompts: continuing a conversation costs only its new messages.

An agent sends the same messages a hundred times, each time with two more. Rendering, escaping, splitting and
encoding all of them costs more with every turn. Therefore recent prompts are cached with their messages, and
a request that continues one of them renders only a short conversation (abridged.py).

That is correct for templates that write a message independently of distant ones, except for a number.
Templates that compare positions or counts of messages with a number are excluded (`counts_messages`), and so
are those that give a different result for a few trial conversations (`PromptCache.fits`).

Ids are reused up to a control token: no tokenizer merges text across one.
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
from dragoman.media import MediaSpan
from dragoman.owner_cache import OwnerCache
from dragoman.prompt.abridged import (
    LEAST_TAIL,
    AbridgedConversation,
    Render,
    Rendering,
    common_prefix_length,
    names_of,
    shorten,
)
from dragoman.prompt.encode import EncodedText, MessageChain
from dragoman.prompt.media_placeholders import strip_media
from dragoman.prompt.traits import TRIAL_TOOLS, counts_messages, trial_messages
from dragoman.types import Conversation, Message, TurnRecord

if TYPE_CHECKING:
    from dragoman.prompt.token_exact import ContinuedTurn

MOST_CHARS = 48 * 1024 * 1024
"""Maximum size of the cache: characters of messages and prompts, and ids."""
LEAST_KEPT = 8 * 1024
"""Minimum number of characters of a cached prompt. Encoding a shorter one again is cheap."""
LEAST_CHARS = 48 * 1024
"""Shorter prompts are rendered in full, unless their template was tried already:
trying one would cost more.
"""
NEW = 12
"""Maximum number of messages that may be added in a turn."""
UNSETTLED = 256
"""Characters at the end of a prompt that are not hashed in advance: they ask for an answer, and usually
differ next time.
"""

_encode = msgspec.msgpack.Encoder().encode
to_bytes = partial(str.encode, encoding="utf-8", errors="surrogatepass")


class TurnLookup(Protocol):
    """Lookup of kept turns."""

    def find_by_messages(self, chain: bytes, salt: str) -> Sequence[TurnRecord]: ...

    def matching_prefix(self, turn: TurnRecord, text: str, salt: str) -> int | None: ...

    def same_frame(self, turn: TurnRecord, frame: bytes) -> bool: ...


class ResumePoint(NamedTuple):
    """An offset in a prompt from which it can be encoded separately."""

    chars: int
    """Characters before it in the rendered text, with marks."""
    plain: int
    """Characters before it without marks."""
    ids: int
    number: int
    """Number of the first message after it that must be checked."""
    margin: int = 0
    """Characters after it that must be the same, too."""


BreakReason: TypeAlias = Literal["", "client", "end", "template", "tools", "unknown"]
"""Why a prompt does not continue all ids of the answer before it, if it does not: the client changed the
answer; the template ends or writes it differently; tools or template variables changed; or the ids are
unknown.
"""


class TokenExactPrompt(Struct, frozen=True):
    text: str
    ids: tuple[int, ...]
    after: "ContinuedTurn | None"
    split: BreakReason = ""


class TokenExactIds(Struct, frozen=True):
    """Ids of a prompt that reuses the sampled ids of answers (token_exact.py)."""

    ids: tuple[int, ...]
    text: str
    cuts: tuple[ResumePoint, ...]
    media: tuple[MediaSpan, ...] = ()

    def upto(self, chars: int) -> "TokenExactIds":
        """Return the part that is valid for a text with this many leading characters in common."""
        return replace(self, cuts=tuple(cut for cut in self.cuts if cut.chars + cut.margin <= chars))


class HashedText(Struct, frozen=True):
    """A text with the state of its hash up to an offset near its end, so that a longer
    text only adds to it.
    """

    text: str
    settled: int
    state: blake2b

    @classmethod
    def of(cls, text: str, state: blake2b, before: "HashedText | None") -> "HashedText":
        """Hash a text. `state` is the state for the empty text."""
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


class CachedPrompt(Struct):
    conversation: Conversation
    rendering: Rendering
    names: dict[str | None, str]
    """Names of its calls, by id."""
    chain: MessageChain
    """Digests of its messages or of a prefix: those of a short conversation are computed when needed."""
    short: AbridgedConversation | None = None
    encoded: EncodedText | None = None
    stitched: TokenExactIds | None = None
    hashed: HashedText | None = None
    fenced: "dict[bool, CachedPrompt]" = field(default_factory=dict)
    """The same prompt with fences, or one that it continues, by whether fences were set carefully."""

    @property
    def weight(self) -> int:
        # The number of ids is estimated at its maximum: they are made later.
        return self.rendering.chars + 4 * len(self.rendering.text)

    def hash(self, text: str, state: blake2b) -> bytes:
        """Return the digest of the text given to the engine; `state` is the state for the empty text."""
        self.hashed = HashedText.of(text, state, self.hashed)
        return self.hashed.digest()

    def keep(self, before: "CachedPrompt", chars: int) -> None:
        """Take over the ids of another prompt with this many leading characters in common."""
        self.hashed = before.hashed
        self.encoded = before.encoded and before.encoded.valid_for_prefix(chars)
        self.stitched = before.stitched and before.stitched.upto(chars)

    def fence(self, careful: bool, render: Render) -> "CachedPrompt":
        """Return the same prompt with fences, which `render` sets."""
        before = self.fenced.get(careful)
        prompt = before and extend(before, self.conversation, render)
        self.fenced[careful] = prompt or _whole(self.conversation, render(self.conversation))
        return self.fenced[careful]


def _in_a_thread(call: Callable[[], None]) -> None:
    threading.Thread(target=call, name="dragoman-try", daemon=True).start()


class PromptCache:
    """LRU cache of recent prompts. Threads may share it."""

    def __init__(
        self,
        most_chars: int = MOST_CHARS,
        least_chars: int = LEAST_CHARS,
        try_by: Callable[[Callable[[], None]], None] = _in_a_thread,
    ) -> None:
        """`try_by` runs the trial of a template."""
        self._try_by = try_by
        self._kept = OwnerCache[CachedPrompt](most_chars)
        self._least = least_chars
        self._fits: dict[str | None, bool] = {}

    def render(
        self, conversation: Conversation, owner: str, render: Render, tree: nodes.Template
    ) -> CachedPrompt:
        """Return the prompt of a conversation, rendered by `render` or extended from a cached one."""
        before = self.find(conversation, owner) if _may_go_on(conversation) else None
        prompt = None
        if (
            before is not None
            and self._may_extend(before)
            and self.can_abridge(conversation.template, render, tree)
        ):
            prompt = extend(before, conversation, render)
        if prompt is None:
            return self.keep(conversation, owner, render(conversation))
        self._put(owner, prompt, before)
        return prompt

    def keep(self, conversation: Conversation, owner: str, rendering: Rendering) -> CachedPrompt:
        """Cache a prompt that was rendered in full, with the ids of a cached prefix."""
        prompt = _whole(conversation, rendering)
        if _may_go_on(conversation):
            before = self.find(conversation, owner)
            if before is not None and before.rendering.mark == rendering.mark:
                prompt.keep(before, common_prefix_length(before.rendering.text, rendering.text))
            self._put(owner, prompt, before)
        return prompt

    def _put(self, owner: str, prompt: CachedPrompt, before: CachedPrompt | None) -> None:
        """Store a prompt; it replaces the one before it in the same conversation."""
        if len(prompt.rendering.text) < min(LEAST_KEPT, self._least):
            return
        if prompt.conversation.media:
            # Media data is not kept, because the prompt may be cached for long.
            stripped = strip_media(prompt.conversation.media)
            prompt.conversation = replace(prompt.conversation, media=stripped)
        self._kept.put(owner, _key_of(prompt), prompt, prompt.weight, before and _key_of(before))

    def find(self, conversation: Conversation, owner: str) -> CachedPrompt | None:
        """Return the longest cached prompt that this conversation continues."""
        if owner not in self._kept:
            return None
        messages = conversation.messages
        for count in range(len(messages), max(0, len(messages) - NEW), -1):
            known = self._kept.get(owner, _key(conversation, count))
            if known is not None and _goes_on(known.conversation, conversation):
                return known
        return None

    def _may_extend(self, known: CachedPrompt) -> bool:
        return len(known.rendering.text) >= self._least or known.conversation.template in self._fits

    def can_abridge(self, name: str | None, render: Render, tree: nodes.Template) -> bool:
        """Whether short conversations give the same result as full ones; tried once per template.

        The trial takes as long as several turns of a long conversation, so it runs in the background.
        """
        if name not in self._fits:
            self._fits[name] = False
            self._try_by(partial(self._try, name, render, tree))
        return self._fits[name]

    def _try(self, name: str | None, render: Render, tree: nodes.Template) -> None:
        # Limits may be smaller than the trial conversations.
        with suppress(BadRequest):
            self._fits[name] = not counts_messages(tree) and all(map(_tried(render), trial_messages()))


def _whole(conversation: Conversation, rendering: Rendering) -> CachedPrompt:
    """Build a prompt without cached parts."""
    messages = conversation.messages
    return CachedPrompt(conversation, rendering, dict(names_of(messages)), MessageChain().upto(messages))


def _may_go_on(conversation: Conversation) -> bool:
    plain = not (conversation.continue_final_message or conversation.response_prefix)
    return plain and conversation.add_generation_prompt and bool(conversation.messages)


def _key(conversation: Conversation, count: int) -> tuple[Any, ...]:
    messages = conversation.messages
    return count, hash(_encode((messages[0], messages[count - 1]))), conversation.template


def _key_of(prompt: CachedPrompt) -> tuple[Any, ...]:
    return _key(prompt.conversation, len(prompt.conversation.messages))


def _goes_on(known: Conversation, now: Conversation) -> bool:
    """Whether a conversation continues a cached one. Media are compared by digest and detail."""
    count, none = len(known.messages), dict[str, Any](messages=(), media={}, media_params={})
    same = known.messages == now.messages[:count] and replace(known, **none) == replace(now, **none)
    details = ((each.detail, now.media.get(digest)) for digest, each in known.media.items())
    return same and all(shown is not None and shown.detail == detail for detail, shown in details)


def extend(known: CachedPrompt, now: Conversation, render: Render) -> CachedPrompt | None:
    """Extend a cached prompt by the new messages; return None if it must be rendered in full."""
    before = known.conversation.messages
    new = now.messages[len(before) :]
    names = dict(names_of(new))
    if any(known.names.get(id_, name) != name for id_, name in names.items()):
        return None
    try:
        short = known.short
        if short is None or not short.is_reusable(now, len(before), names.values()):
            short = shorten(known.conversation, known.rendering, short, names.values(), render)
        more = short.go_on(before, now, render) if short else None
    except TemplateError:
        # The template may need what was left out, or also refuse the full conversation.
        return None
    if more is None or more.mark != known.rendering.mark:
        return None
    kept = len(known.rendering.text) - more.replaced_chars
    text = known.rendering.text[:kept] + more.text
    whole = Rendering(text, more.mark, known.rendering.chars + more.chars, known.rendering.order + more.order)
    messages = before + new
    chain, whole_now = known.chain.upto(messages), replace(now, messages=messages)
    prompt = CachedPrompt(whole_now, whole, known.names | names, chain, more.short, fenced=dict(known.fenced))
    prompt.keep(known, kept)
    return prompt


# Trial of a template


def _tried(render: Render) -> Callable[[Sequence[Message]], bool]:
    """Return a check that a growing conversation is rendered as it is when rendered in full."""

    def tried(messages: Sequence[Message]) -> bool:
        known: CachedPrompt | None = None
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
