"""LoRA adapters, written here: one that changes nothing, two that change something."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest

from dragoman.engines.local import LocalEngine, LocalOptions
from dragoman.errors import BadRequest, Conflict, ModelFileError
from dragoman.http.server import background
from dragoman.settings import Settings
from dragoman.types import Adapters, Step
from tests.engines.local.support import job
from tests.support.engines import SharedEngine
from tests.support.http import post

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


@pytest.fixture(scope="module", params=["llamacpp", "openvino"])
def adapted(
    request: pytest.FixtureRequest, weights: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalEngine]:
    if request.param == "openvino":
        pytest.importorskip("openvino", reason="OPENVINO IS NOT INSTALLED, so its adapters are not tested")
    folder = tmp_path_factory.mktemp("adapters")
    files = {}
    for seed, (name, strength) in enumerate({"nothing": 0.0, "red": 0.3, "blue": 0.3}.items()):
        files[name] = str(folder / f"{name}.gguf")
        write_adapter(Path(files[name]), seed, strength)
    options = LocalOptions(slots=4, context=256, batch=64, threads=1, adapters=files, runner=request.param)
    engine = LocalEngine.open(weights, options)
    yield engine
    engine.close()


async def answer(engine: LocalEngine, adapters: Adapters, salt: str) -> list[int]:
    prompt = engine.tokenizer.encode("The three most important things about the sea are")
    steps: list[Step] = [s async for s in engine.generate(job(prompt, 6, adapters=adapters, cache_salt=salt))]
    return [token for step in steps for token in step.ids]


def one(name: str, scale: float = 1.0) -> Adapters:
    return ((name, scale),)


def test_the_card_names_them(adapted: LocalEngine) -> None:
    assert set(adapted.card.adapters) == {"nothing", "red", "blue"}


def test_each_gives_its_own_answer_alone_and_together(adapted: LocalEngine) -> None:
    sets: list[Adapters] = [(), one("nothing"), one("red"), one("blue"), (("blue", 1.0), ("red", 1.0))]

    async def alone() -> list[list[int]]:
        return [await answer(adapted, adapters, "alone") for adapters in sets]

    async def together() -> list[list[int]]:
        return list(await asyncio.gather(*(answer(adapted, adapters, "together") for adapters in sets)))

    base, nothing, red, blue, both = asyncio.run(alone())
    assert base == nothing
    assert len({tuple(base), tuple(red), tuple(blue), tuple(both)}) == 4
    assert asyncio.run(together()) == [base, nothing, red, blue, both]


def test_a_scale_says_how_much_of_it_there_is(adapted: LocalEngine) -> None:
    async def scaled() -> list[list[int]]:
        return [await answer(adapted, one("red", scale), "scaled") for scale in (1.0, 0.0, -1.0)]

    full, none, reversed_ = asyncio.run(scaled())
    assert none == asyncio.run(answer(adapted, (), "scaled"))
    assert len({tuple(full), tuple(none), tuple(reversed_)}) == 3


def test_what_changes_nothing_changes_nothing_in_a_mixture(adapted: LocalEngine) -> None:
    async def compared() -> tuple[list[int], list[int]]:
        mixed = await answer(adapted, (("nothing", 5.0), ("red", 1.0)), "mixed")
        return mixed, await answer(adapted, one("red"), "mixed")

    mixed, alone = asyncio.run(compared())
    assert mixed == alone


def test_they_are_chosen_over_http(adapted: LocalEngine) -> None:
    def said(url: str, **asked: object) -> str:
        body = {"prompt": "The sea is", "max_tokens": 6, "temperature": 0, **asked}
        return str(post(url, "/v1/completions", body).json()["choices"][0]["text"])

    with background(SharedEngine(adapted), Settings(port=0)) as url:
        red = said(url, model="red")
        assert said(url, lora="red") == said(url, lora=[{"id": 1, "scale": 1}]) == red
        assert said(url, lora=[]) == said(url) != red
        mixture = [{"name": "red"}, {"name": "blue", "scale": 0.5}]
        assert len({said(url, lora=mixture), said(url, lora=mixture[::-1])} - {red, said(url)}) == 1


def test_one_comes_and_goes_while_the_engine_computes(adapted: LocalEngine, tmp_path: Path) -> None:
    """What it says is what the same says that was there from the start, and nothing changes for others."""
    write_adapter(tmp_path / "red.gguf", 1, 0.3)
    sets: list[Adapters] = [(), one("red"), one("blue")]

    async def told(salt: str, *more: Adapters) -> list[list[int]]:
        return list(await asyncio.gather(*(answer(adapted, each, salt) for each in (*sets, *more))))

    async def changed() -> None:
        before = await told("before")
        writing = asyncio.ensure_future(told("meanwhile"))
        await adapted.load_adapter("later", str(tmp_path / "red.gguf"))
        assert await writing == before
        assert await told("after", one("later")) == [*before, before[1]]
        await adapted.unload_adapter("later")
        with pytest.raises(BadRequest, match="no adapter 'later'"):
            await answer(adapted, one("later"), "")
        assert await told("before") == before

    asyncio.run(changed())
    assert set(adapted.card.adapters) == {"nothing", "red", "blue"}


def test_one_that_a_job_names_stays(adapted: LocalEngine) -> None:
    async def main() -> None:
        answers = adapted.generate(job(adapted.tokenizer.encode("The"), 64, adapters=one("red")))
        await anext(answers)
        with pytest.raises(Conflict, match="'red' is in use"):
            await adapted.unload_adapter("red")
        await answers.aclose()

    asyncio.run(main())


def test_what_is_no_adapter_is_not_loaded(adapted: LocalEngine, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF and nothing more")
    for file in (tmp_path / "x.gguf", tmp_path / "missing.gguf", tmp_path):
        with pytest.raises(ModelFileError):
            asyncio.run(adapted.load_adapter("x", str(file)))


def test_an_unknown_one_is_refused_with_the_names_there_are(adapted: LocalEngine) -> None:
    with pytest.raises(BadRequest, match="blue, nothing, red"):
        asyncio.run(answer(adapted, one("green"), ""))


def test_a_file_that_is_no_adapter(weights: Path, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF and nothing more")
    for file, reason in ((tmp_path / "x.gguf", "Adapter 'x'"), (tmp_path / "missing.gguf", "no file")):
        with pytest.raises(ModelFileError, match=reason):
            LocalEngine.open(weights, LocalOptions(slots=1, context=256, adapters={"x": str(file)}))
