"""Weights that are changed while the engine serves, and log probabilities that are those of the weights."""

import asyncio
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="TORCH IS NOT INSTALLED: make torch")

from dragoman.engines.local import LocalEngine, LocalOptions, TrainableEngine  # noqa: E402
from dragoman.engines.protocol import PausableEngine  # noqa: E402
from dragoman.errors import BadRequest, DragomanError, ModelFileError  # noqa: E402
from dragoman.types import Job, Sampling, Step  # noqa: E402
from tests.engines.local.contract.subject import SubmittedJob, ids  # noqa: E402
from tests.engines.local.pytorch.models import make  # noqa: E402
from tests.engines.local.scripted import engine_over  # noqa: E402
from tests.engines.local.support import FakeRunner  # noqa: E402

OPTIONS = LocalOptions(runner="torch", slots=4, context=256, batch=64, chunk=32, threads=1)
PROMPT = [*range(40, 80)]
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llama")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return make(folder)


@pytest.fixture
def engine(model: Any, folder: Path) -> Iterator[TrainableEngine]:
    with closing(TrainableEngine.open(folder, OPTIONS)) as trainable_engine:
        yield trainable_engine


def job(count: int, name: str = "a", **kinds: Any) -> Job:
    sampling = Sampling(max_tokens=count, logprobs=0, seed=1, ignore_eos=True, **kinds)
    return Job(id=name, prompt=tuple(PROMPT), sampling=sampling)


def answer(engine: TrainableEngine, count: int = 12, **kinds: Any) -> list[Step]:
    async def main() -> list[Step]:
        return [step async for step in engine.generate(job(count, **kinds))]

    return asyncio.run(main())


def logprobs(steps: list[Step]) -> list[float]:
    return [entry.logprob for step in steps for entry in step.logprobs or ()]


def forward(model: Any, said: list[int]) -> list[float]:
    """What a plain pass over the whole says of an answer."""
    with torch.no_grad():
        rows = model(torch.tensor([[*PROMPT, *said]])).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    values: list[float] = rows.gather(1, torch.tensor(said)[:, None])[:, 0].tolist()
    return values


def changed(model: Any, by: float) -> dict[str, Any]:
    torch.manual_seed(7)
    return {
        name: (weight + by * torch.randn_like(weight)).detach() for name, weight in model.named_parameters()
    }


def with_weights(model: Any, named: Mapping[str, Any]) -> Any:
    import copy

    other = copy.deepcopy(model)
    other.load_state_dict(dict(named))
    return other


class StepGate:
    """Stands before a runner's steps, and lets so many pass."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._step = runner.step
        self._left = 0
        self._change = threading.Condition()
        self._waits = False

    def __enter__(self) -> "StepGate":
        self._runner.step = self._pass
        return self

    def __exit__(self, *error: object) -> None:
        self.open()
        del self._runner.step

    def _pass(self, rows: Any) -> Any:
        with self._change:
            self._waits = self._left <= 0
            self._change.notify_all()
            self._change.wait_for(lambda: self._left > 0)
            self._left -= 1
            self._waits = False
        return self._step(rows)

    def open(self) -> None:
        with self._change:
            self._left = 1 << 30
            self._change.notify_all()

    async def pass_through(self, count: int) -> None:
        """Return when the next step waits."""
        with self._change:
            self._left += count
            self._change.notify_all()

        def wait() -> None:
            with self._change:
                self._change.wait_for(lambda: self._waits and not self._left)

        await asyncio.to_thread(wait)


def test_it_is_an_engine_that_is_trained(model: Any, folder: Path) -> None:
    with closing(LocalEngine.open(folder, OPTIONS)) as engine:
        assert isinstance(engine, PausableEngine)


@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_log_probabilities_are_those_of_a_plain_pass(
    engine: TrainableEngine, model: Any, heat: float
) -> None:
    steps = answer(engine, temperature=heat)
    assert logprobs(steps) == pytest.approx(forward(model, ids(steps)), abs=1e-3)


def test_also_after_an_update(engine: TrainableEngine, model: Any) -> None:
    named = changed(model, 0.05)
    before = answer(engine, temperature=1.0)
    asyncio.run(engine.update_weights(named, "2"))
    steps = answer(engine, temperature=1.0)
    assert steps[0].cached_tokens == 0, "what the old weights have read is of no use"
    assert {step.weight_version for step in before} == {None}
    assert {step.weight_version for step in steps} == {"2"}
    assert logprobs(steps) == pytest.approx(forward(with_weights(model, named), ids(steps)), abs=1e-3)


def test_answers_at_work_go_on_with_the_new_weights(engine: TrainableEngine, model: Any) -> None:
    named = changed(model, 0.05)

    async def main(allowed: StepGate) -> list[list[Step]]:
        heard = [SubmittedJob(engine, job(40, f"{number}")) for number in range(6)]
        await allowed.pass_through(8)
        update = asyncio.create_task(engine.update_weights(named, "new"))
        while engine._worker._mail.empty():
            await asyncio.sleep(0.001)
        allowed.open()
        await update
        return [await each.all() for each in heard]

    with StepGate(engine._runner) as allowed:
        answers = asyncio.run(main(allowed))
    assert sum(None in {step.weight_version for step in steps} for steps in answers) >= 3, "they were at work"
    for steps in answers:
        numbers, versions = ids(steps), [step.weight_version for step in steps for _ in step.ids]
        assert len(numbers) == 40
        first = versions.index("new")
        assert versions == [None] * first + ["new"] * (len(versions) - first)
        other = forward(with_weights(model, named), numbers)
        assert logprobs(steps)[:first] == pytest.approx(forward(model, numbers)[:first], abs=1e-3)
        assert logprobs(steps)[first:] == pytest.approx(other[first:], abs=1e-3)


def test_all_of_them_or_none(engine: TrainableEngine, model: Any) -> None:
    before = answer(engine)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"model.layers.9.mlp.up_proj.weight": torch.zeros(1)}, "no tensor"),
        ({NORM: torch.zeros(3)}, r"shape \[3\] instead of \[32\]"),
        ({NORM: torch.zeros(32, dtype=torch.int8)}, "floating-point"),
        ({NORM: "zeros"}, "floating-point"),
        ({NORM: (print, ("x",))}, "not a handle"),
    ]
    for more, text in wrong:
        with pytest.raises(BadRequest, match=text):
            asyncio.run(engine.update_weights(changed(model, 0.5) | more, "2"))
    with pytest.raises(BadRequest, match="No weights"):
        asyncio.run(engine.update_weights({}, "2"))
    assert engine.weight_version is None
    assert logprobs(answer(engine)) == pytest.approx(logprobs(before), abs=1e-3)


def test_from_files(engine: TrainableEngine, model: Any, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    named = changed(model, 0.05)
    one, folder = tmp_path / "one.safetensors", tmp_path / "folder"
    folder.mkdir()
    save_file({NORM: named[NORM]}, one)
    save_file(named, folder / "model.safetensors")
    asyncio.run(engine.update_weights(one))
    part = dict(model.named_parameters()) | {NORM: named[NORM]}
    steps = answer(engine)
    assert logprobs(steps) == pytest.approx(forward(with_weights(model, part), ids(steps)), abs=1e-3)
    asyncio.run(engine.update_weights(str(folder), "7"))
    steps = answer(engine)
    assert logprobs(steps) == pytest.approx(forward(with_weights(model, named), ids(steps)), abs=1e-3)
    assert engine.weight_version == "7"


def test_files_that_are_none(engine: TrainableEngine, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    broken, strange = tmp_path / "broken.safetensors", tmp_path / "strange.safetensors"
    broken.write_bytes(b"no such thing")
    save_file({"x": torch.zeros(1)}, strange)
    tries: list[tuple[Path, type[DragomanError], str]] = [
        (tmp_path / "none", ModelFileError, "no safetensors"),
        (broken, ModelFileError, "cannot be read"),
        (strange, BadRequest, "no tensor 'x'"),
    ]
    for path, error, text in tries:
        with pytest.raises(error, match=text):
            asyncio.run(engine.update_weights(path))


def test_tensors_of_another_process(engine: TrainableEngine, model: Any) -> None:
    from torch.multiprocessing.reductions import reduce_tensor

    named = changed(model, 0.05)
    asyncio.run(engine.update_weights({name: reduce_tensor(tensor) for name, tensor in named.items()}))
    steps = answer(engine)
    assert logprobs(steps) == pytest.approx(forward(with_weights(model, named), ids(steps)), abs=1e-3)


def test_nothing_is_computed_between_pause_and_resume(engine: TrainableEngine, model: Any) -> None:
    async def main() -> tuple[list[Step], int, list[Step]]:
        begun = asyncio.Event()
        heard = SubmittedJob(engine, job(60), begun.set)
        await begun.wait()
        await engine.pause()
        # Its mail is answered, and what was said before has arrived.
        await engine.check()
        count = len(heard.steps)
        late = SubmittedJob(engine, job(3, "late"))
        await engine.update_weights(changed(model, 0.05))
        await engine.check()
        assert (len(heard.steps), late.steps) == (count, [])
        await engine.resume("2")
        return await heard.all(), count, await late.all()

    steps, count, late = asyncio.run(main())
    assert len(ids(steps)) == 60
    assert [step.weight_version for step in steps] == [None] * count + ["2"] * (len(steps) - count)
    assert {step.weight_version for step in late} == {"2"}


def test_a_paused_job_can_be_cancelled(engine: TrainableEngine) -> None:
    async def main(allowed: StepGate) -> list[Step]:
        heard = SubmittedJob(engine, job(100))
        await allowed.pass_through(3)
        pausing = asyncio.create_task(engine.pause())
        await asyncio.sleep(0)
        allowed.open()
        await pausing
        heard.handle.cancel()
        return await heard.all()

    with StepGate(engine._runner) as allowed:
        assert asyncio.run(main(allowed))[-1].finish == "abort"


def test_experts_as_they_are_trained(tmp_path: Path) -> None:
    """In memory the experts of a layer are one tensor, in files each has its own."""
    mixture = make(tmp_path, "qwen3_moe")
    named = changed(mixture, 0.05)
    assert any(name.endswith("experts.gate_up_proj") for name in named)
    with closing(TrainableEngine.open(tmp_path, OPTIONS)) as engine:
        asyncio.run(engine.update_weights(named.items()))
        steps = answer(engine)
    assert logprobs(steps) == pytest.approx(forward(with_weights(mixture, named), ids(steps)), abs=1e-3)


def test_other_runners_cannot(folder: Path) -> None:
    with closing(engine_over(FakeRunner(slots=1, context=64, rows=32), OPTIONS)) as engine:
        assert not isinstance(engine, PausableEngine)
