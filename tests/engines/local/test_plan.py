import asyncio

import numpy as np
import pytest

from dragoman.engines.local.sequence import Sequence, SequenceGroup, level
from dragoman.engines.sampling.batched import Continuation
from dragoman.types import Job, Sampling


def sequences(count: int) -> list[Sequence]:
    loop = asyncio.new_event_loop()
    loop.close()
    sampling = Sampling(max_tokens=1)
    group = SequenceGroup(
        Job(id="a", prompt=(1,), sampling=sampling), lambda step: None, loop, np.array([1], np.int32)
    )
    answer = Continuation(group.job, 0, group.prompt, vocabulary=8, ends=frozenset(), room=8)
    return [Sequence(group, index, (0, 0, index), answer) for index in range(count)]


@pytest.mark.parametrize(
    ("sizes", "levelled"),
    [
        ([9, 10, 12], [9, 9, 9]),
        ([4, 27, 30], [4, 27, 27]),
        ([3, 2, 1], [1, 1, 1]),
        ([12, 80], [12, 80]),
        ([80], [80]),
        ([], []),
    ],
)
def test_pieces_become_equally_long_where_that_pays(sizes: list[int], levelled: list[int]) -> None:
    wanted = dict(zip(sequences(len(sizes)), sizes, strict=True))
    assert list(level(wanted).values()) == levelled
