"""The runner in a process of its own, which is how it is served on a GPU."""

import asyncio
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="TORCH IS NOT INSTALLED: make torch")

from dragoman.cli.builtin_engines import settle  # noqa: E402
from dragoman.cli.engine import isolate  # noqa: E402
from dragoman.engines.protocol import PausableEngine  # noqa: E402
from dragoman.errors import BadRequest  # noqa: E402
from dragoman.settings import Settings  # noqa: E402
from dragoman.types import Job, Sampling, Step  # noqa: E402
from tests.engines.local.pytorch.models import make  # noqa: E402


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    folder = tmp_path_factory.mktemp("llama")
    make(folder)
    return Settings(model=str(folder), runner="torch", slots=2, context=64, threads=1)


def test_it_takes_weights_by_their_path(settings: Settings) -> None:
    assert settings.model is not None
    folder = Path(settings.model)
    engine = isolate(settings)
    assert isinstance(engine, PausableEngine)
    asked = Job(id="a", prompt=(40, 41, 42), sampling=Sampling(max_tokens=4, ignore_eos=True))

    async def main() -> list[Step]:
        await engine.start()
        try:
            with pytest.raises(BadRequest, match="pass a path"):
                await engine.update_weights({"x": torch.zeros(1)})  # type: ignore[attr-defined]
            await engine.update_weights(folder, "7")  # type: ignore[attr-defined]
            return [step async for step in engine.generate(asked)]
        finally:
            await engine.stop()

    steps = asyncio.run(main())
    assert sum(len(step.ids) for step in steps) == 4
    assert {step.weight_version for step in steps} == {"7"}
    assert engine.weight_version == "7"


@pytest.mark.parametrize(
    ("asked", "gpu", "found"), [(None, True, True), (None, False, False), (False, True, False)]
)
def test_on_a_gpu_it_has_one_unless_told_otherwise(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, asked: bool | None, gpu: bool, found: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    result = Settings(model=settings.model, runner="torch", isolate_engine=asked)
    assert settle(result).isolate_engine is found
