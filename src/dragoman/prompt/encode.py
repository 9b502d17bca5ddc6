"""Encodes text and prompts to token ids: a client's text never becomes a control token, and ids are reused.

Rules of this file:
- a control token comes from the template, or from a raw prompt; never from a message;
- in a client's string that contains a control token's text, a mark (a Unicode noncharacter that occurs
  nowhere else) is inserted after its first character, so that neither template nor tokenizer finds it;
- a string that begins or ends with a part of one gets a mark there, so that adjacent text cannot complete it;
- marks are removed before tokenization, so the ids are those of the exact characters;
- reasoning markers in an assistant's own messages stay: templates look for them, to drop old reasoning;
- what the model itself has sampled keeps its ids (token_exact.py).
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from hashlib import blake2b
from operator import itemgetter
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta, Struct, ValidationError, convert, defstruct, field

from dragoman.engines.contract import raise_on_fault, wrong_ids
from dragoman.engines.protocol import Tokenizer
from dragoman.errors import SUFFIX, BadRequest, ContextOverflow
from dragoman.media import MediaSpan
from dragoman.types import Answer, Conversation, Message, TextPrompt

if TYPE_CHECKING:
    from dragoman.prompt.media_placeholders import MediaPlaceholders

SHORT = 16
"""Maximum number of characters of a text whose ids are cached: templates repeat short texts between control
tokens.
"""
MOST_KEPT = 1024
AT_ONCE = 256 * 1024
BORDERS = 32
"""Maximum number of resume offsets kept, the last ones."""
ResumeOffsets: TypeAlias = list[tuple[int, int]]
"""Offsets after control tokens, as pairs of a character count and an id count."""


def replace_surrogates(text: str) -> str:
    """Return the text with U+FFFD for halves of surrogate pairs, which JSON can contain and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


class EncodedText(Struct, frozen=True):
    """Ids of a text, and offsets from which encoding of a longer text may resume."""

    ids: tuple[int, ...]
    borders: ResumeOffsets
    margin: int
    """Characters of the longest control token: a longer one may begin where a shorter one does."""
    media: tuple[MediaSpan, ...] = ()

    def valid_for_prefix(self, chars: int) -> "EncodedText":
        """Return the part that is valid for a text with this many leading characters in common."""
        borders = [border for border in self.borders if border[0] <= chars - self.margin]
        return EncodedText(self.ids, borders, self.margin, self.media)


class IdInterner:
    """Makes equal ids one object: otherwise a number in a tuple takes five times its space."""

    def __init__(self, size: int) -> None:
        self._all = list(range(size))

    def __call__(self, ids: Sequence[int]) -> tuple[int, ...]:
        try:
            # With two more ids itemgetter always returns a tuple.
            shared: tuple[int, ...] = itemgetter(*ids, 0, 0)(self._all)
            return shared[:-2]
        except IndexError:
            # Some ids are outside the vocabulary.
            return tuple(self._all[id] if id < len(self._all) else id for id in ids)


class PromptEncoder:
    """Encoder for one model's tokenizer and control tokens."""

    def __init__(self, tokenizer: Tokenizer, most: int | None = None) -> None:
        """`most` is the maximum number of ids of any text."""
        self._most = most
        self.special = ControlTokens(tokenizer.special_ids)
        self._tokenizer = tokenizer
        self.share = IdInterner(len(tokenizer.pieces))
        # Some tokenizers encode the first word of a prompt differently from later ones.
        self._encode_on: Callable[[str], list[int]] = getattr(
            tokenizer, "encode_continuation", tokenizer.encode
        )
        self._encode_short = lru_cache(MOST_KEPT)(self._encode_kept)
        self._longest = max(map(len, tokenizer.pieces), default=1) or 1
        self.bos = self._piece(tokenizer.bos_id)
        self.eos = self._piece(tokenizer.eos_id)

    def encode_special(
        self, text: str, mark: str | None = None, *, begins: bool = True, borders: ResumeOffsets | None = None
    ) -> list[int]:
        """Encode a text in which control tokens count as such: `<s>a` gives the id of `<s>` first.

        A text with more than the maximum number of ids is refused early. One that does not `begin` a prompt
        follows other ids. Offsets after control tokens are appended to `borders`.
        """
        ids: list[int] = []
        end = 0
        for id, piece in self.special.split(replace_surrogates(text)):
            end += len(piece)
            if id is not None:
                ids.append(id)
                if borders is not None:
                    borders.append((end, len(ids)))
            elif plain := strip_mark(piece, mark) if mark else piece:
                encode = self._encode_short if len(plain) <= SHORT else self._encode_piece
                encoded = encode(plain, begins and not ids)
                self._check_most(len(ids) + len(encoded))
                # There may be millions of ids; copying them in one call would block other threads.
                for at in range(0, len(encoded), AT_ONCE):
                    ids += encoded[at : at + AT_ONCE]
        return ids

    def encode_on_from(
        self,
        text: str,
        mark: str | None,
        known: EncodedText | None,
        filling: "MediaPlaceholders | None" = None,
    ) -> EncodedText:
        """Encode a text, reusing the ids of its known beginning up to the last border."""
        start, count = known.borders[-1] if known and known.borders else (0, 0)
        items: ResumeOffsets = []
        encode: Callable[..., list[int]] = partial(self.encode_special, mark=mark)
        if filling is not None:
            filling.go_on(known.media if known else (), count)
            encode = partial(filling.encode, encode, count)
        new = encode(text[start:], begins=not count, borders=items)
        self._check_most(count + len(new))
        before, borders = (known.ids[:count], [*known.borders]) if known and count else ((), [])
        borders += [(start + chars, count + ids) for chars, ids in items[-BORDERS:]]
        spans = tuple(filling.spans) if filling else ()
        return EncodedText(before + self.share(new), borders[-BORDERS:], self.special.longest, spans)

    def _encode_piece(self, text: str, begins: bool) -> Sequence[int]:
        ids = self._tokenizer.encode(text) if begins else self._encode_on(text)
        if isinstance(ids, list):
            self._check_most(len(ids))
        return check_encoded(self._tokenizer, ids)

    def _check_most(self, count: int) -> None:
        if self._most is not None and count > self._most:
            raise ContextOverflow(f"The text has more than {self._most} tokens; shorten it.")

    def _encode_kept(self, text: str, begins: bool) -> Sequence[int]:
        return tuple(self._encode_piece(text, begins))

    def encode_text(self, prompt: TextPrompt) -> list[int]:
        """Encode a raw prompt. With a suffix, the model is asked for the text between the two."""
        ids = self.encode_special(prompt.text)
        if prompt.suffix is not None:
            if self._tokenizer.infill is None:
                raise BadRequest(
                    f"This model has no fill-in-the-middle tokens; leave out '{SUFFIX}'.",
                    param=SUFFIX,
                    code="unsupported_field",
                )
            before, after, middle = self._tokenizer.infill
            ids = [before, *ids, after, *self.encode_special(prompt.suffix), middle]
        bos = self._tokenizer.bos_id
        if prompt.add_special_tokens and self._tokenizer.add_bos and bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids

    def check_length(self, prompt: int | Sequence[int], most: int | None, param: str) -> None:
        """Refuse a prompt that must have too many ids, judged by its characters, before it is encoded."""
        if most is None:
            return
        least = prompt // self._longest if isinstance(prompt, int) else len(prompt)
        if least > most:
            more = f"more than {least}" if isinstance(prompt, int) else str(least)
            raise ContextOverflow.of(more, most, param)

    def check_ids(self, ids: Sequence[int], param: str) -> tuple[int, ...]:
        most = len(self._tokenizer.pieces)
        for id in ids:
            if not 0 <= id < most:
                raise BadRequest(
                    f"Token id {id} is not in the vocabulary; ids range from 0 to {most - 1}.",
                    param=param,
                    code="invalid_token_id",
                )
        return tuple(ids)

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self.pieces(ids)).decode("utf-8", "replace")

    def pieces(self, ids: Sequence[int]) -> list[bytes]:
        """Return the bytes of each id."""
        return [self._tokenizer.pieces[id] for id in ids]

    def _piece(self, id: int | None) -> str | None:
        return None if id is None else self._tokenizer.pieces[id].decode("utf-8", "replace")


# Control tokens in text

PIECE = 256 * 1024
"""Characters that are searched in one call: no other thread runs during it."""
_NONCHARACTER = re.compile(r"[\ufdd0-\ufdef]|\\ufd[de]", re.IGNORECASE)
FEW = 8
_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
WORD_JOINER = "\u2060"
_REASONING_MARKER = re.compile(r"[<\[]/?[\w:|]*think\w*[|>\]]+", re.IGNORECASE)


class ControlTokens:
    """Control tokens of a model, for finding and breaking them in text.

    `ControlTokens({"<s>": 1}).split("<s>a")` gives `(1, "<s>")`, then `(None, "a")`.
    """

    def __init__(self, special: Mapping[str, int]) -> None:
        # A mark cannot break a single character, so it cannot be a control token in text.
        self._ids = {text: id for text, id in special.items() if len(text) > 1}
        self.texts = {id: text for text, id in self._ids.items()}
        lower = {text.lower() for text in self._ids}
        self._exact = _Finder(self._ids)
        self._any_case = _Finder(lower)
        self._not_reasoning = _Finder({text for text in lower if not _REASONING_MARKER.fullmatch(text)})
        self.longest = max(map(len, lower), default=0)
        self._heads = {text[:end] for text in lower for end in range(1, len(text))}
        self._tails = {text[start:] for text in lower for start in range(1, len(text))}
        self._edges = _edges(self._heads, self._tails, self.longest)

    def split(self, text: str) -> Iterator[tuple[int | None, str]]:
        """Split a text: yield control tokens with their ids, and text between them with None."""
        done = 0
        for start, end in self._exact.find(text):
            if start > done:
                yield None, text[done:start]
            yield self._ids[text[start:end]], text[start:end]
            done = end
        if done < len(text):
            yield None, text[done:]

    def is_harmless(self, joined: str) -> bool:
        """Whether strings joined by `\\0` certainly contain nothing that is, begins or
        ends a control token.
        """
        joined = f"\0{joined}\0"
        for start in range(0, len(joined), PIECE):
            # A match is no longer than this, so it is fully inside one of the chunks.
            lower = joined[start : start + PIECE + self.longest + 2].lower()
            if self._edges.search(lower) or next(self._any_case.find(lower), None) is not None:
                return False
        return True

    def keep_apart(self, text: str, mark: str) -> str:
        """Return the text without marks, for an engine that takes text instead of ids.

        Where the engine would read a client's words as a control token, a zero-width character is inserted:
        nothing else in a text can prevent that.
        """
        plain = strip_mark(text, mark)
        written, read = (sum(id is not None for id, _ in self.split(version)) for version in (text, plain))
        if written == read:
            return plain
        return text.replace(mark, WORD_JOINER).replace(escape_mark(mark), escape_mark(WORD_JOINER))

    def break_control_tokens(self, value: Any, mark: str, *, assistant: bool = False) -> Any:
        """Return plain data in which the mark breaks the text of every control token."""
        if isinstance(value, str):
            return self._shield_text(value, mark, assistant)
        if isinstance(value, dict):
            return {
                self._shield_text(key, mark, False): self.break_control_tokens(
                    member, mark, assistant=assistant
                )
                for key, member in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self.break_control_tokens(item, mark, assistant=assistant) for item in value]
        return value

    def _shield_text(self, text: str, mark: str, assistant: bool) -> str:
        lower = _lower(text)
        finder = self._not_reasoning if assistant else self._any_case
        cuts = [start + 1 for start, _ in finder.find(lower, overlapping=True)]
        if self._edges.search(f"\0{lower}\0"):
            if any(lower[:end] in self._tails for end in range(1, self.longest)):
                cuts.insert(0, 0)
            if any(lower[-size:] in self._heads for size in range(1, self.longest)):
                cuts.append(len(text))
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        return mark.join(pieces)


class _Finder:
    """Finds the longest of many texts at each offset.

    It indexes them by their first three characters, because some models have thousands of control tokens, and
    a pattern of all takes seconds to compile.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = frozenset(texts)
        sizes: dict[str, set[int]] = {}
        for text in self._texts:
            sizes.setdefault(text[:3], set()).add(len(text))
        self._sizes = {start: sorted(each, reverse=True) for start, each in sizes.items()}
        starts = sorted(self._sizes, key=len, reverse=True)
        self._start = re.compile("|".join(map(re.escape, starts)) or r"(?!)")

    def find(self, text: str, *, overlapping: bool = False) -> Iterator[tuple[int, int]]:
        """Yield start and end of each match."""
        offset = 0
        while candidate := _search(self._start, text, offset):
            start = candidate.start()
            end = self._end(text, start, candidate.group())
            if end is None:
                offset = start + 1
            else:
                yield start, end
                offset = start + 1 if overlapping else end

    def _end(self, text: str, start: int, head: str) -> int | None:
        # A two-character token may be the start of a longer one that is not there.
        for known in (head, head[:2]):
            for length in self._sizes.get(known, ()):
                if text[start : start + length] in self._texts:
                    return start + length
        return None


def _search(pattern: re.Pattern[str], text: str, offset: int = 0) -> re.Match[str] | None:
    """Apply `pattern.search` in chunks, for patterns that match a few characters."""
    while offset < len(text):
        if match := pattern.search(text, offset, offset + PIECE + FEW):
            return match
        offset += PIECE
    return None


def choose_marks(text: str, count: int) -> list[str]:
    """Return noncharacters that do not occur in the text, neither directly nor escaped in JSON."""
    if (text.isascii() and "\\" not in text) or not _search(_NONCHARACTER, text):
        return _NONCHARACTERS[:count]
    lower = text.lower()
    return [mark for mark in _NONCHARACTERS if mark not in text and escape_mark(mark) not in lower][:count]


def strip_mark(text: str, mark: str) -> str:
    """Return the text without marks; `tojson(ensure_ascii=true)` writes them as escapes."""
    return text.replace(mark, "").replace(escape_mark(mark), "")


def join_strings(*values: Any) -> str:
    """Join all strings in plain data, including keys, with `\\0` between them."""
    texts: list[str] = []
    left = list(values)
    while left:
        value = left.pop()
        if isinstance(value, str):
            texts.append(value)
        elif isinstance(value, dict):
            texts += value
            left += value.values()
        elif isinstance(value, (list, tuple)):
            left += value
    return "\0".join(texts)


def escape_mark(mark: str) -> str:
    return f"\\u{ord(mark):04x}"


def _edges(heads: Iterable[str], tails: Iterable[str], longest: int) -> re.Pattern[str]:
    """Return a pattern of strings between `\\0` that may end with a head or begin with a tail; it may match
    too much.
    """
    first = "".join(map(re.escape, {head[0] for head in heads}))
    last = "".join(map(re.escape, {tail[-1] for tail in tails}))
    if not first:
        return re.compile(r"(?!)")
    return re.compile(f"[{first}][^\0{first}]{{0,{longest}}}\0|\0[^\0{last}]{{0,{longest}}}[{last}]")


def _lower(text: str) -> str:
    """Convert to lower case letter by letter, so that offsets stay the same."""
    lower = text.lower()
    if len(lower) == len(text):
        return lower
    return "".join(letter if len(letter.lower()) > 1 else letter.lower() for letter in text)


# Digests of conversations: each prefix has a digest that is chained to the one before. `token_exact.py` uses
# them to find the turn of returning messages before anything is rendered.


class MessageChain(Struct):
    """Digests of a conversation's prefixes, and the state to extend them.

    Messages with the same meaning have the same digest: reasoning, JSON spacing and call ids do not count.
    """

    links: list[bytes] = field(default_factory=lambda: [b""])
    """Digest of each prefix, from no messages to all."""
    calls: dict[str | None, int] = field(default_factory=dict)
    """Numbers of calls by id."""

    def upto(self, messages: Sequence[Message]) -> "MessageChain":
        """Return the chain of messages that begin with the messages of this one."""
        links, calls = [*self.links], dict(self.calls)
        for message in messages[len(links) - 1 :]:
            for call in message.tool_calls:
                calls[call.id] = len(calls)
            link = blake2b(links[-1], digest_size=16)
            link.update(_digestible(message, calls))
            links.append(link.digest())
        return MessageChain(links, calls)

    def prompt_digest(self, conversation: Conversation) -> bytes:
        """Return the digest of the answered messages; if the answer continues the last message, of those
        before it.
        """
        return self.upto(conversation.messages).links[-2 if conversation.continue_final_message else -1]


def chain_messages(messages: Sequence[Message]) -> list[bytes]:
    """Return a digest for each prefix of a conversation, from no messages to all."""
    return MessageChain().upto(messages).links


def digest_frame(conversation: Conversation) -> bytes:
    """Return everything beside messages that a prompt depends on."""
    more = conversation.documents, dict(conversation.template_kwargs), conversation.template
    frame = conversation.tools, *more
    try:
        return msgspec.json.encode(frame, order="deterministic", enc_hook=repr)
    except ValueError:
        # Half of a surrogate pair, which a template can write.
        return repr(frame).encode("utf-8", "surrogatepass")


def _digestible(message: Message, calls: dict[str | None, int]) -> bytes:
    if message.role == "assistant":
        text, items = canonical_content(message)
        parts = ["assistant", text, *(part for call in items for part in call)]
    else:
        call = calls.get(message.tool_call_id)
        parts = [message.role, _text(message.content), str(call)]
    return "".join(f"{len(part)}:{part}" for part in parts).encode("utf-8", "surrogatepass")


LONG_ARGUMENTS = 256 * 1024
CanonicalContent: TypeAlias = tuple[str, list[tuple[str, str]]]
"""A text, and the calls with their arguments."""


def canonical_content(item: Message | Answer) -> CanonicalContent:
    """Return text and calls without reasoning, in a form that is equal for equal meaning."""
    text, calls = (
        (_text(item.content), item.tool_calls) if isinstance(item, Message) else (item.text, item.calls)
    )
    return text.strip(), [(call.name, _plain_json(call.arguments)) for call in calls]


def _text(content: str | list[dict[str, Any]] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = [part.get("text") for part in content]
    return "\n".join(
        text if isinstance(text, str) else repr(part) for text, part in zip(texts, content, strict=True)
    )


def _plain_json(arguments: str) -> str:
    """Return an equal text for equal JSON. Very long arguments are compared as text, because parsing takes
    long.
    """
    if len(arguments) > LONG_ARGUMENTS:
        return arguments
    try:
        value = _read_json(arguments or "{}")
        return msgspec.json.encode(value, order="deterministic").decode()
    except (ValueError, RecursionError):
        return arguments


_read_json = msgspec.json.Decoder(
    float_hook=lambda text: int(float(text)) if float(text).is_integer() else float(text)
).decode


def check_encoded(tokenizer: Tokenizer, ids: Sequence[int]) -> Sequence[int]:
    """Return the ids that a tokenizer returned, after a check."""
    size = len(tokenizer.pieces)
    if type(ids) is list and len(ids) <= PIECE:
        # The fastest check of all ids is a typed copy. Errors are reported below.
        with suppress(ValidationError):
            copy: list[int] = convert({"ids": ids}, _ids_within(size)).ids
            return copy
    if wrong := wrong_ids(ids, size):
        raise_on_fault(tokenizer, f"the ids that encode gives {wrong}")
    return ids


@lru_cache
def _ids_within(size: int) -> Any:
    return defstruct("Ids", [("ids", list[Annotated[int, Meta(ge=0, lt=size)]])])
