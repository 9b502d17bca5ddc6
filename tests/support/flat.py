from collections.abc import Iterable
from itertools import chain
from typing import Any


def flat(lists: Iterable[Iterable[Any]]) -> list[Any]:
    """`flat([[1], [2, 3]])` gives `[1, 2, 3]`."""
    return list(chain.from_iterable(lists))
