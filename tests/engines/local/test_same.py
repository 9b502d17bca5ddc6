"""The same question gets the same answer, over the real model. `python -m bench.same` asks more of them."""

import asyncio
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench.runner_texts import prompts
from bench.same import GeneratedAnswer, Question, ask, questions, samplings
from bench.shapes import Shape, read_vocabulary, write
from msgspec.structs import replace

from dragoman.engines.local import LocalEngine, LocalOptions
from dragoman.engines.local.opening import open_model
from dragoman.engines.local.options import KVDtypeOption
from dragoman.engines.local.runner import AnyRunner, StepRows
from dragoman.engines.sampling import Logits

LENGTH = 530


@pytest.mark.parametrize("kind", [0, 1], ids=["greedy", "seeded"])
def test_company_and_known_prefixes_change_nothing(local_engine: LocalEngine, kind: int) -> None:
    alone, beside_others = answers(local_engine, 3, kind)
    assert alone == beside_others


@pytest.mark.parametrize("kind", [0, 1], ids=["greedy", "seeded"])
def test_nor_do_they_with_llamacpp(weights: Path, kind: int) -> None:
    options = LocalOptions(runner="llamacpp", threads=1, slots=4, context=1024)
    # With keys in float16 its attention has another way from 64 tokens on, and for one row from 512 on.
    with closing(LocalEngine.open(weights, options)) as engine:
        for repeated in (12, 60):
            alone, beside_others = answers(engine, repeated, kind)
            assert alone == beside_others


@pytest.mark.parametrize(("kv_cache", "readers"), [("auto", 1), ("auto", 2), ("int8", 2), ("bf16", 2)])
def test_nor_does_where_a_prompt_is_cut_with_llamacpp(
    weights: Path, kv_cache: KVDtypeOption, readers: int
) -> None:
    options = LocalOptions(
        runner="llamacpp", kv_cache=kv_cache, readers=readers, threads=2, slots=2, context=768
    )
    runner = open_model(weights, options).runner
    with closing(runner):
        runner.warm_up()
        whole, pieces = (
            read(runner, 0, 512),
            read(runner, 1, 60 if runner.prefill_block == 1 else runner.prefill_block),
        )
        assert np.array_equal(whole, pieces)
        alone, beside = StepRows(), StepRows()
        alone.add(0, LENGTH, 7)
        beside.add(1, LENGTH, 7)
        beside.extend(0, LENGTH + 1, [8, 9], [False, False])
        # A single row has another way from 512 tokens on where keys and values are float16.
        row = runner.step(alone)[0].copy()
        assert np.array_equal(row, runner.step(beside)[0])


SHAPES = {"dense": Shape(2, 256, 512, 4, 2), "experts": Shape(2, 512, 512, 8, 2, experts=32)}


@pytest.fixture(scope="module", params=SHAPES)
def wide(weights: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A small file in Q4_K and Q6_K, whose products round otherwise for few rows than for many."""
    file = tmp_path_factory.mktemp("models") / "wide.gguf"
    write(file, SHAPES[request.param], "Q4_K_M", read_vocabulary(weights))
    return file


WAYS = {
    "one reader": LocalOptions(readers=1),
    "some": LocalOptions(readers=8),
    "some, bf16": LocalOptions(readers=8, kv_cache="bf16"),
    "several": LocalOptions(readers=32, deterministic=True),
}
PROMISED = [("dense", way) for way in WAYS] + [("experts", way) for way in ("one reader", "several")]


@pytest.mark.parametrize(("wide", "way"), PROMISED, indirect=["wide"])
@pytest.mark.parametrize("kind", [0, 1], ids=["greedy", "seeded"])
def test_nor_do_they_with_k_kinds_and_experts(wide: Path, kind: int, way: str) -> None:
    options = replace(WAYS[way], runner="llamacpp", threads=1, slots=8, context=1024)
    with closing(LocalEngine.open(wide, options)) as engine:

        async def all_ways() -> list[list[GeneratedAnswer]]:
            asked = await questions(engine, 8, tokens=8)
            ways = [(0, False), (0, True), (3, False), (7, True)]
            return [
                await ask(engine, asked, samplings(8)[kind], company=company, known=known)
                for company, known in ways
            ]

        alone, *others = asyncio.run(all_ways())
    assert others == [alone] * 3


OWN = "f16 keys and values"


@pytest.mark.parametrize(
    ("kind", "asked", "kept", "evenly"),
    [
        ("Q8_0", {"readers": 1}, OWN, True),
        ("Q8_0", {"readers": 2}, "int8 keys and f16 values", False),
        ("Q8_0", {"readers": 2, "deterministic": True}, "int8 keys and f16 values", True),
        ("Q8_0", {"readers": 1, "kv_cache": "f16"}, OWN, False),
        ("Q8_0", {"readers": 1, "kv_cache": "f16", "deterministic": True}, OWN, True),
        ("Q8_0", {"readers": 1, "flash_attention": False}, OWN, False),
        ("Q4_K_M", {"readers": 1}, OWN, True),
        ("Q4_K_M", {"readers": 2}, "int8 keys and f16 values", True),
        ("Q4_K_M", {"readers": 2, "kv_cache": "f16"}, OWN, False),
        ("Q4_K_M", {"readers": 2, "kv_cache": "bf16"}, "bf16 keys and values", True),
        ("Q4_K_M", {"readers": 2, "kv_cache": "int8"}, "int8 keys and values", True),
        # Int8 would cost them speed, and bring them nothing.
        ("Q4_K_M", {"readers": 9}, OWN, False),
        ("Q4_K_M", {"readers": 9, "deterministic": True}, "int8 keys and f16 values", True),
    ],
)
def test_nobody_pays_for_more_than_is_promised(
    weights: Path, tmp_path: Path, kind: str, asked: dict[str, Any], kept: str, evenly: bool
) -> None:
    write(tmp_path / "model.gguf", SHAPES["dense"], kind, read_vocabulary(weights))
    options = LocalOptions(runner="llamacpp", threads=1, slots=2, context=128, **asked)
    opened = open_model(tmp_path / "model.gguf", options)
    with closing(opened.runner):
        text = opened.card.details["runner"]
    assert text.startswith(f"llama.cpp with {kept}")
    assert ("answers" in text) is evenly


def test_nothing_is_promised_to_several_readers_of_experts(weights: Path, tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", SHAPES["experts"], "Q8_0", read_vocabulary(weights))
    options = LocalOptions(runner="llamacpp", threads=1, slots=2, readers=2, context=128)
    opened = open_model(tmp_path / "model.gguf", options)
    with closing(opened.runner):
        assert opened.card.details["runner"] == f"llama.cpp with {OWN}"


def read(runner: AnyRunner, slot: int, piece: int) -> Logits:
    """What comes after a prompt, read in pieces."""
    start, whole = 0, LENGTH // runner.prefill_block * runner.prefill_block
    while start < LENGTH:
        rows, end = StepRows(), min(start + piece, whole if start < whole else LENGTH)
        rows.extend(slot, start, range(start, end), [False] * (end - start - 1) + [True])
        if start < whole:
            rows.in_blocks.add(slot)
        logits: Logits = runner.step(rows)[0].copy()
        start = end
    return logits


def answers(
    engine: LocalEngine, repeated: int, kind: int
) -> tuple[list[GeneratedAnswer], list[GeneratedAnswer]]:
    """Alone with a fresh prefix, and beside three others with a known one."""
    firsts = [tuple(engine.tokenizer.encode(words)) for words in prompts(4)]
    asked = [Question(first * repeated, (*first, *first[:2], 1)) for first in firsts]
    sampling = samplings(8)[kind]

    async def both() -> tuple[list[GeneratedAnswer], list[GeneratedAnswer]]:
        alone = await ask(engine, asked, sampling, company=0, known=False)
        return alone, await ask(engine, asked, sampling, company=3, known=True)

    return asyncio.run(both())
