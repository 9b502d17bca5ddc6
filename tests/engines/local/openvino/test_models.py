"""Every architecture, as OpenVINO runs it and as llama.cpp does."""

import asyncio
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from dragoman.engines.local import LocalEngine, LocalOptions
from dragoman.engines.local.openvino import conversion_cache as conversion
from dragoman.engines.local.openvino.conversion_cache import ensure_converted
from dragoman.errors import ModelFileError
from dragoman.types import TokenLogprob
from tests.engines.local.openvino.conftest import ARCHITECTURES, write_model
from tests.engines.local.support import job

PROMPT = list(range(1000, 1045))
OPTIONS = LocalOptions(slots=2, context=128, batch=32, threads=1)


def about(path: Path, runner: str, adapters: Mapping[str, str] | None = None) -> list[TokenLogprob]:
    """What a runner says of every token of a prompt, with all of the adapters."""
    chosen = tuple((name, 1.0) for name in sorted(adapters or ()))

    async def ask(engine: LocalEngine) -> list[TokenLogprob]:
        async for step in engine.generate(job(PROMPT, 1, prompt_logprobs=3, adapters=chosen)):
            return [entry for entry in step.prompt_logprobs or () if entry is not None]
        return []

    # llama.cpp as it is by itself, to be held against: int8 keys are further from the file.
    kept = "f16" if runner == "llamacpp" else OPTIONS.kv_cache
    options = replace(OPTIONS, runner=runner, kv_cache=kept, adapters=adapters or {})
    engine = LocalEngine.open(path, options)
    try:
        return asyncio.run(ask(engine))
    finally:
        engine.close()


def difference(ours: list[TokenLogprob], theirs: list[TokenLogprob]) -> float:
    return statistics.fmean(abs(one.logprob - other.logprob) for one, other in zip(ours, theirs, strict=True))


STRETCHED: dict[str, Any] = {"rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}
STRETCHES = [
    ("llama", {**STRETCHED, "rope.scaling.type": "linear"}),
    ("qwen2", {**STRETCHED, "rope.scaling.type": "yarn"}),
    ("gemma3", {**STRETCHED, "rope.scaling.type": "linear"}),
]


@pytest.mark.parametrize(("architecture", "more"), [*((name, {}) for name in ARCHITECTURES), *STRETCHES])
def test_both_runners_say_the_same_of_a_prompt(
    architecture: str, more: dict[str, Any], weights: Path, tmp_path: Path
) -> None:
    _check_agreement(write_model(tmp_path / "model.gguf", weights, architecture, more=more))


def test_both_runners_say_the_same_with_weights_of_four_bits(weights: Path, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model.gguf", weights, four_bits=True)
    _check_agreement(model)
    assert 'element_type="i4"' in ensure_converted(model).read_text()


def test_four_bits_may_be_wide_and_either_form_is_kept(weights: Path, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model.gguf", weights, four_bits=True)
    narrow, wide = ensure_converted(model), ensure_converted(model, wide=True)
    assert 'element_type="i4"' not in wide.read_text()
    assert (ensure_converted(model), ensure_converted(model, wide=True)) == (narrow, wide)
    assert len({narrow, wide}) == 2


def test_what_has_no_four_bits_is_the_same_either_way(weights: Path, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model.gguf", weights)
    assert ensure_converted(model) == ensure_converted(model, wide=True)


def _check_agreement(model: Path) -> None:
    ours, theirs = about(model, "openvino"), about(model, "llamacpp")
    assert len(ours) == len(PROMPT) - 1
    assert difference(ours, theirs) < 0.3
    same = sum(one.top[0][0] == other.top[0][0] for one, other in zip(ours, theirs, strict=True))
    assert same >= 0.75 * len(ours)


def test_a_file_is_converted_once(weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_model(tmp_path / "once.gguf", weights)
    first = ensure_converted(model)
    monkeypatch.setattr(conversion, "_convert", None)
    monkeypatch.setattr(conversion, "_digest", None)
    assert ensure_converted(model) == first


def test_the_same_content_elsewhere_is_not_converted_again(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model(tmp_path / "moved.gguf", weights)
    first = ensure_converted(model)
    monkeypatch.setattr(conversion, "_convert", None)
    other = tmp_path / "folder" / "moved.gguf"
    other.parent.mkdir()
    model.rename(other)
    assert ensure_converted(other) == first


def test_another_content_is_converted_anew(weights: Path, tmp_path: Path) -> None:
    model = write_model(tmp_path / "changed.gguf", weights, seed=1)
    first = ensure_converted(model)
    write_model(model, weights, seed=2)
    assert ensure_converted(model) != first


def test_a_folder_that_was_exported(weights: Path, tmp_path: Path) -> None:
    graph = ensure_converted(write_model(tmp_path / "folder.gguf", weights))
    folder = tmp_path / "exported"
    folder.mkdir()
    for name in (graph.name, graph.with_suffix(".bin").name):
        (folder / name).write_bytes((graph.parent / name).read_bytes())
    Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text('{"max_position_embeddings": 128}')
    ours, theirs = about(folder, "auto"), about(tmp_path / "folder.gguf", "openvino")
    assert ours == theirs


def test_a_folder_without_a_graph(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"openvino_model\.xml"):
        LocalEngine.open(tmp_path, replace(OPTIONS, runner="auto"))
