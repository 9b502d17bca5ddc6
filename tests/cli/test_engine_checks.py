"""What `doctor` says of engines that are not as they should be."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from dragoman.cli import engine_checks
from dragoman.cli.engine_checks import examine
from dragoman.engines.protocol import JobHandle, ModelCard
from dragoman.engines.scripted import END_ID, ByteTokenizer, ScriptedEngine, say
from dragoman.media import Media
from dragoman.types import FinishReason, Job, Sink, Step, TokenLogprob


def check_results(engine: Any) -> dict[str, str]:
    """What failed, by the name of the check."""
    return {finding.name: finding.text for finding in examine(engine) if finding.verdict == "failed"}


class Engine:
    """Minimal, and right: each test spoils one thing."""

    def __init__(self) -> None:
        self.card: Any = ModelCard(name="m", max_model_len=64)
        self.tokenizer: Any = ByteTokenizer()
        self.ids = [*b"hi", END_ID]
        self.finish: Any = "stop"
        self.late: list[Step] = []

    async def generate(self, job: Job) -> AsyncIterator[Step]:
        for offset, id_ in enumerate(self.ids):
            yield self.step(job, id_, self.finish if offset == len(self.ids) - 1 else None)
        for step in self.late:
            yield step

    def step(self, job: Job, id_: int, finish: FinishReason | None) -> Any:
        step = Step([id_], finish=finish)
        if (top := job.sampling.logprobs) is not None:
            step.logprobs = [TokenLogprob(id_, -1.0, tuple((other, -1.0) for other in range(top)))]
        return step


def test_a_good_engine_passes() -> None:
    assert check_results(Engine()) == {}


def test_an_engine_that_calls_back_passes() -> None:
    assert check_results(ScriptedEngine(say("hello" * 200), interval=0.001)) == {}


def test_what_is_missing_is_named() -> None:
    assert "no card, no tokenizer, no generate" in check_results(object())["engine"]


def card(**fields: Any) -> Callable[[Engine], None]:
    def spoil(engine: Engine) -> None:
        engine.card = ModelCard(**{"name": "m", "max_model_len": 64, **fields})

    return spoil


def put(name: str, value: Any, of: str = "") -> Callable[[Engine], None]:
    return lambda engine: setattr(getattr(engine, of) if of else engine, name, value)


def drop_encode(engine: Engine) -> None:
    engine.tokenizer = type("Other", (), {})()


def careless(text: str) -> list[int]:
    return [END_ID] if text.startswith("<") else [*text.encode()]


def silent_step(job: Job, id_: int, finish: FinishReason | None) -> Step:
    return Step([id_], finish=finish)


def odd_version(job: Job, id_: int, finish: FinishReason | None) -> Step:
    return Step([id_], finish=finish, weight_version=7)  # type: ignore[arg-type]


def slow_step(job: Job, id_: int, finish: FinishReason | None) -> Step:
    time.sleep(0.1)
    return Step([id_], finish=finish)


CASES: dict[str, tuple[str, Callable[[Engine], None], str]] = {
    "no card": ("card", put("card", {"name": "m"}), "not a dragoman.ModelCard"),
    "no room": ("card", card(max_model_len=1), "max_model_len is 1"),
    "unknown field": ("card", card(unsupported=frozenset({"top_q"})), "unknown fields: top_q"),
    "no pieces": ("tokenizer", drop_encode, "no pieces"),
    "text pieces": ("tokenizer", put("pieces", ["a"] * 300, "tokenizer"), "not bytes"),
    "far end": ("tokenizer", put("end_ids", frozenset({999}), "tokenizer"), "hold 999, which is not"),
    "far ids": ("tokenizer", put("encode", lambda text: [5000], "tokenizer"), "not in a vocabulary"),
    "other bytes": ("tokenizer", put("encode", lambda text: [65], "tokenizer"), "are not its bytes"),
    "control": ("tokenizer", put("encode", careless, "tokenizer"), "control token"),
    "raises": ("tokenizer", put("encode", lambda text: 1 / 0, "tokenizer"), "ZeroDivisionError"),
    "no finish": ("generate", put("finish", None), "without a finish"),
    "odd finish": ("generate", put("finish", "done"), "finish is 'done'"),
    "early length": ("generate", put("finish", "length"), "length after 3 of 8"),
    "an id of another type": ("generate", put("ids", [True, END_ID]), "hold a bool"),
    "odd version": ("generate", put("step", odd_version), "weight_version is 7"),
    "no error": ("generate", put("finish", "error"), "there is no error"),
    "blocked": ("generate", put("step", slow_step), "blocks the event loop"),
    "far id": ("generate", put("ids", [1, 9999]), "9999, which is not in"),
    "too long": ("generate", put("ids", [65] * 9), "9 tokens were generated"),
    "late step": ("generate", put("late", [Step([1])]), "after the one with a finish"),
    "no step": ("generate", put("step", lambda job, id_, finish: {"ids": [id_]}), "gave a dict"),
    "no logprobs": ("logprobs", put("step", silent_step), "not have one for each"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_is_said(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_checks, "PAUSE_S", 0.05 if case == "blocked" else 60)
    name, spoil, text = CASES[case]
    engine = Engine()
    spoil(engine)
    assert text in check_results(engine)[name]


def test_a_coroutine_is_no_iterator() -> None:
    class AwaitedEngine(Engine):
        async def generate(self, job: Job) -> Any:  # type: ignore[override]
            return []

    assert "must be an async generator" in check_results(AwaitedEngine())["generate"]


def test_an_engine_that_hangs_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_checks, "SECONDS", 0.05)
    assert "no result within" in check_results(ScriptedEngine(say("hello", fault="hang")))["generate"]


def test_a_failure_is_told_by_its_message() -> None:
    assert "this job fail" in check_results(ScriptedEngine(say("hello", fault="exception")))["generate"]


def test_a_cancel_that_does_not_stop() -> None:
    class Deaf(ScriptedEngine):
        def submit(self, job: Job, sink: Any) -> Any:
            super().submit(job, sink)
            return type("Handle", (), {"cancel": lambda self, index=None: None})()

    assert "go on after cancel" in check_results(Deaf(say("hello" * 2000), interval=0.001))["cancel"]


def test_log_probabilities_that_are_not_offered_are_not_tried() -> None:
    engine = Engine()
    engine.card.unsupported = frozenset({"logprobs"})
    engine.step = silent_step  # type: ignore[method-assign]
    assert check_results(engine) == {}


def test_an_engine_that_cannot_start() -> None:
    class Dead(ScriptedEngine):
        async def start(self) -> None:
            raise RuntimeError

    assert "RuntimeError" in check_results(Dead(say("hi")))["life"]


def test_an_engine_that_does_not_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    class StayingEngine(ScriptedEngine):
        async def stop(self) -> None:
            await asyncio.Event().wait()

    monkeypatch.setattr(engine_checks, "SECONDS", 2.0)
    assert "stop hangs" in check_results(StayingEngine(say("hi")))["life"]


def test_vectors_that_are_none() -> None:
    class Vectors(ScriptedEngine):
        async def embed(self, prompts: Any) -> Any:
            return [[float("nan")] for _ in prompts]

    assert "not finite" in check_results(Vectors(say("hi")))["vectors"]


def test_nothing_is_left_running() -> None:
    engine = ScriptedEngine(say("hello" * 200), interval=0.001)
    list(examine(engine))
    assert engine.live == 0


class Seer(ScriptedEngine):
    """It tells of what it keeps: prompts, and what was shown in them."""

    def __init__(self, *, by_digest: bool = True) -> None:
        card = ModelCard(name="m", max_model_len=512, modalities=frozenset({"image", "audio"}))
        super().__init__(say("seen"), card=card)
        self._by_digest = by_digest
        self._known: dict[str, int] = {}

    def media_token_ids(self, media: Media) -> list[int]:
        return [ord("#")] * (4 if media.kind == "image" else 2)

    def submit(self, job: Job, sink: Sink) -> JobHandle:
        if not job.media:
            return super().submit(job, sink)
        shown = job.media[0].media
        key = shown.digest if self._by_digest else shown.kind
        before, self._known[key] = self._known.get(key, 0), len(job.prompt)

        def tell(step: Step) -> None:
            step.cached_tokens = None if step.cached_tokens is None else before
            sink(step)

        return super().submit(job, tell)


def test_what_an_engine_makes_of_media_is_tried() -> None:
    engine = Seer()
    assert check_results(engine) == {}
    assert {span.media.kind for job in engine.jobs for span in job.media} == {"image", "audio"}


def test_pictures_that_are_taken_for_one_another_are_found() -> None:
    assert "prefixes must also be compared by digests" in check_results(Seer(by_digest=False))["media"]


def test_modalities_without_a_place_are_found() -> None:
    engine = Engine()
    engine.card = ModelCard(name="m", max_model_len=64, modalities=frozenset({"image"}))
    assert "no method `place`" in check_results(engine)["card"]


def test_ids_that_place_makes_up_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Seer, "media_token_ids", lambda engine, media: [9999])
    assert check_results(Seer())["media"]
