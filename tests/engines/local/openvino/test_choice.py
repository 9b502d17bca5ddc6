"""Which runner is taken, and what is said about it."""

from pathlib import Path
from typing import Any

import pytest

from dragoman.engines.local import machine, opening
from dragoman.engines.local.openvino.family import NotForOpenVino, shape_of
from dragoman.engines.local.options import LocalOptions
from dragoman.errors import ModelFileError
from tests.engines.local.openvino.conftest import write_model

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
        ({"llama.attention.value_length": 8}, "same width"),
    ],
)
def test_what_it_cannot_run(changed: dict[str, Any], why: str) -> None:
    with pytest.raises(NotForOpenVino, match=why):
        shape_of(LLAMA | changed)


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
        monkeypatch.setattr(machine, "cpu_flags", lambda: frozenset({"avx2"}))
    model = write_model(tmp_path / "model.gguf", weights)
    opened = opening.open_model(model, LocalOptions(runner="auto", slots=1, context=64, threads=1))
    assert opened.card.details["runner"] == "llama.cpp"
    assert why in opened.card.details["why"]
    opened.runner.close()


def test_who_asks_for_openvino_is_told_why_not(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "find_spec", lambda name: None)
    with pytest.raises(ModelFileError, match="not installed"):
        opening.open_model(tmp_path / "model.gguf", LocalOptions(runner="openvino"))
