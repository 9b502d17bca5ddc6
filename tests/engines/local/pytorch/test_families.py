"""Each family gives the logits that `transformers` gives, however the prompt is cut."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="TORCH IS NOT INSTALLED: make torch")

from dragoman.engines.local.options import LocalOptions  # noqa: E402
from dragoman.engines.local.pytorch.architectures import decoder_of  # noqa: E402
from dragoman.engines.local.pytorch.opening import open_torch  # noqa: E402
from dragoman.engines.local.pytorch.runner import TorchRunner  # noqa: E402
from dragoman.engines.local.runner import StepRows  # noqa: E402
from dragoman.engines.sampling import Logits  # noqa: E402
from dragoman.errors import ModelFileError  # noqa: E402
from tests.engines.local.pytorch.models import FAMILIES, SIZE, VOCABULARY, make  # noqa: E402

OPTIONS = LocalOptions(runner="torch", slots=4, context=256, batch=128, threads=1)
CONFIG = {"model_type": "llama", **SIZE}
IDS = np.random.default_rng(3).integers(0, VOCABULARY, 75).tolist()


def read(runner: TorchRunner, cuts: list[int]) -> Logits:
    """All logits of a prompt that is cut at these places, and of what is said after the last."""
    items = []
    for start, end in pairwise([0, *cuts]):
        rows = StepRows()
        rows.extend(0, start, IDS[start:end], [True] * (end - start))
        rows.tables[0] = range(9)
        items.append(runner.step(rows)[:])
    for index in range(cuts[-1], len(IDS)):
        rows = StepRows()
        rows.add(0, index, IDS[index])
        rows.tables[0] = range(9)
        items.append(runner.step(rows)[:])
    return np.concatenate(items)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = make(tmp_path, family)
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0].numpy()
    runner, _, _ = open_torch(tmp_path, OPTIONS)
    np.testing.assert_allclose(read(runner, [40, 41, 70]), expected, atol=1e-3)


def test_a_row_does_not_depend_on_others(tmp_path: Path) -> None:
    make(tmp_path)
    runner, _, _ = open_torch(tmp_path, OPTIONS)
    alone = read(runner, [64])
    rows = StepRows()
    rows.extend(0, 0, IDS[:64], [True] * 64)
    rows.extend(1, 0, IDS[9:49], [True] * 40)
    rows.tables = {0: range(9), 1: range(10, 14)}
    assert np.array_equal(runner.step(rows)[:64].argmax(1), alone[:64].argmax(1))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "mamba"}, "not support mamba models"),
        ({"model_type": "llama"}, "no valid hidden_size"),
        ({**CONFIG, "mlp_bias": True}, "not support mlp_bias True"),
        ({**CONFIG, "hidden_act": "relu"}, "not support hidden_act 'relu'"),
        (
            {**CONFIG, "model_type": "qwen3", "use_sliding_window": True},
            "not support use_sliding_window True",
        ),
        ({**CONFIG, "rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        ({**CONFIG, "partial_rotary_factor": 0.5}, "a part of a head"),
    ],
)
def test_what_it_cannot_run_is_told(config: dict[str, object], said: str) -> None:
    with pytest.raises(ModelFileError, match=said):
        decoder_of(config)
