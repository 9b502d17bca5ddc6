"""Weights are read from folders, and changed in place."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="TORCH IS NOT INSTALLED: make torch")

from dragoman.engines.local.options import LocalOptions  # noqa: E402
from dragoman.engines.local.pytorch.opening import open_torch, settle_torch  # noqa: E402
from dragoman.engines.local.pytorch.weights import Weights, files_of, read_tensors  # noqa: E402
from dragoman.errors import BadRequest, ModelFileError, SettingsError  # noqa: E402
from tests.engines.local.pytorch.models import make  # noqa: E402

OPTIONS = LocalOptions(runner="torch", slots=2, context=64, threads=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("llama")
    make(made)
    return made


def weights_of(folder: Path) -> Weights:
    runner, _, _ = open_torch(folder, OPTIONS)
    return runner._weights


def test_a_tensor_is_a_part_of_a_matrix(folder: Path) -> None:
    weights = weights_of(folder)
    name = "model.layers.1.self_attn.k_proj.weight"
    found = dict(read_tensors(folder))[name]
    assert torch.equal(weights.layers[1].projection[64:96], found)
    weights.update([(name, found + 1)])
    assert torch.equal(weights.layers[1].projection[64:96], found + 1)


def test_a_tensor_of_another_model_is_refused(folder: Path) -> None:
    weights = weights_of(folder)
    with pytest.raises(BadRequest, match="no tensor 'x'"):
        weights.update([("x", torch.zeros(1))])
    with pytest.raises(BadRequest, match="instead of"):
        weights.update([("model.norm.weight", torch.zeros(3))])


def test_what_lacks_is_told(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"model.norm.weight": torch.zeros(32)}, tmp_path / "model.safetensors")
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    with pytest.raises(ModelFileError, match="lacks"):
        open_torch(tmp_path, OPTIONS)


def test_an_index_names_files_of_its_folder_alone(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "../other.safetensors"}}')
    with pytest.raises(ModelFileError, match="outside"):
        files_of(tmp_path)


def test_a_context_beyond_what_the_model_was_made_for_is_refused(folder: Path) -> None:
    with pytest.raises(SettingsError, match="made for 512"):
        open_torch(folder, LocalOptions(runner="torch", context=1024))


def test_steps_are_larger_than_elsewhere_unless_that_is_set() -> None:
    assert settle_torch(LocalOptions()).batch > 1000
    assert settle_torch(LocalOptions(batch=64)).batch == 64
