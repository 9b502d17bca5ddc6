"""Any Hugging Face tokenizer as a Tokenizer, with the bytes of every id and the chat templates stored with
it.

    HfTokenizer("models/qwen3")                                   a folder with tokenizer.json
    HfTokenizer(AutoTokenizer.from_pretrained("Qwen/Qwen3-8B"))   a tokenizer loaded by transformers
"""

import re
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from dragoman.engines.model_files import TokenizerSource, source_of
from dragoman.engines.protocol import ModelCard
from dragoman.errors import ModelFileError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# The bytes of every id, from the tokenizer's definition. `tokenizer.decode` cannot give them: it returns
# text, where a part of a character is U+FFFD, and it treats the first id differently. Here each decoder of
# the definition is a small function over one token.


Piece: TypeAlias = str | bytes
Decode: TypeAlias = Callable[[Piece], Piece]

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_pieces(definition: Mapping[str, Any], control: Iterable[int], size: int) -> list[bytes]:
    """Return the bytes of each id. Control tokens have their text; ids that are not defined have no bytes."""
    steps = list(_steps(definition.get("decoder")))
    pieces = [b""] * size
    for token, id_ in vocabulary(definition).items():
        pieces[id_] = _run(steps, token)
    # Added tokens are matched before text is mapped to bytes, so they are not mapped back.
    unmapped = [step for step in steps if step is not _byte_level]
    control = frozenset(control)
    for added in definition.get("added_tokens") or ():
        text, id_ = added["content"], added["id"]
        pieces[id_] = text.encode() if id_ in control else _run(unmapped, text)
    return pieces


def vocabulary(definition: Mapping[str, Any]) -> dict[str, int]:
    """Return the model's own tokens; added ones may or may not be among them."""
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
    """Yield one function per decoder. Decoders of whole texts, such as one that strips the first space,
    have none.
    """
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
    match = _BYTE.fullmatch(piece) if isinstance(piece, str) else None
    return bytes([int(match[1], 16)]) if match else piece


def _replace(pattern: Mapping[str, str], content: str) -> Decode:
    result = re.compile(pattern["Regex"] if "Regex" in pattern else re.escape(pattern["String"]))
    return lambda piece: result.sub(lambda _: content, piece) if isinstance(piece, str) else piece


def _word_piece(prefix: str) -> Decode:
    """Return the step for WordPiece: a token without the prefix begins a new word."""

    def step(piece: Piece) -> Piece:
        if isinstance(piece, bytes):
            return piece
        return piece.removeprefix(prefix) if piece.startswith(prefix) else " " + piece

    return step


def _byte_table() -> dict[str, int]:
    """Return GPT-2's alphabet: printable bytes are themselves, the others follow from U+0100 in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_table()


# A tokenizer that never produces control tokens, whatever the text.
#
# The library's own switch is not enough: a Unigram model still finds `</s>` in its vocabulary, like any word.
# Here the control tokens are renamed to texts that no input can contain, and keep their ids.


def plain_tokenizer(definition: dict[str, Any], control: Collection[str]) -> "Tokenizer":
    secret = f"\ufdd0{secrets.token_hex(16)}"
    names = {text: f"{secret}{number}" for number, text in enumerate(control)}
    model = dict(definition["model"])
    model["vocab"] = _rename_control(model.get("vocab"), names)
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if model.get("merges"):
        model["merges"] = [merge for merge in model["merges"] if _apart(merge, names)]
    added = [
        {**token, "content": names.get(token["content"], token["content"])}
        for token in definition.get("added_tokens") or ()
    ]
    whole = {"truncation": None, "padding": None}
    # Imported late: it comes with transformers, and models with their own vocabulary file do not need it.
    from tokenizers import Tokenizer

    return Tokenizer.from_str(
        msgspec.json.encode({**definition, **whole, "model": model, "added_tokens": added}).decode()
    )


def going_on(definition: dict[str, Any]) -> dict[str, Any] | None:
    """Return the definition for text that does not begin a prompt, if it differs: some add a space only
    before the first word.
    """
    result = _without_prefix(definition.get("pre_tokenizer"))
    return None if result == definition.get("pre_tokenizer") else {**definition, "pre_tokenizer": result}


def _without_prefix(part: Any) -> Any:
    if isinstance(part, list):
        return [_without_prefix(each) for each in part]
    if not isinstance(part, dict):
        return part
    inside = {name: _without_prefix(value) for name, value in part.items()}
    return {**inside, "prepend_scheme": "never"} if part.get("prepend_scheme") == "first" else inside


def _rename_control(tokens: Any, names: dict[str, str]) -> Any:
    if isinstance(tokens, list):
        return [[names.get(token, token), score] for token, score in tokens]
    return {names.get(token, token): id_ for token, id_ in (tokens or {}).items()}


def _apart(merge: Any, names: dict[str, str]) -> bool:
    """Whether a merge neither produces a control token nor consists of one."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left + right not in names and left not in names and right not in names


# The tokenizer.


_END_OF_TURN = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|eot|>",
    "<|eom|>",
    "<end_of_turn>",
    "<turn|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|END_OF_TURN_TOKEN|>",
    "<end_of_utterance>",
    "<｜end▁of▁sentence｜>",
    "<EOT>",
    "[EOT]",
)
"""Texts that end the turn in many model families; used only where they are control tokens."""
_INFILL = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("[PREFIX]", "[SUFFIX]", "[MIDDLE]"),
)


class HfTokenizer:
    """A Hugging Face tokenizer. `size` is the number of logits, often more than there are tokens.

    Text that spells a control token is encoded as its characters. Only characters that the vocabulary cannot
    express become its "unknown" token.
    """

    def __init__(self, tokenizer: Any, *, size: int | None = None, end_ids: Collection[int] = ()) -> None:
        source = source_of(_load(tokenizer))
        definition = source.definition
        ids = _all_ids(definition)
        most = 1 + max(ids.values(), default=-1)
        self.templates = source.templates
        self.special_ids = _control(definition, source, ids)
        self.pieces = byte_pieces(definition, self.special_ids.values(), max(most, size or 0))
        self._plain, self._going_on = _plain(definition, self.special_ids)
        self.before, self.after = _frame(self._plain)
        """Ids that the tokenizer itself puts before and after a text, such as BOS, or `[CLS]` and `[SEP]`."""
        self.bos_id: int | None = ids.get(source.named.get("bos_token", ""), next(iter(self.before), None))
        self.eos_id: int | None = ids.get(source.named.get("eos_token", ""))
        self.end_ids = self._ends({*end_ids, *source.end_ids})
        self.add_bos = self.bos_id is not None and (
            self.before[:1] == (self.bos_id,) if source.add_bos is None else source.add_bos
        )
        self.infill = _infill(ids)
        self.special_tokens = {
            name: text for name, text in source.named.items() if name not in ("bos_token", "eos_token")
        }
        self.longest = source.longest

    def encode(self, text: str) -> list[int]:
        return _encode(self._plain, text)

    def encode_continuation(self, text: str) -> list[int]:
        """Encode text that does not begin a prompt; some tokenizers then add no space in front."""
        return _encode(self._going_on, text)

    def _ends(self, numbers: Iterable[int]) -> frozenset[int]:
        known = {self.special_ids[text] for text in _END_OF_TURN if text in self.special_ids}
        if {"<|return|>", "<|call|>"} <= self.special_ids.keys():
            # Harmony ends a message with `<|end|>`, and may continue with the next one.
            known.discard(self.special_ids.get("<|end|>", -1))
        ends = {*known, *numbers, *([] if self.eos_id is None else [self.eos_id])}
        return frozenset(id_ for id_ in ends if 0 <= id_ < len(self.pieces))


def _encode(tokenizer: Any, text: str) -> list[int]:
    # `encode` holds the GIL, for 2 MB of text about a second; the batch call does not, even for one text. The
    # fast variant computes no offsets, which are not used here.
    (whole,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    ids: list[int] = whole.ids
    return ids


def card_of(
    tokenizer: HfTokenizer,
    *,
    name: str,
    max_model_len: int,
    slots: int | None = None,
    adapters: Collection[str] = (),
    constrains: bool = False,
    has_samplers: bool = False,
    sampling: Mapping[str, float] | None = None,
    unsupported: frozenset[str] = frozenset(),
    created: int = 0,
    details: Mapping[str, str] | None = None,
) -> ModelCard:
    """Create the card of a model known by its tokenizer, which gives the templates and named tokens."""
    return ModelCard(
        name=name,
        max_model_len=max_model_len,
        slots=slots,
        templates=tokenizer.templates,
        special_tokens=tokenizer.special_tokens,
        adapters=tuple(adapters),
        constrains=constrains,
        has_samplers=has_samplers,
        recommended_sampling=sampling or {},
        unsupported=unsupported,
        created=created,
        details=details or {},
    )


def _load(tokenizer: Any) -> Any:
    """Load a tokenizer by name with transformers, from its cache or the hub, if the text is not a path."""
    if not isinstance(tokenizer, str) or Path(tokenizer).expanduser().exists():
        return tokenizer
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ModelFileError(f"Folder {tokenizer} does not exist.") from None
    try:
        return AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ModelFileError(
            f"There is neither a folder nor a tokenizer with the name {tokenizer}."
        ) from error


def _all_ids(definition: Mapping[str, Any]) -> dict[str, int]:
    added = {token["content"]: token["id"] for token in definition.get("added_tokens") or ()}
    return vocabulary(definition) | added


def _control(
    definition: Mapping[str, Any], source: TokenizerSource, ids: Mapping[str, int]
) -> dict[str, int]:
    """Return tokens that are marked special, that have a name, or that end turns; and the unknown token."""
    added = {token["content"]: bool(token.get("special")) for token in definition.get("added_tokens") or ()}
    texts = {text for text, special in added.items() if special or text in _END_OF_TURN}
    texts.update(source.named.values())
    model = definition["model"]
    unknown = model.get("unk_id")
    texts.add(model["vocab"][unknown][0] if isinstance(unknown, int) else model.get("unk_token") or "")
    return {text: ids[text] for text in sorted(texts) if text in ids}


def _plain(definition: dict[str, Any], control: Collection[str]) -> tuple[Any, Any]:
    """Create two tokenizers, for text that begins a prompt and for other text; usually they are the same."""
    try:
        plain, other = plain_tokenizer(definition, control), going_on(definition)
        return plain, plain if other is None else plain_tokenizer(other, control)
    except ImportError:
        raise ModelFileError("Hugging Face tokenizers need a package: pip install tokenizers.") from None
    except Exception as error:
        raise ModelFileError(
            "The installed `tokenizers` cannot read this tokenizer.json; a newer version may be needed."
        ) from error


def _frame(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids that the tokenizer adds before and after a text."""
    encoding = tokenizer.encode("a", add_special_tokens=True)
    ids, marks = tuple(encoding.ids), encoding.special_tokens_mask
    if 0 not in marks:
        return (), ()
    return ids[: marks.index(0)], ids[len(ids) - marks[::-1].index(0) :]


def _infill(ids: Mapping[str, int]) -> tuple[int, int, int] | None:
    for prefix, suffix, middle in _INFILL:
        if {prefix, suffix, middle} <= ids.keys():
            return ids[prefix], ids[suffix], ids[middle]
    return None
