"""Which of two runners is taken, by what they were seen to do."""

import logging
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from dragoman.engines.local import hardware, opening, runner_choice
from dragoman.engines.local.gguf_model import LlamaModel
from dragoman.engines.local.openvino.architectures import OpenVinoUnsupported, shape_of
from dragoman.engines.local.options import LocalOptions
from dragoman.engines.local.runner_benchmark import rate
from dragoman.engines.local.runner_choice import (
    CONTEXT,
    BenchmarkFailure,
    BenchmarkOrder,
    ConversionDone,
    Reply,
    RunnerChoice,
    RunnerComparison,
    RunnerMeasurement,
    UnsupportedFile,
    choose_runner,
    decide,
)
from tests.engines.local.openvino.conftest import write_model

MB = 10**6
LLAMA = RunnerMeasurement(one=100.0, many=200.0, prompt=300.0, memory=5000 * MB)
OPTIONS = LocalOptions(threads=1)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAGOMAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(runner_choice, "_SMALL", 0)
    monkeypatch.setattr(runner_choice, "_used_by_others", lambda: 0.0)


@pytest.fixture(scope="module")
def model(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> LlamaModel:
    file = write_model(tmp_path_factory.mktemp("models") / "model.gguf", weights)
    return LlamaModel(file, vocabulary_only=True)


class FakeBenchmarks:
    """Stands for the processes: what each runner would say, and how often it was asked."""

    def __init__(self, llamacpp: Reply, *openvino: Reply) -> None:
        self.replies = {"llamacpp": [llamacpp], "openvino": list(openvino)}
        self.orders: list[BenchmarkOrder] = []

    def __call__(self, order: BenchmarkOrder) -> Reply:
        self.orders.append(order)
        replies = self.replies[order.runner]
        return replies.pop(0) if len(replies) > 1 else replies[0]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeBenchmarks]:
    def ask(*replies: Reply) -> FakeBenchmarks:
        benchmarks = FakeBenchmarks(*replies)
        monkeypatch.setattr(runner_choice, "_ask", benchmarks)
        return benchmarks

    return ask


def choice_for(model: LlamaModel, options: LocalOptions) -> RunnerChoice:
    return choose_runner(model, shape_of(model.metadata), options)


def other(one: float = 1.0, many: float = 1.0, memory: float = 1.0, prompt: float = 1.0) -> RunnerMeasurement:
    """OpenVINO beside llama.cpp."""
    rates = LLAMA.one * one, LLAMA.many * many, LLAMA.prompt * prompt
    return RunnerMeasurement(*rates, int(LLAMA.memory * memory))


CLEAR = other(one=2.0, many=2.0)
"""So much faster that one benchmark is enough."""


@pytest.mark.parametrize(
    ("openvino", "readers", "runner"),
    [
        (other(), 1, "openvino"),
        (other(one=0.98), 1, "openvino"),
        (other(one=0.94, many=3.0), 1, "llamacpp"),
        (other(one=0.88, prompt=3.0), 1, "openvino"),
        (other(one=0.87, prompt=3.0), 1, "llamacpp"),
        (other(one=0.83, prompt=9.0), 1, "llamacpp"),
        (other(one=0.5, prompt=3.0), 1, "llamacpp"),
        (other(one=0.96, many=3.0), 8, "openvino"),
        (other(one=1.5, many=0.9), 8, "llamacpp"),
        (other(one=1.5, memory=1.09), 1, "openvino"),
        (other(one=1.5, memory=1.11), 1, "llamacpp"),
        (other(many=1.5, memory=1.8), 8, "openvino"),
    ],
)
def test_the_choice_for_so_many_readers(openvino: RunnerMeasurement, readers: int, runner: str) -> None:
    assert decide(RunnerComparison(8, LLAMA, openvino), openvino, readers).runner == runner


def test_keys_and_values_count_as_memory_of_both() -> None:
    heavy = other(one=1.5, memory=1.8)
    assert decide(RunnerComparison(8, LLAMA, heavy), heavy, 1, kept=30_000 * MB).runner == "llamacpp"
    assert decide(RunnerComparison(8, LLAMA, heavy), heavy, 1, kept=40_000 * MB).runner == "openvino"


def test_what_the_library_itself_takes_is_no_reason_against_it() -> None:
    small = replace(LLAMA, memory=200 * MB)
    for memory, runner in ((460, "openvino"), (480, "llamacpp")):
        openvino = replace(small, memory=memory * MB)
        assert decide(RunnerComparison(8, small, openvino), openvino, 1).runner == runner


def test_both_figures_are_told() -> None:
    openvino = other(one=0.5, many=4.0, memory=2.0, prompt=3.0)
    assert decide(RunnerComparison(8, LLAMA, openvino), openvino, 1).why == (
        "llama.cpp, selected for one client: decodes 100 tokens/s for one, 200 for 8, prefills 300, takes"
        " 5,000 MB; OpenVINO 50, 800, 900, 10,000 MB (--runner openvino)"
    )


@pytest.mark.parametrize(
    ("options", "readers", "measured"),
    [
        (LocalOptions(), 1, 8),
        (LocalOptions(slots=4), 4, 4),
        (LocalOptions(slots=4, readers=1), 1, 8),
        (LocalOptions(readers=200), 200, 32),
    ],
)
def test_for_how_many_readers(
    options: LocalOptions,
    readers: int,
    measured: int,
    model: LlamaModel,
    asked: Callable[..., FakeBenchmarks],
) -> None:
    processes = asked(LLAMA, CLEAR)
    why = choice_for(model, options).why
    assert f"selected for {'one client' if readers == 1 else f'{readers} clients'}:" in why
    assert {order.readers for order in processes.orders} == {measured}


def test_it_is_measured_once(model: LlamaModel, asked: Callable[..., FakeBenchmarks]) -> None:
    processes = asked(LLAMA, ConversionDone(), CLEAR)
    first = choice_for(model, OPTIONS)
    assert [order.runner for order in processes.orders] == ["llamacpp", "openvino", "openvino"]
    assert choice_for(model, replace(OPTIONS, name="other", context=CONTEXT)) == first
    assert len(processes.orders) == 3


@pytest.mark.parametrize("change", [{"threads": 2}, {"kv_cache": "int8"}, {"readers": 4}, {"readers": 8}])
def test_it_is_measured_again_for_what_may_change_it(
    change: dict[str, object], model: LlamaModel, asked: Callable[..., FakeBenchmarks]
) -> None:
    processes = asked(LLAMA, CLEAR)
    choice_for(model, OPTIONS)
    choice_for(model, replace(OPTIONS, **change))
    assert len(processes.orders) == 4


def test_what_is_close_is_measured_once_more_and_the_higher_rates_count(
    model: LlamaModel, asked: Callable[..., FakeBenchmarks]
) -> None:
    processes = asked(LLAMA, other(one=0.95, memory=1.01), other(one=1.05, memory=1.02, prompt=0.9))
    assert "llama.cpp 100, 200, 300, 5,000 MB" in (why := choice_for(model, OPTIONS).why)
    assert why.startswith("OpenVINO, selected for one client: decodes 105 tokens/s for one, 200 for 8, ")
    assert "prefills 300, takes 5,100 MB" in why
    assert [order.runner for order in processes.orders] == 2 * ["llamacpp", "openvino"]
    choice_for(model, OPTIONS)
    assert len(processes.orders) == 4


def test_another_file_of_the_same_name_is_measured(
    model: LlamaModel, tmp_path: Path, asked: Callable[..., FakeBenchmarks]
) -> None:
    processes = asked(LLAMA, CLEAR)
    choice_for(model, OPTIONS)
    data = model.path.read_bytes()
    same, differs = tmp_path / "same" / model.path.name, tmp_path / "differs" / model.path.name
    for file, last in ((same, data[-1]), (differs, data[-1] ^ 1)):
        file.parent.mkdir()
        file.write_bytes(data[:-1] + bytes([last]))
        choice_for(LlamaModel(file, vocabulary_only=True), OPTIONS)
        assert len(processes.orders) == (2 if file == same else 4)


def test_what_openvino_refuses_is_known_from_then_on(
    model: LlamaModel, asked: Callable[..., FakeBenchmarks]
) -> None:
    processes = asked(LLAMA, UnsupportedFile("it cannot be compiled"))
    for _ in range(2):
        with pytest.raises(OpenVinoUnsupported, match="cannot be compiled"):
            choice_for(model, OPTIONS)
    assert len(processes.orders) == 2


@pytest.mark.parametrize(
    ("replies", "runner", "why"),
    [
        (
            (BenchmarkFailure("no memory"), other()),
            "openvino",
            "the benchmark of llama.cpp failed (no memory)",
        ),
        (
            (LLAMA, BenchmarkFailure("it crashed")),
            "llamacpp",
            "the benchmark of OpenVINO failed (it crashed)",
        ),
        ((LLAMA, replace(other(), others=1e6)), "openvino", "the machine is busy"),
    ],
)
def test_without_figures_there_is_one_line_and_nothing_is_kept(
    replies: tuple[Reply, ...],
    runner: str,
    why: str,
    model: LlamaModel,
    asked: Callable[..., FakeBenchmarks],
    caplog: pytest.LogCaptureFixture,
) -> None:
    processes = asked(*replies)
    choice = choice_for(model, OPTIONS)
    assert (choice.runner, why in choice.why) == (runner, True)
    [line] = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert why in line.getMessage()
    before = len(processes.orders)
    choice_for(model, OPTIONS)
    assert len(processes.orders) == 2 * before


@pytest.mark.parametrize(
    ("four_bits", "readers", "runner"), [(True, 1, "llamacpp"), (True, 8, "openvino"), (False, 1, "openvino")]
)
def test_where_the_machine_is_busy_one_reader_of_four_bits_gets_llamacpp_until_it_is_not(
    four_bits: bool,
    readers: int,
    runner: str,
    weights: Path,
    tmp_path: Path,
    asked: Callable[..., FakeBenchmarks],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dragoman.engines.local.openvino.tensors.LARGE", 0)
    file = write_model(tmp_path / "model.gguf", weights, four_bits=four_bits)
    model, options = LlamaModel(file, vocabulary_only=True), LocalOptions(threads=1, readers=readers)
    processes = asked(LLAMA, replace(other(one=2.0), others=1e6), other(one=2.0, many=2.0))
    assert choice_for(model, options).runner == runner
    assert choice_for(model, options).runner == "openvino"
    assert len(processes.orders) == 4


def test_without_memory_for_it_openvino_is_not_taken(
    model: LlamaModel, asked: Callable[..., FakeBenchmarks], monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = asked(LLAMA, other(one=2.0))
    assert choice_for(model, OPTIONS).runner == "openvino"
    monkeypatch.setattr(hardware, "free_memory", lambda: 4000 * MB)
    assert "needs 5,000 MB and only 4,000 MB are free" in choice_for(model, OPTIONS).why
    monkeypatch.setattr(hardware, "free_memory", lambda: 1 * MB)
    assert "too little free memory" in choice_for(model, replace(OPTIONS, threads=2)).why
    assert len(processes.orders) == 2


def test_small_files_are_not_measured(
    model: LlamaModel, asked: Callable[..., FakeBenchmarks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_choice, "_SMALL", 1 << 30)
    processes = asked(LLAMA, other())
    assert "not benchmarked" in choice_for(model, OPTIONS).why
    assert not processes.orders


def test_what_is_chosen_is_opened(model: LlamaModel, asked: Callable[..., FakeBenchmarks]) -> None:
    asked(LLAMA, other(one=0.5))
    options = LocalOptions(context=64, slots=1, threads=1)
    opened = opening.open_model(model.path, options)
    opened.runner.close()
    assert opened.card.details["runner"].startswith("llama.cpp ")
    assert "--runner openvino" in opened.card.details["why"]


def test_both_runners_are_measured_in_processes(model: LlamaModel) -> None:
    """The file is new: the first one converts it."""
    openvino, llamacpp = (
        BenchmarkOrder(runner, str(model.path), OPTIONS, 2) for runner in ("openvino", "llamacpp")
    )
    first, *others = map(runner_choice._ask, (openvino, openvino, llamacpp))
    assert first == ConversionDone()
    for item in others:
        assert isinstance(item, RunnerMeasurement), item
        assert item.one > 0 and item.many > 0 and item.prompt > 0
        assert 10 * MB < item.memory < 4000 * MB


def test_a_file_that_is_damaged_is_told_by_the_process(weights: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(weights.read_bytes()[:20_000_000])
    reply = runner_choice._ask(BenchmarkOrder("llamacpp", str(damaged), OPTIONS, 2))
    assert isinstance(reply, BenchmarkFailure) and "incompletely downloaded" in reply.why


def test_a_process_that_crashes_or_hangs_is_told(model: LlamaModel, monkeypatch: pytest.MonkeyPatch) -> None:
    order = BenchmarkOrder("llamacpp", str(model.path), OPTIONS, 2)
    kill = f"import os; os.kill(os.getpid(), {int(signal.SIGSEGV)})"
    monkeypatch.setattr(runner_choice, "_CHILD", (sys.executable, "-c", kill))
    assert runner_choice._ask(order) == BenchmarkFailure("its process was ended by SIGSEGV")
    monkeypatch.setattr(runner_choice, "_CHILD", (sys.executable, "-c", "import time; time.sleep(600)"))
    monkeypatch.setattr(runner_choice, "_LIMIT_S", 0.1)
    reply = runner_choice._ask(order)
    assert isinstance(reply, BenchmarkFailure) and "took more than" in reply.why


def test_the_rate_is_not_that_of_steps_that_were_disturbed() -> None:
    assert rate({1: [9.0], 8: [4.0, 0.5, 0.25, 0.5]}, 8) == 16.0
