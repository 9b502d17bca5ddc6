"""Any Hugging Face tokenizer as a Tokenizer, with the bytes of every id and the chat templates beside it.

HfTokenizer("models/qwen3")                                   a folder with tokenizer.json
HfTokenizer(AutoTokenizer.from_pretrained("Qwen/Qwen3-8B"))   what transformers has loaded
"""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from dragoman.engines.hf.pieces import byte_pieces, vocabulary
from dragoman.engines.hf.source import TokenizerSource, source_of
from dragoman.engines.protocol import ModelCard
from dragoman.errors import ModelFileError

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
"""Texts with which models of many families end their turn; counted only where they are control tokens."""
_INFILL = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("[PREFIX]", "[SUFFIX]", "[MIDDLE]"),
)

LONG = 8192
"""Characters of a text whose encoding others are not to wait for."""


class HfTokenizer:
    """`size` is how many ids the model's logits have, often more than there are tokens.

    Text that spells a control token gives the ids of its characters. Only what the vocabulary has no way to
    write becomes its "unknown" token.
    """

    def __init__(self, tokenizer: Any, *, size: int | None = None, end_ids: Collection[int] = ()) -> None:
        source = source_of(_loaded(tokenizer))
        definition = source.definition
        ids = _all_ids(definition)
        most = 1 + max(ids.values(), default=-1)
        self.templates = source.templates
        self.special = _control(definition, source, ids)
        self.pieces = byte_pieces(definition, self.special.values(), max(most, size or 0))
        self._plain, self._going_on = _plain(definition, self.special)
        self.before, self.after = _frame(self._plain)
        """What the tokenizer puts around a text by itself, such as BOS, or `[CLS]` and `[SEP]`."""
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
        return _encoded(self._plain, text)

    def encode_on(self, text: str) -> list[int]:
        """The same for text that does not begin a prompt, which some write without a space in front."""
        return _encoded(self._going_on, text)

    def _ends(self, told: Iterable[int]) -> frozenset[int]:
        known = {self.special[text] for text in _END_OF_TURN if text in self.special}
        if {"<|return|>", "<|call|>"} <= self.special.keys():
            # Harmony ends a message with it, and goes on with the next one.
            known.discard(self.special.get("<|end|>", -1))
        ends = {*known, *told, *([] if self.eos_id is None else [self.eos_id])}
        return frozenset(id_ for id_ in ends if 0 <= id_ < len(self.pieces))


def _encoded(tokenizer: Any, text: str) -> list[int]:
    if len(text) <= LONG:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids
    # Of a text alone the library keeps the interpreter to itself, which of 2 MB is a second. Of several it
    # does not, be they one.
    (whole,) = tokenizer.encode_batch([text], add_special_tokens=False)
    several: list[int] = whole.ids
    return several


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
    """The card of a model that is known by its tokenizer: templates and named tokens come from there."""
    return ModelCard(
        name=name,
        max_model_len=max_model_len,
        slots=slots,
        templates=tokenizer.templates,
        special_tokens=tokenizer.special_tokens,
        adapters=tuple(adapters),
        constrains=constrains,
        has_samplers=has_samplers,
        sampling=sampling or {},
        unsupported=unsupported,
        created=created,
        details=details or {},
    )


def _loaded(tokenizer: Any) -> Any:
    """A text that is no path is a name, which transformers looks up in its cache or on its hub."""
    if not isinstance(tokenizer, str) or Path(tokenizer).expanduser().exists():
        return tokenizer
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ModelFileError(f"There is no folder {tokenizer}.") from None
    try:
        return AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ModelFileError(f"There is no folder {tokenizer}, and no tokenizer of that name.") from error


def _all_ids(definition: Mapping[str, Any]) -> dict[str, int]:
    added = {token["content"]: token["id"] for token in definition.get("added_tokens") or ()}
    return vocabulary(definition) | added


def _control(
    definition: Mapping[str, Any], source: TokenizerSource, ids: Mapping[str, int]
) -> dict[str, int]:
    """Tokens that are marked so, that have a name, or that end turns; and the one for unknown characters."""
    added = {token["content"]: bool(token.get("special")) for token in definition.get("added_tokens") or ()}
    texts = {text for text, special in added.items() if special or text in _END_OF_TURN}
    texts.update(source.named.values())
    model = definition["model"]
    unknown = model.get("unk_id")
    texts.add(model["vocab"][unknown][0] if isinstance(unknown, int) else model.get("unk_token") or "")
    return {text: ids[text] for text in sorted(texts) if text in ids}


def _plain(definition: dict[str, Any], control: Collection[str]) -> tuple[Any, Any]:
    """Two tokenizers, for text that begins a prompt and for text that does not; most often they are one."""
    try:
        from dragoman.engines.hf.plain import going_on, plain_tokenizer
    except ImportError:
        raise ModelFileError("Hugging Face tokenizers need a package: pip install tokenizers.") from None
    try:
        plain, other = plain_tokenizer(definition, control), going_on(definition)
        return plain, plain if other is None else plain_tokenizer(other, control)
    except Exception as error:
        raise ModelFileError(
            "The installed `tokenizers` cannot use this tokenizer.json; is it newer?"
        ) from error


def _frame(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What stands around the ids of a text when the tokenizer is asked for all it puts there."""
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
