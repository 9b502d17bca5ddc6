"""LoRA adapters: what they say is what a model says that they were merged into."""

import asyncio
import copy
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="TORCH IS NOT INSTALLED: make torch")

from dragoman.engines.local import LocalEngine, LocalOptions  # noqa: E402
from dragoman.engines.protocol import AdapterEngine  # noqa: E402
from dragoman.errors import BadRequest, DragomanError, ModelFileError  # noqa: E402
from dragoman.types import Job, Sampling, Step  # noqa: E402
from tests.engines.local.contract.subject import SubmittedJob, ids  # noqa: E402
from tests.engines.local.pytorch.models import make  # noqa: E402

OPTIONS = LocalOptions(runner="torch", slots=4, context=256, batch=64, chunk=32, threads=1)
PROMPT = tuple(range(40, 80))
RANK, ALPHA = 4, 6.0
PARTS = {"self_attn": ("q_proj", "v_proj", "o_proj"), "mlp": ("up_proj", "down_proj")}
CONFIG = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", "target_modules": ["q_proj"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("qwen2")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return make(folder, "qwen2")


@pytest.fixture
def engine(model: Any, folder: Path) -> Iterator[LocalEngine]:
    with closing(LocalEngine.open(folder, OPTIONS)) as local_engine:
        yield local_engine


def weights_of(model: Any, seed: int) -> dict[str, Any]:
    """By names as PEFT writes them."""
    torch.manual_seed(seed)
    fields = {}
    for number, layer in enumerate(model.model.layers):
        for room, parts in PARTS.items():
            for part in parts:
                width = getattr(getattr(layer, room), part).weight.shape
                name = f"base_model.model.model.layers.{number}.{room}.{part}"
                fields[f"{name}.lora_A.weight"] = torch.randn(RANK, width[1]) * 0.2
                fields[f"{name}.lora_B.weight"] = torch.randn(width[0], RANK) * 0.2
    return fields


def save(folder: Path, named: dict[str, Any], **more: Any) -> str:
    from safetensors.torch import save_file

    folder.mkdir()
    save_file(named, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | more))
    return str(folder)


def merged(model: Any, *adapters: tuple[dict[str, Any], float]) -> Any:
    other = copy.deepcopy(model)
    for named, scale in adapters:
        for key in [each for each in named if each.endswith("lora_A.weight")]:
            path = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            b = named[key.replace("lora_A", "lora_B")]
            other.get_submodule(path).weight.data += scale * ALPHA / RANK * (b @ named[key])
    return other


def job(name: str, *adapters: tuple[str, float], count: int = 8) -> Job:
    sampling = Sampling(max_tokens=count, logprobs=0, seed=3, temperature=1.0, ignore_eos=True)
    return Job(id=name, prompt=PROMPT, sampling=sampling, adapters=adapters)


def check(steps: list[Step], model: Any) -> None:
    numbers = ids(steps)
    with torch.no_grad():
        rows = model(torch.tensor([[*PROMPT, *numbers]])).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    expected = rows.gather(1, torch.tensor(numbers)[:, None])[:, 0].tolist()
    values = [entry.logprob for step in steps for entry in step.logprobs or ()]
    assert values == pytest.approx(expected, abs=2e-3)


def test_answers_with_different_adapters_are_computed_together(
    engine: LocalEngine, model: Any, tmp_path: Path
) -> None:
    assert isinstance(engine, AdapterEngine)
    first, second = weights_of(model, 1), weights_of(model, 2)

    async def main() -> list[list[Step]]:
        await engine.load_adapter("first", save(tmp_path / "first", first))
        await engine.load_adapter("second", save(tmp_path / "second", second))
        jobs = [
            job("a"),
            job("b", ("first", 1.0)),
            job("c", ("second", 1.0)),
            job("d", ("first", 0.5), ("second", -0.25)),
        ]
        heard = [SubmittedJob(engine, one) for one in jobs]
        return [await each.all() for each in heard]

    items = asyncio.run(main())
    asked: list[list[tuple[dict[str, Any], float]]] = [
        [],
        [(first, 1.0)],
        [(second, 1.0)],
        [(first, 0.5), (second, -0.25)],
    ]
    for steps, adapters in zip(items, asked, strict=True):
        check(steps, merged(model, *adapters))


def test_one_that_was_unloaded_leaves_the_others(engine: LocalEngine, model: Any, tmp_path: Path) -> None:
    kept = weights_of(model, 2)

    async def main() -> list[Step]:
        await engine.load_adapter("gone", save(tmp_path / "gone", weights_of(model, 1)))
        await engine.load_adapter("kept", save(tmp_path / "kept", kept, use_rslora=True))
        await engine.unload_adapter("gone")
        with pytest.raises(BadRequest, match="no adapter 'gone'; loaded: kept"):
            engine.submit(job("x", ("gone", 1.0)), lambda step: None)
        return await SubmittedJob(engine, job("a", ("kept", 1.0))).all()

    check(asyncio.run(main()), merged(model, (kept, RANK**0.5)))


def test_adapters_from_the_start(model: Any, folder: Path, tmp_path: Path) -> None:
    named = weights_of(model, 1)
    adapters = {"poet": save(tmp_path / "poet", named)}
    options = LocalOptions(runner="torch", slots=2, context=256, threads=1, adapters=adapters)
    with closing(LocalEngine.open(folder, options)) as engine:
        assert engine.card.adapters == ("poet",)

        async def main() -> list[Step]:
            return await SubmittedJob(engine, job("a", ("poet", 1.0))).all()

        check(asyncio.run(main()), merged(model, (named, 1.0)))


def test_what_it_cannot_load_is_told(engine: LocalEngine, model: Any, tmp_path: Path) -> None:
    good = weights_of(model, 1)
    name = next(iter(good))
    tries: list[tuple[dict[str, Any], dict[str, Any], type[DragomanError], str]] = [
        (good, {"use_dora": True}, BadRequest, "not plain LoRA"),
        (good, {"peft_type": "IA3"}, BadRequest, "not plain LoRA"),
        (good, {"r": "four"}, ModelFileError, "adapter_config.json"),
        (good | {name: torch.zeros(RANK, 3)}, {}, BadRequest, "different shape"),
        ({"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 4)}, {}, BadRequest, "lm_head"),
        ({}, {}, ModelFileError, "no adapter"),
    ]
    for number, (named, more, error, text) in enumerate(tries):
        with pytest.raises(error, match=text):
            asyncio.run(engine.load_adapter("bad", save(tmp_path / f"{number}", named, **more)))
    with pytest.raises(ModelFileError, match="not a folder with"):
        asyncio.run(engine.load_adapter("bad", str(tmp_path / "nowhere")))
