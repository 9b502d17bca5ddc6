"""Thoughts that are given back: the reasoning of earlier answers, for clients that do not send it again.

The problem. A model that thinks between its calls needs, at each of them, what it thought before. Chat
templates have a place for it, but clients of Chat Completions have no field for it that all of them keep:
most send an answer back without its reasoning. Such a model begins to think anew after each result.

The cure. What was thought is remembered here, answer by answer, and is put into the messages of the next
request before the template sees them. The prompt is the one that it would be had the client sent it.

When an answer is recognised. One of two things must hold, else the message stays as it is:

1. Its calls have ids that this server made (96 random bits), and the names and arguments of these calls, and
   the text if there is one, are what was said. Whatever became of the messages before it, it is this answer.
2. Its text and its calls are what was said, and so is every message before it. Text alone is never enough:
   two conversations may both have "Yes." as an answer. Ids that a model writes itself
   (`functions.look:0`) are the same in every conversation, so they count for nothing.

JSON is compared as values, and text without its spaces: clients trim it. Reasoning is no part of what is
compared. A client that sends reasoning is believed, and what it sent stays.

Whose thoughts. They are found by hashes, of which a client's key and its `cache_salt` are a part, so nobody
is given those of others. There is room for so many thoughts and so many bytes; where it is full, the client's
key with the most loses its least lately used.
"""

import itertools
import json
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Container, Hashable, Sequence
from functools import cache, partial
from hashlib import blake2b
from sys import getsizeof
from typing import TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from dragoman.lately import Lately
from dragoman.prompt.encode import MessageChain, chain_messages, meaning_of
from dragoman.turns.reading import INPUT
from dragoman.turns.spec import TurnSpec
from dragoman.types import Conversation, Message, Prompt, Restoring, Saying, ToolCall

MOST_CHARS = 32 * 1024 * 1024
"""Of conversations that were given their thoughts lately."""
LEAST_KEPT = 12
"""Messages of one that is kept."""
OVERHEAD = 1024
"""Bytes that a thought takes beside its text."""
_MADE_HERE = re.compile(r"call_[0-9a-f]{24}")
"""Ids that a model does not write, but in copying one."""


class Thought(Struct, frozen=True, kw_only=True):
    """What was thought before one answer."""

    runs: tuple[str, ...]
    """In the order in which they were thought; something else was said between two of them."""
    tokens: int
    said: "SaidAloud"
    call_ids: tuple[str, ...]
    ids: tuple[int, ...]
    """The whole answer, as it was sampled; empty where the engine speaks text."""
    source: str
    """The answer, by its id."""
    owner: str
    keys: tuple[bytes, ...]
    """By which it is found."""
    number: int

    @property
    def size(self) -> int:
        parts = (self.said.text, *(part for call in self.said.calls for part in call), *self.runs)
        return OVERHEAD + sum(map(getsizeof, parts)) + 8 * len(self.ids)


Given: TypeAlias = list[tuple[str, int]]
"""Thoughts that one conversation was given, with their tokens, in the order of its messages."""


class Restored(Struct, frozen=True, kw_only=True):
    """A conversation that was given its thoughts. One that goes on from it asks for what is new."""

    told: tuple[Message, ...] = ()
    made: tuple[Message, ...] = ()
    given: Given
    chain: MessageChain
    ids: frozenset[str | None] = frozenset()
    """Of the calls."""
    terms: tuple[Restoring | None, str, int]
    """How it was asked for, and how many thoughts had been dropped by then."""
    missing: tuple[bytes, ...] = ()
    """Keys of thoughts that there were none of."""
    chars: int = 0


class Thoughts:
    """Threads may share it."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._found: dict[bytes, Thought] = {}
        self._of: dict[str, OrderedDict[int, Thought]] = {}
        """By owner, the least lately used first."""
        self._bytes: Counter[str] = Counter()
        self._number = 0
        self._dropped = 0
        self._keys = itertools.count()
        self._restored_lately = Lately[Restored](MOST_CHARS)
        self.count = 0
        """How many there are."""
        self._lock = threading.Lock()

    def restore(self, spec: TurnSpec) -> tuple[TurnSpec, list[Given]]:
        """What was asked, with the thoughts that are missing; and for each prompt what was given to it."""
        restored = [self._restored(told, spec) for told in spec.prompts]
        given = [given for _, given in restored]
        return replace(spec, prompts=tuple(told for told, _ in restored)) if any(given) else spec, given

    def _restored(self, told: Prompt, spec: TurnSpec) -> tuple[Prompt, Given]:
        if not isinstance(told, Conversation) or not (wanted := _wanted(told, spec.restore_reasoning)):
            return told, []
        terms = (spec.restore_reasoning, spec.between_thoughts, self._dropped)
        key, before = self._find_restored(told, spec, terms)
        count = len(before.told)
        messages, given = [*before.made, *told.messages[count:]], [*before.given]
        copied = _copied_ids(messages)
        # Mostly the ids of calls are enough, and no message before them has to be looked at.
        chained = cache(partial(before.chain.upto, told.messages[: wanted[-1]]))
        missing = [*before.missing]
        for number in wanted:
            if number < count:
                continue
            said = _said(messages[number])
            found = self._find_call(messages[number], said, spec.salt, copied)
            if found is None:
                key_of_answer = _answer_key(spec.salt, chained().links[number], said)
                found = self._found.get(key_of_answer)
            if found is None:
                missing += key_of_answer, *_call_keys(spec.salt, messages[number])
            else:
                self._use(found)
                thought = spec.between_thoughts.join(found.runs)
                messages[number] = replace(messages[number], reasoning=thought)
                given.append((thought, found.tokens))
        made = tuple(messages)
        if not copied and len(made) >= LEAST_KEPT:
            chain, new = chained() if chained.cache_info().currsize else before.chain, made[count:]
            now = Restored(
                told=told.messages,
                made=made,
                given=given,
                chain=chain,
                ids=before.ids.union(call.id for message in new for call in message.tool_calls),
                terms=terms,
                missing=tuple(missing),
                chars=before.chars + sum(len(str(message.content)) for message in new),
            )
            self._restored_lately.put(_owner(spec), next(self._keys), now, now.chars, key)
        return replace(told, messages=made), given

    def _find_restored(
        self, told: Conversation, spec: TurnSpec, terms: tuple[Restoring | None, str, int]
    ) -> tuple[Hashable, Restored]:
        """The longest that this one goes on from, as long as nothing new changes what came before it."""
        found = [
            (key, each)
            for key, each in self._restored_lately.all(_owner(spec))
            if each.terms == terms
            and each.told == told.messages[: len(each.told)]
            and self._found.keys().isdisjoint(each.missing)
        ]
        nothing = Restored(given=[], chain=MessageChain(), terms=terms)
        key, before = max(found, key=lambda each: len(each[1].told), default=(None, nothing))
        new = told.messages[len(before.told) :]
        asked = spec.restore_reasoning != "all" and any(message.role == "user" for message in new)
        called = {call.id for message in new for call in message.tool_calls}
        return (key, nothing) if asked or called & before.ids else (key, before)

    def _find_call(
        self, message: Message, said: "SaidAloud", scope: str, copied: frozenset[str | None]
    ) -> Thought | None:
        ids = tuple(call.id or "" for call in message.tool_calls)
        if not ids or ids[0] in copied or not _MADE_HERE.fullmatch(ids[0]):
            return None
        found = self._found.get(_id_key(scope, ids[0]))
        return found if found is not None and _is_of(found, ids, said) else None

    def _use(self, thought: Thought) -> None:
        with self._lock:
            if thought.number in self._of.get(thought.owner, ()):
                self._of[thought.owner].move_to_end(thought.number)

    def add(
        self,
        told: Conversation,
        before: bytes,
        spec: TurnSpec,
        saying: Saying,
        tokens: int,
        ids: tuple[int, ...] = (),
        source: str = "",
    ) -> None:
        """Remembers what was thought for an answer; `before` stands for the messages that it answers."""
        begun = told.messages[-1] if told.continue_final_message else Message(role="assistant")
        said = _said(_message(saying, begun, spec.reading.custom if spec.reading else ()))
        call_ids = tuple(id_ for id_, *_ in saying.calls)
        texts = {said.text, _squeeze(told.response_prefix) + said.text}
        keys = {_answer_key(spec.salt, before, replace(said, text=text)) for text in texts}
        made = {_id_key(spec.salt, id_) for id_ in call_ids if _MADE_HERE.fullmatch(id_)}
        with self._lock:
            # An id that is known is one that the model has copied, unless this is what became of that answer.
            keys |= {key for key in made if self._source(key) in (None, source or None)}
            self._number += 1
            self._keep(
                Thought(
                    runs=tuple(run for run in (begun.reasoning, *saying.runs) if run),
                    tokens=tokens,
                    said=said,
                    call_ids=call_ids,
                    ids=ids,
                    source=source,
                    owner=spec.owner,
                    keys=tuple(keys),
                    number=self._number,
                )
            )

    def add_told(self, spec: TurnSpec, source: str, saying: Saying, tokens: int) -> None:
        """Remembers what a client was told of several turns as one answer to what it asked."""
        (told,) = spec.prompts
        if isinstance(told, Conversation) and spec.remembers and saying.thoughts:
            self.add(told, chain_messages(told.before)[-1], spec, saying, tokens, source=source)

    def lacks(self, spec: TurnSpec) -> bool:
        """Whether there is a call that this server has made an id for, and that is not known."""
        wanted = [
            told.messages[number]
            for told in spec.prompts
            if isinstance(told, Conversation) and spec.remembers
            for number in _wanted(told, spec.restore_reasoning)
        ]
        ids = [message.tool_calls[0].id or "" for message in wanted if message.tool_calls]
        return any(_MADE_HERE.fullmatch(id_) and _id_key(spec.salt, id_) not in self._found for id_ in ids)

    def recall(self, spec: TurnSpec, source: str, message: Message, tokens: int) -> None:
        """A stored answer, whose calls are known by their ids: what it answered is not looked at."""
        said = Saying()
        said.thoughts, said.texts = [[message.reasoning or ""]], [meaning_of(message)[0]]
        said.calls = [(call.id or "", call.name, [call.arguments]) for call in message.tool_calls]
        self.add(Conversation(messages=()), source.encode(), spec, said, tokens, source=source)

    def _source(self, key: bytes) -> str | None:
        return self._found[key].source if key in self._found else None

    def _keep(self, thought: Thought) -> None:
        if thought.size > self._most_bytes:
            return
        older = {id(found): found for key in thought.keys if (found := self._found.get(key))}
        self._found.update(dict.fromkeys(thought.keys, thought))
        self._of.setdefault(thought.owner, OrderedDict())[thought.number] = thought
        self._bytes[thought.owner] += thought.size
        self.count += 1
        for each in older.values():
            if not any(self._found.get(key) is each for key in each.keys):
                self._drop(each)
        while self._bytes.total() > self._most_bytes:
            self._drop_oldest(max(self._bytes, key=self._bytes.__getitem__))
        while self.count > self._most:
            self._drop_oldest(max(self._of, key=lambda owner: len(self._of[owner])))

    def _drop_oldest(self, owner: str) -> None:
        self._drop(next(iter(self._of[owner].values())))

    def _drop(self, thought: Thought) -> None:
        self._dropped += 1
        for key in thought.keys:
            if self._found.get(key) is thought:
                del self._found[key]
        del self._of[thought.owner][thought.number]
        self._bytes[thought.owner] -= thought.size
        self.count -= 1
        if not self._of[thought.owner]:
            del self._of[thought.owner], self._bytes[thought.owner]

    def forget(self, source: str, owner: str = "") -> None:
        """What was thought for an answer that its owner has deleted."""
        with self._lock:
            for thought in [each for each in self._of.get(owner, {}).values() if each.source == source]:
                self._drop(thought)


def _wanted(told: Conversation, restoring: Restoring | None) -> list[int]:
    """The numbers of the messages whose thoughts are missing and wanted."""
    users = (number for number, message in enumerate(told.messages) if message.role == "user")
    first = 0 if restoring == "all" else max(users, default=-1) + 1
    return [
        number
        for number, message in enumerate(told.messages[first:], first)
        if message.role == "assistant"
        and not message.reasoning
        and (message.tool_calls or restoring == "all")
    ]


def _owner(spec: TurnSpec) -> str:
    return f"{spec.owner}\0{spec.salt}"


def tokens_in(text: str, given: Given) -> int:
    """Of thoughts that stand in a prompt: a template that has dropped one has dropped those before it."""
    tokens, end = 0, len(text)
    for thought, count in reversed(given):
        end = text.rfind(thought.strip(), 0, end)
        if end < 0:
            break
        tokens += count
    return tokens


# What answers are compared by.


class SaidAloud(Struct, frozen=True):
    text: str
    """Without spaces."""
    calls: tuple[tuple[str, str], ...]
    """Names and arguments, as JSON that is written in one way."""


def _said(message: Message) -> SaidAloud:
    text, calls = meaning_of(message)
    return SaidAloud(_squeeze(text), tuple(calls))


def _message(saying: Saying, begun: Message, custom: Container[str]) -> Message:
    """An answer as it is sent back: arguments that are a text are told as `{"input": text}` then."""
    calls = [
        ToolCall(
            id=id_, name=name, arguments=_in_json("".join(pieces)) if name in custom else "".join(pieces)
        )
        for id_, name, pieces in saying.calls
    ]
    text = meaning_of(begun)[0] + "".join(saying.texts)
    return Message(role="assistant", content=text, tool_calls=tuple(calls))


def _in_json(text: str) -> str:
    return json.dumps({INPUT: text})


def _is_of(thought: Thought, ids: tuple[str, ...], said: SaidAloud) -> bool:
    """Whether a message is an answer, or the beginning of it: some clients send each call by itself."""
    count = len(ids)
    same = thought.call_ids[:count] == ids and thought.said.calls[:count] == said.calls
    return same and said.text in ("", thought.said.text)


def _copied_ids(messages: Sequence[Message]) -> frozenset[str | None]:
    """Ids that several calls have, because a model has written one that it saw."""
    counts = Counter(call.id for message in messages for call in message.tool_calls)
    return frozenset(id_ for id_, count in counts.items() if count > 1)


def _squeeze(text: str) -> str:
    return "".join(text.split())


def _id_key(scope: str, id_: str) -> bytes:
    return _hashed(scope, "call", id_)


def _call_keys(scope: str, message: Message) -> list[bytes]:
    return [_id_key(scope, call.id) for call in message.tool_calls[:1] if call.id]


def _answer_key(scope: str, before: bytes, said: SaidAloud) -> bytes:
    return _hashed(scope, "answer", before.hex(), said.text, *(part for call in said.calls for part in call))


def _hashed(*parts: str) -> bytes:
    text = "".join(f"{len(part)}:{part}" for part in parts)
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
