"""Weights of eight bits: what is computed is what they stand for, whether they were loaded or changed."""

import asyncio
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="TORCH IS NOT INSTALLED: make torch")

from msgspec.structs import replace  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from dragoman.engines.local import LocalEngine, LocalOptions, TrainableEngine  # noqa: E402
from dragoman.engines.local.pytorch.architectures import decoder_of  # noqa: E402
from dragoman.engines.local.pytorch.opening import open_torch  # noqa: E402
from dragoman.engines.local.pytorch.quantized import KINDS, QuantizedMatrix  # noqa: E402
from dragoman.engines.local.pytorch.weights import ModelWeights, TensorFiles  # noqa: E402
from dragoman.errors import BadRequest, ModelFileError, SettingsError  # noqa: E402
from dragoman.types import Step  # noqa: E402
from tests.engines.local.contract.subject import SubmittedJob, ids  # noqa: E402
from tests.engines.local.pytorch import test_adapters as adapters  # noqa: E402
from tests.engines.local.pytorch.models import make  # noqa: E402
from tests.engines.local.pytorch.test_families import IDS, read  # noqa: E402
from tests.engines.local.pytorch.test_training import forward, logprobs  # noqa: E402
from tests.support.tiny_gguf import write_tiny  # noqa: E402

OPTIONS = LocalOptions(runner="torch", slots=2, context=256, batch=128, threads=1)
PRODUCT = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    make(path)
    return path


def meant(weights: ModelWeights) -> dict[str, Any]:
    """All weights, in float32."""
    return {
        name: position.widen(torch.float32) if isinstance(position, QuantizedMatrix) else position
        for name, position in weights._places.items()
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_logits_are_those_of_the_rounded_weights(family: str, kind: Any, tmp_path: Path) -> None:
    model = make(tmp_path, family)
    runner, _, card = open_torch(tmp_path, replace(OPTIONS, weights=kind))
    array = read(runner, [40, 70])
    assert kind in card.details["runner"]
    plain, _, _ = open_torch(tmp_path, OPTIONS)
    plain.read_weights(meant(runner._weights))()
    np.testing.assert_allclose(array, read(plain, [40, 70]), atol=1e-3)
    with torch.no_grad():
        exact = model(torch.tensor([IDS])).logits[0].numpy()
    assert np.median(np.abs(array - exact)) < 0.2 * np.std(exact)


@pytest.mark.parametrize(("kind", "apart"), [("int8", 1 / 254), ("fp8", 1 / 16)])
def test_numbers_are_rounded_to_the_nearest(kind: str, apart: float) -> None:
    values = torch.randn(5, 64)
    values[2] = 0
    kept = QuantizedMatrix(torch.empty(5, 64, dtype=KINDS[kind]), torch.empty(5, 1))
    kept.copy_(values)
    largest = values.abs().amax(-1, keepdim=True)
    most = largest * apart if kind == "int8" else values.abs() * apart + largest / 448 / 512
    assert (kept.widen(torch.float32) - values).abs().le(most * 1.001).all()
    again = QuantizedMatrix(torch.empty_like(kept.numbers), torch.empty_like(kept.scales))
    again.copy_(kept.widen(torch.float32))
    assert torch.equal(again.numbers.float(), kept.numbers.float()), "what is rounded stays as it is"


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_changed_is_what_would_have_been_loaded(kind: Any, folder: Path, tmp_path: Path) -> None:
    other = make(tmp_path)
    named = {name: (value * 1.5).detach() for name, value in other.named_parameters()}
    other.load_state_dict(named)
    other.save_pretrained(tmp_path)
    options = replace(OPTIONS, weights=kind)
    with closing(TrainableEngine.open(folder, options)) as engine:
        asyncio.run(engine.update_weights(named, "2"))
        assert engine.weight_version == "2"
        changed: ModelWeights = engine._runner._weights  # type: ignore[union-attr]
        loaded, _, _ = open_torch(tmp_path, options)
        expected = meant(loaded._weights)
        assert all(torch.equal(value, expected[name]) for name, value in meant(changed).items())
        with pytest.raises(BadRequest, match="8 bits without scales"):
            asyncio.run(engine.update_weights({PRODUCT: named[PRODUCT].to(torch.float8_e4m3fn)}))


def test_an_adapter_is_added_to_what_they_stand_for(tmp_path: Path) -> None:
    model = make(tmp_path)
    named = adapters.weights_of(model, 3)
    poet = adapters.save(tmp_path / "poet", named)
    options = replace(OPTIONS, weights="int8", adapters={"poet": poet})
    with closing(LocalEngine.open(tmp_path, options)) as engine:
        rounded: ModelWeights = engine._runner._weights  # type: ignore[union-attr]
        model.load_state_dict(meant(rounded))

        async def ask() -> list[Step]:
            return await SubmittedJob(engine, adapters.job("a", ("poet", 1.0))).all()

        steps = asyncio.run(ask())
    expected = forward(adapters.merged(model, (named, 1.0)), ids(steps))
    assert logprobs(steps) == pytest.approx(expected, abs=1e-3)


# Folders that have eight bits already.


def save_quantized(source: Path, target: Path, scales: str, suffix: str, kind: str) -> dict[str, Any]:
    """As others save them; what they stand for."""
    target.mkdir()
    tensors, expected = load_file(source / "model.safetensors"), {}
    for name, value in [*tensors.items()]:
        expected[name] = value
        if value.ndim < 2 or "embed" in name or "lm_head" in name:
            continue
        rows, columns = value.shape
        side = {"tensor": (rows, columns), "row": (1, columns), "block": (32, 16)}[scales]
        padded = torch.nn.functional.pad(value, (0, -columns % side[1], 0, -rows % side[0]))
        blocks = padded.unflatten(1, (-1, side[1])).unflatten(0, (-1, side[0])).abs().amax((1, 3))
        factor = blocks / (448 if kind == "fp8" else 127)
        wide = factor.repeat_interleave(side[0], 0).repeat_interleave(side[1], 1)[:rows, :columns]
        numbers = value / wide
        tensors[name] = (numbers.round() if kind == "int8" else numbers).to(KINDS[kind])
        tensors[name + suffix] = factor.reshape(()) if scales == "tensor" else factor
        tensors[name.replace("weight", "input_scale")] = torch.ones(1)
        expected[name] = tensors[name].float() * wide
    save_file(tensors, target / "model.safetensors")
    (target / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    config = json.loads((source / "config.json").read_bytes())
    fields = {"quant_method": "fp8", "weight_block_size": [32, 16]}
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": fields}))
    return expected


@pytest.mark.parametrize(
    ("scales", "suffix", "kind"),
    [
        ("block", "_scale_inv", "fp8"),
        ("row", "_scale", "fp8"),
        ("tensor", "_scale", "fp8"),
        ("row", "_scale", "int8"),
    ],
)
def test_a_folder_of_eight_bits_is_read_as_what_it_means(
    scales: str, suffix: str, kind: str, folder: Path, tmp_path: Path
) -> None:
    expected = save_quantized(folder, tmp_path / "m", scales, suffix, kind)
    runner, _, _ = open_torch(tmp_path / "m", OPTIONS)
    fields = meant(runner._weights)
    assert fields.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(fields[name], expected[name], rtol=1e-6, atol=1e-8)
    if scales == "row":
        kept, _, _ = open_torch(tmp_path / "m", replace(OPTIONS, weights=kind))
        torch.testing.assert_close(meant(kept._weights)[PRODUCT], expected[PRODUCT], rtol=1e-6, atol=1e-8)
    with closing(TrainableEngine.open(folder, OPTIONS)) as engine:
        asyncio.run(engine.update_weights(tmp_path / "m"))
        trained: ModelWeights = engine._runner._weights  # type: ignore[union-attr]
        torch.testing.assert_close(meant(trained), fields)


def test_eight_bits_without_scales_are_told(tmp_path: Path) -> None:
    save_file({PRODUCT: torch.zeros(2, 2).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelFileError, match=f"{PRODUCT} in F8_E4M3 without the scales"):
        TensorFiles(tmp_path).read(PRODUCT)


@pytest.mark.parametrize(
    "told",
    [
        {"quant_method": "awq", "bits": 4},
        {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 4}}}},
        {"bits": 8},
    ],
)
def test_what_is_quantized_otherwise_is_told(told: dict[str, Any]) -> None:
    with pytest.raises(ModelFileError, match=r"quantized with .* use --engine vllm"):
        decoder_of({"model_type": "llama", "quantization_config": told})


def test_they_are_for_this_runner_alone(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf")
    with pytest.raises(SettingsError, match="`weights` is only for the runner torch"):
        LocalEngine.open(path, replace(OPTIONS, runner="llamacpp", weights="int8"))
    with closing(LocalEngine.open(path, replace(OPTIONS, context=64, weights="int8"))) as engine:
        assert "int8" in engine.card.details["runner"]
