"""Random conversations with tools, and the ids of every turn."""

import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from random import Random

import httpx

from dragoman.engines.default_weights import default_model
from dragoman.engines.local import LocalEngine, LocalOptions
from dragoman.http.server import background
from dragoman.settings import Settings
from tests.engines.vllm.conftest import BUILD, served
from tests.support.engines import RUNNER
from tests.support.talks import WAYS, Talk
from tests.torture.page import Row, progress, scaled

TALKS = 500


@contextmanager
def embedded() -> Iterator[str]:
    options = LocalOptions(runner=RUNNER, name="smollm2", context=2048, slots=4, threads=1)
    engine = LocalEngine.open(default_model(), options)
    settings = Settings(port=0, store="memory", trajectories=True, dialect="hermes")
    with background(engine, settings) as url:
        yield url


@contextmanager
def vllm() -> Iterator[str]:
    """The small model of random weights, of `make vllm`: what it says is as odd as can be."""
    assert (BUILD / "vllm_models" / "made").exists(), "`make vllm` fetches vLLM and makes its models"
    python, model = BUILD / "vllm" / "bin" / "python", BUILD / "vllm_models" / "tiny"
    # Reasoning, which this model would begin as often as not, is not written again by its template.
    keeping = ("--store", "memory", "--trajectories", "--dialect", "granite4")
    with tempfile.TemporaryDirectory() as folder:
        flags = ("--model", str(model), "--context", "4096", *keeping)
        with served(str(python), Path(folder) / "log", *flags) as server:
            yield server.url


def wrong(talk: Talk) -> list[str]:
    """The laws that it breaks."""
    laws = {"not what was sampled": talk.exact, "text became a control token": talk.text_is_text}
    return [law for law, kept in laws.items() if not kept]


def run(scale: float = 1.0, seed: int = 1) -> list[Row]:
    return talked(embedded(), "the embedded model", scaled(TALKS, scale), seed)


def over_vllm(scale: float = 1.0, seed: int = 1) -> list[Row]:
    return talked(vllm(), "vLLM", scaled(TALKS, scale), seed)


def talked(server: AbstractContextManager[str], name: str, talks: int, seed: int) -> list[Row]:
    broken = kept = turns = 0
    with server as url, httpx.Client(base_url=url, timeout=120) as client:
        for number in range(talks):
            chance = Random(seed + number)
            way, hold = list(WAYS.items())[number % len(WAYS)]
            talk = hold(client, chance, chance.randint(2, 4))
            turns, kept = turns + len(talk.sampled) - 1, kept + talk.goes_on
            if texts := wrong(talk):
                broken += 1
                print(f"{way}, seed {seed + number}: {', '.join(texts)}", flush=True)
            progress(number + 1, talks, "conversations")
    figure = f"{broken} ({kept:,} of {turns:,} turns go on from what was sampled)"
    return [Row(f"{talks:,} conversations with {name}: ids that were not sampled", figure, "0", not broken)]
