"""Mixtures of experts: what of them is computed."""

from collections import Counter
from pathlib import Path

from dragoman.engines.local.openvino.compiled import compile_graph
from dragoman.engines.local.openvino.converted import converted
from tests.engines.local.openvino.conftest import LAYERS, write_model


def test_only_the_chosen_experts_are_computed(weights: Path, tmp_path: Path) -> None:
    graph = converted(write_model(tmp_path / "mixture.gguf", weights, "qwen3moe"))
    body = compile_graph(graph, threads=1, kv_cache="int8").body.get_runtime_model()
    kinds = Counter(str(node.get_rt_info()["layerType"].astype(str)) for node in body.get_ops())
    # Gate, up and down, as products that gather; rows that went to all experts would be tiled.
    assert (kinds["GatherMatmul"], kinds["Tile"]) == (3 * LAYERS, 0)
