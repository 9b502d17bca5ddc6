"""Routing keys: digests of a request's prefixes, and clients' hints about where it belongs.

A prompt is cut at a few offsets, and each prefix up to one of them has a digest. Two requests have a common
prefix as far as their digests are equal. The distance of the offsets grows, with eight offsets per doubling
of the length: of a prefix of 20,000 tokens at least 18,000 are recognised, which is enough to find the
replica that computed it. A request of any length therefore has about a hundred digests, and few of them are
remembered.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgspec
from msgspec import Struct

from dragoman.media import MediaSpan

BLOCK = 32
"""Tokens per block. A shorter prefix is not worth routing by."""
LEAST_KEPT = 4 * BLOCK
"""Tokens of the first remembered offset; further ones double, and the last offset is always remembered."""
BYTES_A_TOKEN = 4
"""Estimated bytes per token of text that is not encoded."""
HINT_HEADER = "x-session-id"
DIGEST_BITS = 60
"""Python stores such a number in 32 bytes; among a million prefixes, a collision is unlikely."""


class RoutingKey(Struct, frozen=True, kw_only=True):
    """Routing data of one request."""

    prefix_digests: tuple[tuple[int, int], ...] = ()
    """Offsets in tokens with the digests of the prefixes before them, shortest first."""
    remembered_digests: tuple[int, ...] = ()
    """Digests that are worth remembering."""
    tokens: int = 0
    """Estimated number of tokens of the request."""
    hints: tuple[int, ...] = ()
    """Digests of clients' hints, most reliable first."""
    ring_position: int = 0
    """Position on the ring for a request without known prefixes: routers without shared state agree on it."""


def digest_hint(hint: str, owner: str = "") -> int:
    """Return the digest of a session name of a client, or of a response id. Owners have separate digests."""
    return _number(blake2b(f"{owner}\0{hint}".encode("utf-8", "surrogatepass"), digest_size=8).digest())


def _number(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "little") >> (64 - DIGEST_BITS)


def _places(count: int) -> Iterator[int]:
    """Yield block counts, eight per doubling: 1 to 16, then 18, 20, … 32, then 36, 40, …"""
    blocks, stride = 1, 1
    while blocks <= count:
        yield blocks
        if blocks >= 16 * stride:
            stride *= 2
        blocks += stride


# Keys of prompts of ids


def key_of_ids(
    ids: Sequence[int],
    salt: str = "",
    media: Sequence[MediaSpan] = (),
    hints: Sequence[str] = (),
    owner: str = "",
    source: str = "",
) -> RoutingKey:
    """Make the key of a prompt of ids. `salt` separates equal prompts: the owner of the cache and the
    adapters.

    `source` is the id of the response made here, a hint that the next request may have.
    """
    data, unit = array("I", ids).tobytes(), BLOCK * 4
    seen = blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=8)
    chain, marks, at, shown = [], [], 0, list(media)
    for index in _places(len(ids) // BLOCK):
        while shown and shown[0].start < index * BLOCK:
            # The ids of all images are equal.
            seen.update(shown.pop(0).media.digest.encode())
        seen.update(data[at * unit : index * unit])
        at = index
        chain.append((index * BLOCK, _number(seen.digest())))
        if index * BLOCK >= LEAST_KEPT and not index & (index - 1):
            marks.append(chain[-1][1])
    if chain and (not marks or marks[-1] != chain[-1][1]):
        marks.append(chain[-1][1])
    digests = tuple(digest_hint(hint, owner) for hint in hints if hint)
    if source:
        marks.append(digest_hint(source, owner))
    seen.update(data[at * unit :])
    return RoutingKey(
        prefix_digests=tuple(chain),
        remembered_digests=tuple(marks),
        tokens=len(ids),
        hints=digests,
        ring_position=digests[0] if digests else _number(seen.digest()),
    )


# Keys of request bodies that are not encoded


class _RoutedFields(Struct):
    """Fields of all APIs that determine the prompt or its owner."""

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


_read = msgspec.json.Decoder(_RoutedFields).decode
_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_FIRST = (b'"system"', b'"developer"')
"""Roles whose messages are the same in many conversations."""


def key_of_body(
    body: bytes, headers: Mapping[str, str] | None = None, owner: str = "", least: int = BLOCK
) -> RoutingKey:
    """Make the key of a body of chat, completions, responses, messages or Ollama's routes. An unreadable body
    has no prefixes.
    """
    try:
        fields = _read(body) if body else _RoutedFields()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        fields = _RoutedFields()
    stable = (headers or {}).get(HINT_HEADER), _name_of(fields.conversation), fields.prompt_cache_key
    hints = [hint for hint in (*stable, fields.previous_response_id) if isinstance(hint, str) and hint]
    digests = tuple(digest_hint(hint, owner) for hint in hints)
    before = b"\0".join(
        bytes(part)
        for part in (fields.model, fields.cache_salt, fields.tools, fields.system, fields.instructions)
    )
    seen = blake2b(b"%s\0%s" % (owner.encode("utf-8", "surrogatepass"), before), digest_size=8)
    pieces = _pieces(fields)
    chain, first = _chain_pieces(seen, len(before), pieces, least)
    known = any(isinstance(hint, str) and hint for hint in stable)
    return RoutingKey(
        prefix_digests=tuple(chain),
        remembered_digests=_marks(chain, first),
        tokens=(len(before) + sum(map(len, pieces))) // BYTES_A_TOKEN,
        hints=digests,
        ring_position=digests[0]
        if known
        else chain[first][1]
        if chain
        else digests[0]
        if digests
        else _number(seen.digest()),
    )


def _name_of(conversation: Any) -> Any:
    return conversation.get("id") if isinstance(conversation, dict) else conversation


def _pieces(fields: _RoutedFields) -> list[bytes]:
    """Return the parts of a conversation: messages, items, or a text in chunks."""
    if fields.messages is not None:
        return [bytes(message) for message in fields.messages]
    whole = bytes(fields.input) or bytes(fields.prompt)
    if whole.startswith(b"[{"):
        try:
            return [bytes(item) for item in _items(whole)]
        except (msgspec.DecodeError, RecursionError):
            return []
    size = BLOCK * BYTES_A_TOKEN
    ends = [index * size for index in _places(len(whole) // size)]
    return [whole[at:end] for at, end in zip([0, *ends], [*ends, len(whole)], strict=True) if at < end]


def _chain_pieces(
    seen: Any, before: int, pieces: Sequence[bytes], least: int
) -> tuple[list[tuple[int, int]], int]:
    """Return the chain, and the index of its first prefix that is specific to the conversation: with a user's
    text.
    """
    indices, size, chain, first = {*_places(len(pieces))}, before, list[tuple[int, int]](), -1
    for count, piece in enumerate(pieces, 1):
        seen.update(b"%d\0" % len(piece))
        seen.update(piece)
        size += len(piece)
        if count in indices and size >= least * BYTES_A_TOKEN:
            chain.append((size // BYTES_A_TOKEN, _number(seen.digest())))
            if first < 0 and not any(role in piece[:64] for role in _FIRST):
                first = len(chain) - 1
    return chain, first


def _marks(chain: Sequence[tuple[int, int]], first: int) -> tuple[int, ...]:
    """Return the digests to remember: the prefix shared with equal instructions, the first own one,
    doublings, the end.
    """
    wanted = {0, first, len(chain) - 1, *(2**power - 1 for power in range(2, len(chain).bit_length()))}
    return tuple(chain[position][1] for position in sorted(wanted) if 0 <= position < len(chain))
