"""GGUF files: what llama.cpp says of a prompt is said here, and tensors are those of a folder."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="TORCH IS NOT INSTALLED: make torch")

from gguf import GGMLQuantizationType  # noqa: E402
from gguf.quants import dequantize, quant_shape_to_byte_shape  # noqa: E402
from msgspec.structs import replace  # noqa: E402

from dragoman.cli import builtin_engines  # noqa: E402
from dragoman.engines.local import LocalEngine, LocalOptions, binding, hardware  # noqa: E402
from dragoman.engines.local.pytorch.gguf_file import GgufFile, _widen  # noqa: E402
from dragoman.engines.local.pytorch.weights import ModelWeights  # noqa: E402
from dragoman.errors import ModelFileError, SettingsError  # noqa: E402
from dragoman.settings import Settings  # noqa: E402
from tests.engines.local.openvino.conftest import WIDTH, write_model  # noqa: E402
from tests.engines.local.openvino.test_models import STRETCHED, about, difference  # noqa: E402
from tests.support.tiny_gguf import write_split, write_tiny  # noqa: E402

F32 = GGMLQuantizationType.F32
OPTIONS = LocalOptions(runner="torch", slots=2, context=64, threads=1)
YARN = {**STRETCHED, "rope.scaling.type": "yarn"}


@pytest.mark.parametrize(
    ("architecture", "more"),
    [
        ("llama", {"factors": True}),
        ("qwen2", {"more": YARN}),
        ("qwen3", {}),
        ("qwen3moe", {}),
        ("gemma3", {"more": {**STRETCHED, "rope.scaling.type": "linear"}}),
    ],
)
def test_it_says_what_llama_cpp_says(
    architecture: str, more: dict[str, Any], weights: Path, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "m.gguf", weights, architecture, usual=F32, **more)
    ours, theirs = about(model, "torch"), about(model, "llamacpp")
    # llama.cpp keeps keys and values in 16 bits.
    assert difference(ours, theirs) < 0.01


def test_the_default_model_goes_on_as_with_llama_cpp(weights: Path) -> None:
    """llama.cpp rounds what is multiplied to eight bits."""
    ours, theirs = about(weights, "torch"), about(weights, "llamacpp")
    assert difference(ours, theirs) < 0.3


KINDS = [
    kind for kind in GGMLQuantizationType if kind.name in ("F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K")
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_numbers_are_those_that_the_file_means(kind: GGMLQuantizationType) -> None:
    shape = quant_shape_to_byte_shape((2, 3, 512), kind)
    data = np.random.default_rng(1).integers(0, 60, shape, np.uint8)
    result = _widen(data, kind, torch.device("cpu"), torch.float32)
    expected = dequantize(data, kind)
    assert result.shape == (2, 3, 512)
    np.testing.assert_array_equal(result.numpy(), expected)


def test_a_model_in_several_files(tmp_path: Path) -> None:
    """It has the tensors of the same model in one."""
    first = write_split(tmp_path / "m.gguf")[0]
    whole = write_tiny(tmp_path / "whole.gguf")
    states = []
    for path in (first, whole):
        engine = LocalEngine.open(path, OPTIONS)
        states.append(dict(engine._runner._weights._places))  # type: ignore[union-attr]
        engine.close()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_template_and_tokenizer_are_of_the_file(tmp_path: Path) -> None:
    engine = LocalEngine.open(write_tiny(tmp_path / "m.gguf", "{{ messages[0].content }}!"), OPTIONS)
    assert engine.card.templates == {"default": "{{ messages[0].content }}!"}
    assert engine.tokenizer.encode("ab")[-1] == 261
    engine.close()


def test_norms_of_gemma_are_as_in_a_folder(weights: Path, tmp_path: Path) -> None:
    """So that a trainer's weights, which are what norms differ from 1, can take their place."""
    path = write_model(tmp_path / "m.gguf", weights, "gemma3")
    engine = LocalEngine.open(path, OPTIONS)
    model_weights: ModelWeights = engine._runner._weights  # type: ignore[union-attr]
    assert abs(float(model_weights.norm.mean())) < 0.3
    assert model_weights.shape.norm_from_one
    engine.close()


def test_what_it_cannot_run_is_told(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"architecture qwen2vl is not among llama, .* runner llamacpp"):
        LocalEngine.open(write_tiny(tmp_path / "m.gguf", architecture="qwen2vl"), OPTIONS)


def test_what_lacks_is_told(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf")
    data = path.read_bytes().replace(b"blk.0.ffn_up.weight", b"blk.0.ffn_ub.weight")
    path.write_bytes(data)
    with pytest.raises(ModelFileError, match=r"it has an unknown tensor 'blk\.0\.ffn_ub\.weight'"):
        LocalEngine.open(path, OPTIONS)
    with pytest.raises(ModelFileError, match="lacks the tensor absent"):
        GgufFile([write_tiny(path)], {"general.architecture": "llama"})._read("absent")


def test_a_file_that_ends_early_is_told(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[: -4 * WIDTH])
    with pytest.raises(ModelFileError, match="damaged"):
        LocalEngine.open(path, OPTIONS)


@pytest.mark.parametrize(
    ("more", "llama_gpus", "room", "expected"),
    [
        ({}, [], 1 << 40, "torch"),
        ({}, ["one"], 1 << 40, "auto"),
        ({}, [], 1 << 10, "auto"),
        ({"kv_cache": "int8"}, [], 1 << 40, "auto"),
        ({"draft": "other.gguf", "runner": "torch"}, [], 1 << 40, "torch"),
    ],
)
def test_auto_takes_it_where_a_gpu_would_be_idle(
    more: dict[str, Any],
    llama_gpus: list[str],
    room: int,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(builtin_engines, "_has_gpu", lambda: True)
    monkeypatch.setattr(hardware, "find_gpus", lambda: [hardware.Gpu("cuda", "one")])
    monkeypatch.setattr(binding.load(), "gpus", lambda: llama_gpus)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (room, room))
    path = write_tiny(tmp_path / "other.gguf")
    if "draft" in more:
        more = {**more, "draft": str(path)}
    assert builtin_engines.settle(Settings(model=str(path), **more)).runner == expected


@pytest.mark.parametrize("more", [{"kv_cache": "int8"}, {"gpu_layers": 3}])
def test_what_is_for_others_is_refused(more: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"runner torch|llamacpp"):
        LocalEngine.open(write_tiny(tmp_path / "m.gguf"), replace(OPTIONS, **more))
