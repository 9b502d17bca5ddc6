"""What is drawn where the logits are is what is drawn from one row after the other."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="TORCH IS NOT INSTALLED: make torch")

from dragoman.engines.choosing.sampler import draw  # noqa: E402
from dragoman.engines.local.pytorch import drawing  # noqa: E402
from dragoman.types import Sampling  # noqa: E402

kinds = st.builds(
    Sampling,
    max_tokens=st.just(9),
    temperature=st.sampled_from([0.2, 0.8, 1.0, 2.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.5]),
    top_k=st.sampled_from([0, 1, 2, 40, 5000]),
    top_p=st.sampled_from([0.5, 0.95, 1.0]),
)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.lists(kinds, min_size=1, max_size=4))
def test_each_row_gives_what_it_gives_alone(seed: int, asked: list[Sampling]) -> None:
    random = np.random.default_rng(seed)
    rows = (random.normal(size=(len(asked), 1500)) * random.choice([0.3, 2, 8])).astype(np.float32)
    # Where rounding decides, both are right.
    uniforms = random.random(len(asked)).round(3).tolist()
    found = drawing.draw(torch.from_numpy(rows), drawing.as_rows(asked, uniforms)).tolist()
    for row, one, uniform, id_ in zip(rows, asked, uniforms, found, strict=True):
        near = {draw(row, one, min(max(uniform + step, 0), 1 - 1e-9)) for step in (-1e-5, 0, 1e-5)}
        assert id_ in near


def test_where_nothing_is_left_there_is_no_id() -> None:
    rows = torch.full((2, 50), float("-inf"))
    rows[1, 7] = 1.0
    asked = drawing.as_rows([Sampling(max_tokens=1, temperature=1.0)] * 2, [0.5, 0.5])
    assert drawing.draw(rows, asked).tolist() == [-1, 7]


def test_without_temperature_it_is_the_first_of_the_largest() -> None:
    rows = torch.zeros(1, 50)
    rows[0, [9, 30]] = 2.0
    asked = drawing.as_rows([Sampling(max_tokens=1, temperature=0.0)], [0.0])
    assert drawing.draw(rows, asked).tolist() == [9]
