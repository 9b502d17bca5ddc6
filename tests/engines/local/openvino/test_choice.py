"""Which runner is taken, and what is said about it."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.engines.local import hardware, opening
from dragoman.engines.local.openvino.architectures import FAMILIES, OpenVinoUnsupported, shape_of
from dragoman.engines.local.options import LocalOptions
from dragoman.errors import ModelFileError
from tests.engines.local.openvino.conftest import write_model
from tests.support.tiny_gguf import write_tiny

LLAMA = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.embedding_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
}


def test_the_measures_of_a_model() -> None:
    shape = shape_of(LLAMA)
    assert (shape.layers, shape.heads, shape.kv_heads, shape.head, shape.family.paired) == (2, 4, 2, 16, True)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"general.architecture": "mamba"}, "mamba"),
        ({"llama.expert_count": 8}, "experts"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.yarn_beta_fast": 16.0}, "yarn"),
        ({"general.architecture": "gemma2", "gemma2.attn_logit_softcapping": 50.0}, "attention has"),
        ({"llama.final_logit_softcapping": 30.0}, "logits have a soft cap"),
        ({"llama.attention.value_length": 8}, "different widths"),
        ({"llama.attention.head_count_kv": "[4, 2]"}, "head_count_kv differs between layers"),
        ({"llama.attention.head_count_kv": [4, 2]}, "head_count_kv differs between layers"),
        ({"llama.attention.head_count_kv": 3}, "not a multiple of its key heads"),
        ({"llama.attention.head_count": 0}, "head_count cannot be 0"),
        ({"llama.block_count": "many"}, "block_count is not a number"),
        ({"llama.attention.key_length": 2**40}, "key_length cannot be"),
        ({"llama.rope.dimension_count": 5}, "rotated in pairs"),
    ],
)
def test_what_it_cannot_run(changed: dict[str, Any], why: str) -> None:
    with pytest.raises(OpenVinoUnsupported, match=why):
        shape_of(LLAMA | changed)


def test_a_list_of_one_number_is_that_number() -> None:
    assert shape_of(LLAMA | {"llama.attention.head_count_kv": "[2, 2]"}) == shape_of(LLAMA)


odd = st.one_of(
    st.integers(-5, 2**40),
    st.floats(),
    st.booleans(),
    st.sampled_from(["", "[]", "[2, 2]", "[4, nan]", "yarn", "linear", "1e999", "0.0", "7" * 400]),
    st.lists(st.one_of(st.integers(-1, 64), st.text(max_size=3)), max_size=3),
)
KEYS = [
    *("block_count", "context_length", "embedding_length", "expert_used_count", "logit_scale"),
    *("residual_scale", "embedding_scale", "rope.freq_base", "rope.freq_base_swa", "rope.dimension_count"),
    *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"),
    *(f"attention.{name}" for name in ("head_count", "head_count_kv", "key_length", "value_length", "scale")),
    *("attention.sliding_window", "attention.layer_norm_rms_epsilon"),
]


@given(st.sampled_from(sorted(FAMILIES)), st.dictionaries(st.sampled_from(KEYS), odd, max_size=4))
def test_of_odd_measures_it_is_said_why_not(architecture: str, changed: dict[str, Any]) -> None:
    """Or a graph can be made of them, as far as its measures go."""
    usual = {key.replace("llama", architecture): value for key, value in LLAMA.items()}
    usual["general.architecture"] = architecture
    try:
        shape = shape_of(usual | {f"{architecture}.{key}": value for key, value in changed.items()})
    except OpenVinoUnsupported:
        return
    assert shape.layers > 0 and shape.head > 0 and shape.heads % shape.kv_heads == 0
    for rotation in (shape.rotation, shape.local_rotation):
        assert len(rotation.speeds()) == rotation.width // 2 <= shape.head
        assert all(isinstance(speed, float) for speed in rotation.speeds())


def test_a_file_that_tells_heads_layer_by_layer(tmp_path: Path) -> None:
    options = LocalOptions(runner="openvino", slots=1, context=64, threads=1)
    opened = opening.open_model(write_tiny(tmp_path / "even.gguf", layers=2, kv_heads=[2, 2]), options)
    opened.runner.close()
    with pytest.raises(ModelFileError, match="head_count_kv differs between layers"):
        opening.open_model(write_tiny(tmp_path / "odd.gguf", layers=2, kv_heads=[2, 1]), options)


def test_tensors_that_do_not_go_with_the_measures_are_told_of(weights: Path, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model.gguf", weights, more={"attention.head_count": 8})
    with pytest.raises(ModelFileError, match="tensors do not match its architecture"):
        opening.open_model(model, LocalOptions(runner="openvino", slots=1, context=64, threads=1))


@pytest.mark.parametrize(
    ("missing", "why"),
    [("package", "pip install 'dragoman[openvino]'"), ("cpu", "VNNI")],
)
def test_auto_falls_back_and_says_why(
    missing: str, why: str, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing == "package":
        monkeypatch.setattr(opening, "find_spec", lambda name: None)
    else:
        monkeypatch.setattr(hardware, "cpu_flags", lambda: frozenset({"avx2"}))
    model = write_model(tmp_path / "model.gguf", weights)
    opened = opening.open_model(model, LocalOptions(runner="auto", slots=1, context=64, threads=1))
    assert opened.card.details["runner"].startswith("llama.cpp ")
    assert why in opened.card.details["why"]
    opened.runner.close()


def test_who_asks_for_openvino_is_told_why_not(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "find_spec", lambda name: None)
    with pytest.raises(ModelFileError, match="not installed"):
        opening.open_model(tmp_path / "model.gguf", LocalOptions(runner="openvino"))
