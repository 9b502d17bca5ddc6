"""A byte-level tokenizer with a few control tokens, and the corpus."""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from dragoman.engines.protocol import ModelCard
from dragoman.prompt import PromptBuilder

TEMPLATES = Path(__file__).parent.parent / "corpus" / "templates"
SHARED = Path(__file__).parent.parent.parent.parent / "shared"

CONTROL = (
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|end|>", "<|start|>", "<|message|>", "<|channel|>"),
    *("<|call|>", "<|user|>", "<|assistant|>", "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]"),
    *("[TOOL_CALLS]", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<think>", "</think>"),
)


class ByteTokenizer:
    """Ids 0 to 255 are bytes; control tokens follow."""

    def __init__(self, special: Sequence[str] = CONTROL, *, add_bos: bool = True) -> None:
        self.pieces: Sequence[bytes] = [bytes([byte]) for byte in range(256)] + [t.encode() for t in special]
        self.special_ids = {text: 256 + index for index, text in enumerate(special)}
        self.bos_id: int | None = self.special_ids.get("<s>")
        self.eos_id: int | None = self.special_ids.get("</s>")
        self.end_ids = frozenset(id for id in (self.eos_id,) if id is not None)
        self.add_bos = add_bos
        self.infill: tuple[int, int, int] | None = None

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "surrogatepass"))

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self.pieces[id] for id in ids).decode("utf-8", "surrogatepass")


def clock() -> datetime:
    return datetime(2026, 1, 2, 3, 4, 5)


def corpus(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text()


def prompter(source: str | None, **more: Any) -> PromptBuilder:
    """A prompter for a corpus template's name, or for a template's text."""
    if source is not None and "{" not in source:
        source = corpus(source)
    templates = {} if source is None else {"default": source}
    card = ModelCard(name="m", max_model_len=1000, templates=templates)
    return PromptBuilder(card, ByteTokenizer(), clock=clock, **more)
