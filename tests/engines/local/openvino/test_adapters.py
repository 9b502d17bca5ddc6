"""LoRA adapters, as OpenVINO applies them and as llama.cpp does."""

from pathlib import Path

import numpy as np
import pytest

from dragoman.engines.local.openvino.adapters import LoraAdapter, LoraTerm, read_adapters
from dragoman.engines.local.openvino.architectures import OpenVinoUnsupported
from dragoman.engines.local.openvino.compiled_graph import compile_graph
from dragoman.engines.local.openvino.conversion_cache import ensure_converted
from tests.engines.local.openvino.conftest import write_adapter, write_model
from tests.engines.local.openvino.test_models import about, difference


@pytest.mark.parametrize("architecture", ["llama", "phi3"])
def test_both_runners_change_a_model_in_the_same_way(
    architecture: str, weights: Path, tmp_path: Path
) -> None:
    """One has rows that are rotated in pairs, one weights that are one piece."""
    model = write_model(tmp_path / "model.gguf", weights, architecture)
    files = {name: str(write_adapter(tmp_path / name, model, seed)) for seed, name in enumerate("ab")}
    ours, theirs = about(model, "openvino", files), about(model, "llamacpp", files)
    assert difference(ours, theirs) < 0.3 < difference(ours, about(model, "llamacpp"))


@pytest.mark.parametrize(
    ("name", "rows", "why"),
    [("blk.9.attn_q.weight", 64, "model has not"), ("blk.0.attn_output.weight", 63, "different shape")],
)
def test_what_cannot_be_added(name: str, rows: int, why: str, weights: Path, tmp_path: Path) -> None:
    graph = ensure_converted(write_model(tmp_path / "model.gguf", weights))
    term = LoraTerm(np.ones((4, 64), np.float32), np.ones((rows, 4), np.float32))
    with pytest.raises(OpenVinoUnsupported, match=why):
        compile_graph(graph, threads=1, kv_cache="int8", adapters=[LoraAdapter("poet", {name: term})])


def test_an_adapter_of_another_model_is_not_read(weights: Path, tmp_path: Path) -> None:
    file = write_adapter(tmp_path / "adapter.gguf", write_model(tmp_path / "model.gguf", weights, "qwen2"))
    assert read_adapters({"poet": str(file)}, "qwen2")[0].terms
    with pytest.raises(OpenVinoUnsupported, match="'poet' cannot be read"):
        read_adapters({"poet": str(file)}, "llama")


def test_what_is_outside_of_layers_is_not_changed(weights: Path, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model.gguf", weights)
    file = write_adapter(tmp_path / "adapter.gguf", model, names="token_embd")
    with pytest.raises(OpenVinoUnsupported, match="'poet' changes token_embd"):
        read_adapters({"poet": str(file)}, "llama")
