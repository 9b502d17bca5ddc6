"""Weights are read from folders, and changed in place."""

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="TORCH IS NOT INSTALLED: make torch")

from dragoman.engines.local.options import LocalOptions  # noqa: E402
from dragoman.engines.local.pytorch.opening import is_known, open_torch, settle_torch  # noqa: E402
from dragoman.engines.local.pytorch.weights import ModelWeights, files_of, read_tensors  # noqa: E402
from dragoman.errors import BadRequest, ModelFileError, SettingsError  # noqa: E402
from tests.engines.local.pytorch.models import make  # noqa: E402

OPTIONS = LocalOptions(runner="torch", slots=2, context=64, threads=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    make(path)
    return path


def weights_of(folder: Path) -> ModelWeights:
    runner, _, _ = open_torch(folder, OPTIONS)
    return runner._weights


def test_a_tensor_is_a_part_of_a_matrix(folder: Path) -> None:
    weights = weights_of(folder)
    name = "model.layers.1.self_attn.k_proj.weight"
    result = dict(read_tensors(folder))[name]
    assert torch.equal(weights.layers[1].projection[64:96], result)
    weights.update([(name, result + 1)])
    assert torch.equal(weights.layers[1].projection[64:96], result + 1)


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
    with pytest.raises(SettingsError, match="trained for 512"):
        open_torch(folder, LocalOptions(runner="torch", context=1024))


def test_steps_are_larger_than_elsewhere_unless_that_is_set() -> None:
    assert settle_torch(LocalOptions()).batch > 1000
    assert settle_torch(LocalOptions(batch=64)).batch == 64


@pytest.mark.parametrize("within", ["language_model.model.", "model.language_model."])
def test_of_a_model_that_sees_the_text_is_taken(within: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    make(tmp_path, "gemma3")
    alone, _, _ = open_torch(tmp_path, OPTIONS)
    tensors = {name.replace("model.", within, 1): value for name, value in read_tensors(tmp_path)}
    save_file(tensors | {"vision_tower.a": torch.zeros(1)}, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": config}))
    runner, _, _ = open_torch(tmp_path, OPTIONS)
    for name, position in runner._weights._places.items():
        assert torch.equal(position, alone._weights._places[name])


@pytest.mark.parametrize("lacking", ["tokenizer.json", "config.json", "model-2.safetensors"])
def test_a_file_that_lacks_is_named(lacking: str, folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    where = {name: f"model-{number % 2 + 1}.safetensors" for number, name in enumerate(tensors)}
    for file in {*where.values()}:
        save_file({name: tensors[name] for name in where if where[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    for file in ("config.json", "tokenizer.json"):
        (tmp_path / file).write_bytes((folder / file).read_bytes())
    open_torch(tmp_path, OPTIONS)
    (tmp_path / lacking).unlink()
    with pytest.raises(ModelFileError, match=lacking):
        open_torch(tmp_path, OPTIONS)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model.norm.weight": torch.zeros(32, dtype=torch.int64)}, "model.norm.weight in I64"),
        (
            {"model.norm.weight": torch.zeros(33)},
            r"the shape \[33\] instead of \[32\]",
        ),
        ({"model.layers.0.strange.weight": torch.zeros(3)}, "no tensor 'model.layers.0.strange.weight'"),
        ({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}, None),
    ],
)
def test_a_tensor_that_is_wrong_is_named(
    change: dict[str, Any], said: str | None, folder: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    save_file(load_file(folder / "model.safetensors") | change, tmp_path / "model.safetensors")
    for file in ("config.json", "tokenizer.json"):
        (tmp_path / file).write_bytes((folder / file).read_bytes())
    if said is None:
        open_torch(tmp_path, OPTIONS)
        return
    with pytest.raises(ModelFileError, match=said):
        open_torch(tmp_path, OPTIONS)


@pytest.mark.parametrize(("head", "takes"), [(8, False), (16, True), (80, False), (128, True)])
def test_heads_that_a_gpu_has_no_kernels_for_are_refused(head: int, takes: bool, tmp_path: Path) -> None:
    make(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_bytes()) | {"head_dim": head}))
    assert is_known(tmp_path) == takes
