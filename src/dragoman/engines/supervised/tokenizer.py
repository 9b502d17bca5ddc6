"""A tokenizer that outlives the engine it came from."""

from dragoman.engines.protocol import Tokenizer


class SteadyTokenizer:
    """Everything that never changes is of the first; `encode` is of the latest, so that the first can go."""

    def __init__(self, first: Tokenizer) -> None:
        self.pieces = first.pieces
        self.special = first.special
        self.bos_id = first.bos_id
        self.eos_id = first.eos_id
        self.end_ids = first.end_ids
        self.add_bos = first.add_bos
        self.infill = first.infill
        self.latest = first

    def encode(self, text: str) -> list[int]:
        return self.latest.encode(text)
