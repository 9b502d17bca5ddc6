"""`python -m tests.torture.trajectories`: random conversations with tools, and the ids of every turn."""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import httpx

from dragoman.engines.local import LocalEngine, LocalOptions
from dragoman.engines.weights import default_model
from dragoman.http.server import background
from dragoman.settings import Settings
from tests.engines.vllm.conftest import BUILD, served
from tests.support.talks import WAYS, Talk


@contextmanager
def embedded() -> Iterator[str]:
    engine = LocalEngine.open(default_model(), LocalOptions(name="smollm2", context=2048, slots=4, threads=1))
    settings = Settings(port=0, store="memory", trajectories=True, dialect="hermes")
    with background(engine, settings) as url:
        yield url


@contextmanager
def vllm() -> Iterator[str]:
    """The small model of random weights, of `make vllm`: what it says is as odd as can be."""
    python, model = BUILD / "vllm" / "bin" / "python", BUILD / "vllm_models" / "tiny"
    # Reasoning, which this model would begin as often as not, is not written again by its template.
    keeping = ("--store", "memory", "--trajectories", "--dialect", "granite4")
    with tempfile.TemporaryDirectory() as folder:
        flags = ("--model", str(model), "--context", "4096", *keeping)
        with served(str(python), Path(folder) / "log", *flags) as server:
            yield server.url


ENGINES = {"local": embedded, "vllm": vllm}


def wrong(talk: Talk) -> list[str]:
    """The laws that it breaks."""
    laws = {"not what was sampled": talk.exact, "text became a control token": talk.text_is_text}
    return [law for law, kept in laws.items() if not kept]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torture.trajectories", description=__doc__)
    parser.add_argument("--talks", type=int, default=500, help="conversations in all [default: 500]")
    parser.add_argument("--engine", choices=ENGINES, default="local", help="[default: local]")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    args = parser.parse_args()
    if args.engine == "vllm" and not (BUILD / "vllm_models" / "made").exists():
        parser.error("`make vllm` fetches vLLM and makes its models: run it first")
    broken = kept = turns = 0
    with ENGINES[args.engine]() as url, httpx.Client(base_url=url, timeout=120) as client:
        for number in range(args.talks):
            chance = Random(args.seed + number)
            way, hold = list(WAYS.items())[number % len(WAYS)]
            talk = hold(client, chance, chance.randint(2, 4))
            turns, kept = turns + len(talk.sampled) - 1, kept + talk.goes_on
            if found := wrong(talk):
                broken += 1
                print(f"\n{way}, seed {args.seed + number}: {', '.join(found)}", flush=True)
            print(f"\r{number + 1} of {args.talks} conversations, {kept} of {turns} turns kept", end="")
    print(f"\n{args.talks - broken} of {args.talks} conversations exact; seed {args.seed}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
