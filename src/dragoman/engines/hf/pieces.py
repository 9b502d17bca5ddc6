"""The bytes of every id, from the description of a tokenizer.

`tokenizer.decode` cannot tell them: it gives text, where a part of a character is U+FFFD, and it treats the
first id unlike the next ones. Here each decoder of the description is a small function over one token.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

Piece: TypeAlias = str | bytes
Decode: TypeAlias = Callable[[Piece], Piece]

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_pieces(definition: Mapping[str, Any], control: Iterable[int], size: int) -> list[bytes]:
    """One piece per id. Control tokens have their text; ids that nothing is said of have no bytes."""
    steps = list(_steps(definition.get("decoder")))
    pieces = [b""] * size
    for token, id_ in vocabulary(definition).items():
        pieces[id_] = _run(steps, token)
    # The text of an added token is found before text is mapped to bytes, so it is not mapped back.
    unmapped = [step for step in steps if step is not _byte_level]
    control = frozenset(control)
    for added in definition.get("added_tokens") or ():
        text, id_ = added["content"], added["id"]
        pieces[id_] = text.encode() if id_ in control else _run(unmapped, text)
    return pieces


def vocabulary(definition: Mapping[str, Any]) -> dict[str, int]:
    """The model's own tokens; added ones may or may not be among them."""
    tokens = definition["model"].get("vocab") or {}
    if isinstance(tokens, list):
        return {token: id_ for id_, (token, _score) in enumerate(tokens)}
    return dict(tokens)


def _run(steps: Iterable[Decode], token: str) -> bytes:
    piece: Piece = token
    for step in steps:
        piece = step(piece)
    return piece if isinstance(piece, bytes) else piece.encode()


def _steps(decoder: Mapping[str, Any] | None) -> Iterable[Decode]:
    """Decoders that work on a whole text, such as the one that strips its first space, have no step."""
    kind = (decoder or {}).get("type")
    if decoder is None:
        return
    if kind == "Sequence":
        for each in decoder["decoders"]:
            yield from _steps(each)
    elif kind == "ByteLevel":
        yield _byte_level
    elif kind == "ByteFallback":
        yield _byte_fallback
    elif kind == "Replace":
        yield _replace(decoder["pattern"], decoder["content"])
    elif kind == "Metaspace":
        yield _replace({"String": decoder.get("replacement", "▁")}, " ")
    elif kind == "WordPiece":
        yield _word_piece(decoder.get("prefix", "##"))
    elif kind == "BPEDecoder":
        yield _replace({"String": decoder.get("suffix", "</w>")}, " ")


def _byte_level(piece: Piece) -> Piece:
    if isinstance(piece, bytes):
        return piece
    try:
        return bytes(_BYTES[char] for char in piece)
    except KeyError:
        return piece


def _byte_fallback(piece: Piece) -> Piece:
    found = _BYTE.fullmatch(piece) if isinstance(piece, str) else None
    return bytes([int(found[1], 16)]) if found else piece


def _replace(pattern: Mapping[str, str], content: str) -> Decode:
    found = re.compile(pattern["Regex"] if "Regex" in pattern else re.escape(pattern["String"]))
    return lambda piece: found.sub(lambda _: content, piece) if isinstance(piece, str) else piece


def _word_piece(prefix: str) -> Decode:
    """A token that does not go on with a word begins one."""

    def step(piece: Piece) -> Piece:
        if isinstance(piece, bytes):
            return piece
        return piece.removeprefix(prefix) if piece.startswith(prefix) else " " + piece

    return step


def _byte_table() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes are themselves, the others come after U+0100 in their order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_table()
