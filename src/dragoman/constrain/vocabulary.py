"""What ids mean to a constraint, made once per model; and the walk of one answer through a constraint."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray


class Vocabulary:
    """`pieces` are the bytes of each id, `special` the ids of special tokens by their text."""

    def __init__(self, pieces: Sequence[bytes], special: Mapping[str, int], end_ids: Collection[int]) -> None:
        raise NotImplementedError


class Matcher:
    """One answer's way: `mask(row)` forbids what cannot come next, `accept(id)` goes on."""

    def mask(self, row: NDArray[np.float32]) -> None:
        """Set the logits of all ids that may not come next to minus infinity."""
        raise NotImplementedError

    def accept(self, id_: int) -> None:
        """The id was sampled."""
        raise NotImplementedError

    @property
    def over(self) -> bool:
        """Nothing but an end id may follow."""
        raise NotImplementedError
