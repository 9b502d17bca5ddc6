"""Weights for llama.cpp are in memory once where they fit, and mapped where they would push others out."""

import shutil
from contextlib import closing
from pathlib import Path

import pytest

from dragoman.engines.local import hardware
from dragoman.engines.local.opening import open_model
from dragoman.engines.local.options import LocalOptions
from dragoman.engines.local.runner import StepRows

MAPS = Path("/proc/self/maps")
OPTIONS = LocalOptions(runner="llamacpp", threads=1, slots=1, context=64)


@pytest.fixture
def model(weights: Path, tmp_path: Path) -> Path:
    """A file that no other test has open."""
    return Path(shutil.copy(weights, tmp_path / "model.gguf"))


def looked_at(model: Path) -> tuple[bool, bytes]:
    """Whether the file is mapped while it is open, and what comes after a token."""
    opened = open_model(model, OPTIONS)
    with closing(opened.runner):
        rows = StepRows()
        rows.add(0, 0, 5)
        return str(model.resolve()) in MAPS.read_text(), opened.runner.step(rows).tobytes()


@pytest.mark.skipif(not MAPS.exists(), reason="the system does not say what is mapped")
def test_a_file_is_mapped_only_where_it_would_not_fit(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mapped, logits = looked_at(model)
    assert not mapped
    size, free = model.stat().st_size, [0]
    # The context needs little; whether it fits is not asked here.
    monkeypatch.setattr(hardware, "check_memory", lambda needed, what: None)
    monkeypatch.setattr(hardware, "free_memory", lambda: free[0])
    for free[0] in (size, 2 * size):
        assert looked_at(model) == (free[0] == size, logits)
