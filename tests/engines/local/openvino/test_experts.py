"""Mixtures of experts: what of them is computed."""

from collections import Counter
from pathlib import Path

import pytest

from dragoman.engines.local.openvino.compiled_graph import CompiledGraph, compile_graph
from dragoman.engines.local.openvino.conversion_cache import ensure_converted
from dragoman.engines.local.openvino.runner import OpenVinoRunner
from tests.engines.local.openvino.conftest import LAYERS, write_model


@pytest.fixture(scope="module")
def compiled(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> CompiledGraph:
    file = write_model(tmp_path_factory.mktemp("models") / "mixture.gguf", weights, "qwen3moe")
    return compile_graph(ensure_converted(file), threads=1, kv_cache="int8")


def test_only_the_chosen_experts_are_computed(compiled: CompiledGraph) -> None:
    nodes = compiled.body.get_runtime_model().get_ops()
    kinds = Counter(str(node.get_rt_info()["layerType"].astype(str)) for node in nodes)
    # Gate, up and down, as products that gather; rows that went to all experts would be tiled.
    assert (kinds["GatherMatmul"], kinds["Tile"]) == (3 * LAYERS, 0)


def test_a_guess_is_not_for_nothing(compiled: CompiledGraph) -> None:
    runner = OpenVinoRunner(compiled, slots=1, context=32, pages=1, batch=1)
    assert runner.step_overhead_rows < 3
    runner.close()
