"""The rows of a step, as a decoder takes them."""

from msgspec import Struct
from torch import Tensor


class StepBatch(Struct):
    """Rows are in pieces, each of one sequence. A row of an answer is a piece of its own, and so is a guess:
    all keys and values are in their pages before anything looks at them."""

    ids: Tensor
    positions: Tensor
    pieces: Tensor
    """Of each row, the number of its piece."""
    begins: Tensor
    """Where each piece begins, and the last one ends."""
    tables: Tensor
    """Of each piece, its pages."""
    blocks: Tensor
    """Of each piece of work that attention is cut into: the number of the piece, and its first row there."""
    single: bool
    """Whether every piece is one row."""
