"""LoRA adapters, written here: one that changes nothing, two that change something."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest

from dragoman.engines.local import LocalEngine, LocalOptions
from dragoman.errors import BadRequest, ModelFileError
from dragoman.types import Step
from tests.engines.local.support import job

WIDTH, RANK = 576, 4


def write_adapter(path: Path, seed: int, strength: float) -> None:
    """A LoRA of the first three layers' query projections; without strength, B is zero."""
    random = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(RANK))
    for layer in range(3):
        name = f"blk.{layer}.attn_q.weight"
        writer.add_tensor(f"{name}.lora_a", random.normal(size=(RANK, WIDTH)).astype(np.float32))
        b = strength * random.normal(size=(WIDTH, RANK))
        writer.add_tensor(f"{name}.lora_b", b.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def adapted(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEngine]:
    folder = tmp_path_factory.mktemp("adapters")
    files = {}
    for seed, (name, strength) in enumerate({"nothing": 0.0, "red": 0.3, "blue": 0.3}.items()):
        files[name] = str(folder / f"{name}.gguf")
        write_adapter(Path(files[name]), seed, strength)
    options = LocalOptions(slots=4, context=256, batch=64, threads=1, adapters=files)
    engine = LocalEngine.open(weights, options)
    yield engine
    engine.close()


async def answer(engine: LocalEngine, adapter: str | None, salt: str) -> list[int]:
    prompt = engine.tokenizer.encode("The three most important things about the sea are")
    steps: list[Step] = [s async for s in engine.generate(job(prompt, 6, adapter=adapter, cache_salt=salt))]
    return [token for step in steps for token in step.ids]


def test_the_card_names_them(adapted: LocalEngine) -> None:
    assert set(adapted.card.adapters) == {"nothing", "red", "blue"}


def test_each_gives_its_own_answer_alone_and_together(adapted: LocalEngine) -> None:
    names = [None, "nothing", "red", "blue"]

    async def alone() -> list[list[int]]:
        return [await answer(adapted, name, "alone") for name in names]

    async def together() -> list[list[int]]:
        return list(await asyncio.gather(*(answer(adapted, name, "together") for name in names)))

    base, nothing, red, blue = asyncio.run(alone())
    assert base == nothing
    assert len({tuple(base), tuple(red), tuple(blue)}) == 3
    assert asyncio.run(together()) == [base, nothing, red, blue]


def test_an_unknown_one_is_refused_with_the_names_there_are(adapted: LocalEngine) -> None:
    with pytest.raises(BadRequest, match="blue, nothing, red"):
        asyncio.run(answer(adapted, "green", ""))


def test_a_file_that_is_no_adapter(weights: Path, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF and nothing more")
    for file, reason in ((tmp_path / "x.gguf", "Adapter 'x'"), (tmp_path / "missing.gguf", "no file")):
        with pytest.raises(ModelFileError, match=reason):
            LocalEngine.open(weights, LocalOptions(slots=1, context=256, adapters={"x": str(file)}))
