"""Every key of docs/figures.toml is one that its benchmark writes, from results that are made up."""

from collections.abc import Callable, Iterable

import pytest
from bench import (
    agent,
    alone,
    constrain,
    documented,
    engines,
    flat,
    genai,
    gpu,
    parse_tables,
    responses,
    serve_tables,
    step,
    stream,
)
from bench.drive import KINDS
from bench.figures import First, Load, Visit
from bench.gpu_watch import Pace
from bench.parse_cases import cases
from bench.parse_worker import OURS as OUR_PARSER
from bench.parse_worker import VLLM, Outcome
from bench.peers import LLAMA_CPP, OURS
from bench.ratios import Ratio
from bench.vllm_peers import PYTHON_FRONTEND, RUST_FRONTEND

LOADS = [
    Load(streams=streams, tokens=1, tokens_per_s=1.0, steady_per_s=1.0, first_p50_ms=1.0, first_p99_ms=1.0)
    for streams in (1, 8, 32, 128)
]
FIRSTS = ("fresh prefix", "known prefix", "known prefix, 8 streams")


def of_serve() -> Iterable[Ratio]:
    firsts = [First(case, 1.0, 1.0, 1, 1) for case in FIRSTS]
    return serve_tables.compared([Visit(server, LOADS, firsts, 1.0, 1.0) for server in (OURS, LLAMA_CPP)])


def of_alone() -> Iterable[Ratio]:
    servers = (OURS, LLAMA_CPP)
    return alone.compared([alone.Round(server, 1.0, 1.0) for server in servers], dict.fromkeys(servers, 1.0))


def of_genai() -> Iterable[Ratio]:
    return genai.compared(
        {side: [genai.GenaiResult([1.0] * 3, 2**20)] for side in genai.SIDES}, genai.Options()
    )


def of_flat() -> Iterable[Ratio]:
    options = flat.Options()

    def rounds(*numbers: int) -> list[flat.Round]:
        return [flat.Round(server, number, 1.0) for server in (OURS, LLAMA_CPP) for number in numbers]

    result = flat.Result(rounds(options.short, options.long), rounds(options.at_once, options.line))
    return flat.compared(result, options)


def of_step() -> Iterable[Ratio]:
    parts = [[step.Part(1.0, 1.0)]]
    return step.compared(
        [step.Case(runner, "its words", kind, parts) for runner in step.RUNNERS for kind in step.ASKED]
    )


def of_constrain() -> Iterable[Ratio]:
    servers = (OURS, LLAMA_CPP)
    return constrain.compared(
        [constrain.Round(server, way, 1.0, 1.0) for server in servers for way in constrain.WAYS]
    )


def of_engines() -> Iterable[Ratio]:
    servers = (OURS, PYTHON_FRONTEND, RUST_FRONTEND)
    return engines.compared([engines.Round(server, load, 1.0) for server in servers for load in LOADS])


def of_stream() -> Iterable[Ratio]:
    rounds = [stream.Round(1, 1, 1.0, 1.0, 1.0)]
    return stream.compared([stream._result(server, 64, rounds) for server in stream.SERVERS])


def of_responses() -> Iterable[Ratio]:
    return responses.compared([responses.Rate(way, 64, 1.0, 1.0, [1.0]) for way in responses.WAYS])


def of_gpu() -> Iterable[Ratio]:
    pace = Pace(streams=1, steps=1, tokens=1, step_ms=1.0, loop_ms=1.0, server_ms=1.0)
    ways = (gpu.HTTP, gpu.ALONE)
    return gpu.compared([gpu.Round(kind, way, pace, None) for kind in KINDS for way in ways])


def of_parse() -> Iterable[Ratio]:
    return parse_tables.compared(
        [
            Outcome(parser=one, case=case.name, mode="", long=case.long, tokens=1, right=True, rounds=[1.0])
            for case in cases(None)
            for one in (OUR_PARSER, VLLM)
        ]
    )


def of_agent() -> Iterable[Ratio]:
    templates = [figure.name.rpartition(",")[0] for figure in FIGURES["agent"] if "faster" in figure.key]
    turns = [1.0] * 20
    return agent.compared([agent.Case(name, inside=turns, vllm=turns, llamacpp=turns) for name in templates])


FIGURES: dict[str, list[documented.Figure]] = {}
for command in documented.read():
    FIGURES.setdefault(command.bench, []).extend(command.figures)
RESULTS: dict[str, Callable[[], Iterable[Ratio]]] = {
    name.removeprefix("of_"): make for name, make in list(globals().items()) if name.startswith("of_")
}


@pytest.mark.parametrize("name", sorted(FIGURES))
def test_documented_keys_are_measured(name: str) -> None:
    written = [ratio.key for ratio in RESULTS[name]()]
    assert len(set(written)) == len(written)
    assert not {figure.key for figure in FIGURES[name]} - set(written)
