"""What routing knows of a request: digests of its beginnings, and what clients say of where it belongs.

A prompt is cut at a few places, and each beginning up to one of them has a digest. Two requests begin alike
as far as their digests are the same. The places lie further apart the further on they are, eight to each
doubling of the length: a beginning of 20,000 tokens is known by 18,000 of them, and that is enough to find
who has computed it. So a request of any length has about a hundred digests, and few of them are remembered.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgspec
from msgspec import Struct

from dragoman.media import MediaSpan

BLOCK = 32
"""Tokens. A beginning that is shorter is not worth going after."""
LEAST_KEPT = 4 * BLOCK
"""Of the places that are not the last, the ones that are remembered begin here, and double from there."""
BYTES_A_TOKEN = 4
"""About, of a text that nobody has encoded."""
HINT_HEADER = "x-session-id"
DIGEST_BITS = 60
"""Python keeps such a number in 32 bytes; of a million beginnings, no two are likely to share one."""


class RoutingKey(Struct, frozen=True, kw_only=True):
    """One request."""

    chain: tuple[tuple[int, int], ...] = ()
    """Places, in tokens, and the digests of what comes before each, the shortest first."""
    marks: tuple[int, ...] = ()
    """The digests that are worth remembering."""
    tokens: int = 0
    """Of all of it, about."""
    hints: tuple[int, ...] = ()
    """Digests of what clients say of where it belongs, the surest first."""
    home: int = 0
    """Decides where it goes if nobody knows anything of it: routers that never met agree on that."""


def digest_hint(hint: str, owner: str = "") -> int:
    """Of a name that a client gives its session, or that we gave a response. Each owner has its own."""
    return _number(blake2b(f"{owner}\0{hint}".encode("utf-8", "surrogatepass"), digest_size=8).digest())


def _number(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "little") >> (64 - DIGEST_BITS)


def _places(count: int) -> Iterator[int]:
    """Eight to each doubling: 1 to 16, then 18, 20, … 32, then 36, 40, …"""
    place, stride = 1, 1
    while place <= count:
        yield place
        if place >= 16 * stride:
            stride *= 2
        place += stride


# A prompt of ids.


def key_of_ids(
    ids: Sequence[int],
    salt: str = "",
    media: Sequence[MediaSpan] = (),
    hints: Sequence[str] = (),
    owner: str = "",
    source: str = "",
) -> RoutingKey:
    """`salt` is what keeps equal prompts apart: whose cache it is, and which adapters compute it. `source` is
    the id of what is answered here, a hint that the next request may have.
    """
    data, unit = array("I", ids).tobytes(), BLOCK * 4
    seen = blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=8)
    chain, marks, at, shown = [], [], 0, list(media)
    for place in _places(len(ids) // BLOCK):
        while shown and shown[0].start < place * BLOCK:
            # The ids of all pictures are the same.
            seen.update(shown.pop(0).media.digest.encode())
        seen.update(data[at * unit : place * unit])
        at = place
        chain.append((place * BLOCK, _number(seen.digest())))
        if place * BLOCK >= LEAST_KEPT and not place & (place - 1):
            marks.append(chain[-1][1])
    if chain and (not marks or marks[-1] != chain[-1][1]):
        marks.append(chain[-1][1])
    digests = tuple(digest_hint(hint, owner) for hint in hints if hint)
    if source:
        marks.append(digest_hint(source, owner))
    seen.update(data[at * unit :])
    return RoutingKey(
        chain=tuple(chain),
        marks=tuple(marks),
        tokens=len(ids),
        hints=digests,
        home=digests[0] if digests else _number(seen.digest()),
    )


# The body of a request, where nobody has made ids of it.


class _Asked(Struct):
    """The fields of all APIs that say what comes before the answer, or whose it is."""

    model: msgspec.Raw = msgspec.Raw()
    cache_salt: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    messages: list[msgspec.Raw] | None = None
    input: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    conversation: Any = None
    previous_response_id: Any = None
    prompt_cache_key: Any = None
    user: Any = None


_read = msgspec.json.Decoder(_Asked).decode
_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_FIRST = (b'"system"', b'"developer"')
"""Roles whose messages many conversations have alike."""


def key_of_body(
    body: bytes, headers: Mapping[str, str] | None = None, owner: str = "", least: int = BLOCK
) -> RoutingKey:
    """Of chat, completions, responses, messages and Ollama's routes. What cannot be read is no beginning."""
    try:
        asked = _read(body) if body else _Asked()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        asked = _Asked()
    stable = (headers or {}).get(HINT_HEADER), _name_of(asked.conversation), asked.prompt_cache_key
    told = [hint for hint in (*stable, asked.previous_response_id) if isinstance(hint, str) and hint]
    digests = tuple(digest_hint(hint, owner) for hint in told)
    before = b"\0".join(
        bytes(part) for part in (asked.model, asked.cache_salt, asked.tools, asked.system, asked.instructions)
    )
    seen = blake2b(b"%s\0%s" % (owner.encode("utf-8", "surrogatepass"), before), digest_size=8)
    pieces = _pieces(asked)
    chain, first = _chain_pieces(seen, len(before), pieces, least)
    known = any(isinstance(hint, str) and hint for hint in stable)
    return RoutingKey(
        chain=tuple(chain),
        marks=_marks(chain, first),
        tokens=(len(before) + sum(map(len, pieces))) // BYTES_A_TOKEN,
        hints=digests,
        home=digests[0]
        if known
        else chain[first][1]
        if chain
        else digests[0]
        if digests
        else _number(seen.digest()),
    )


def _name_of(conversation: Any) -> Any:
    return conversation.get("id") if isinstance(conversation, dict) else conversation


def _pieces(asked: _Asked) -> list[bytes]:
    """What the conversation is made of: messages, items, or a text in pieces."""
    if asked.messages is not None:
        return [bytes(message) for message in asked.messages]
    whole = bytes(asked.input) or bytes(asked.prompt)
    if whole.startswith(b"[{"):
        try:
            return [bytes(item) for item in _items(whole)]
        except (msgspec.DecodeError, RecursionError):
            return []
    size = BLOCK * BYTES_A_TOKEN
    ends = [place * size for place in _places(len(whole) // size)]
    return [whole[at:end] for at, end in zip([0, *ends], [*ends, len(whole)], strict=True) if at < end]


def _chain_pieces(
    seen: Any, before: int, pieces: Sequence[bytes], least: int
) -> tuple[list[tuple[int, int]], int]:
    """And the number of the link up to which it is this conversation's own: its first words of a user."""
    places, size, chain, first = {*_places(len(pieces))}, before, list[tuple[int, int]](), -1
    for count, piece in enumerate(pieces, 1):
        seen.update(b"%d\0" % len(piece))
        seen.update(piece)
        size += len(piece)
        if count in places and size >= least * BYTES_A_TOKEN:
            chain.append((size // BYTES_A_TOKEN, _number(seen.digest())))
            if first < 0 and not any(role in piece[:64] for role in _FIRST):
                first = len(chain) - 1
    return chain, first


def _marks(chain: Sequence[tuple[int, int]], first: int) -> tuple[int, ...]:
    """What all with the same instructions share, its own first words, then doublings, and the end."""
    wanted = {0, first, len(chain) - 1, *(2**power - 1 for power in range(2, len(chain).bit_length()))}
    return tuple(chain[place][1] for place in sorted(wanted) if 0 <= place < len(chain))
