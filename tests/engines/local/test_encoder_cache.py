"""Pictures and sounds: the engine says of them what llama.cpp itself says, whatever is beside them."""

import asyncio
import ctypes
from collections.abc import Iterator
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from dragoman.engines.local import LocalEngine, LocalOptions
from dragoman.engines.local.runner import StepInterrupted, StepRows
from dragoman.media import Media, MediaSpan
from dragoman.media.decode import DecodedAudio, DecodedImage
from dragoman.types import Job, Sampling
from tests.engines.local.by_hand import ByHand
from tests.support.tiny_projectors import Kind, write_pair

KINDS: tuple[Kind, ...] = ("plain", "mrope", "whole", "sound")
OPTIONS = LocalOptions(slots=4, context=1024, batch=48, chunk=8, threads=1)


class RawDecoder:
    """Files here are nothing but pixels or samples."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def decode_image(self, media: Media) -> DecodedImage:
        self.asked.append(media.digest)
        return DecodedImage(media.width, media.height, media.data)

    def decode_audio(self, media: Media, rate: int) -> DecodedAudio:
        self.asked.append(media.digest)
        return DecodedAudio(rate, media.data)

    def close(self) -> None: ...


class Viewer:
    """An engine that sees or hears, and llama.cpp by hand."""

    def __init__(self, folder: Path, kind: Kind, **options: Any) -> None:
        self.kind = kind
        model, projector = write_pair(folder, kind)
        self.engine = LocalEngine.open(model, replace(OPTIONS, mmproj=str(projector), **options))
        self.by_hand = ByHand(model, projector)
        assert self.engine._pictures is not None
        self.pictures = self.engine._pictures
        self.decoder = RawDecoder()
        self.pictures._decoder = self.decoder  # type: ignore[assignment]

    def close(self) -> None:
        self.engine.close()
        self.by_hand.close()

    def make(self, seed: int) -> NDArray[Any]:
        chance = np.random.default_rng(seed)
        if self.kind == "sound":
            return chance.normal(0, 0.1, 16000).astype(np.float32)
        return chance.integers(0, 256, (48, 64, 3), np.uint8)

    def job(self, *parts: str | NDArray[Any], count: int = 6, salt: str = "", **kinds: Any) -> Job:
        prompt: list[int] = []
        spans = []
        for part in parts:
            if isinstance(part, str):
                prompt += self._encode(part)
                continue
            media = as_media(part)
            ids = self.engine.media_token_ids(media)
            spans.append(MediaSpan(media, len(prompt), len(ids)))
            prompt += ids
        sampling = Sampling(max_tokens=count, temperature=0.0, ignore_eos=True, logprobs=0)
        named = {"id": "job", "prompt": tuple(prompt), "media": tuple(spans), "cache_salt": salt}
        return Job(sampling=sampling, **{**named, **kinds})

    def ask(self, *jobs: Job) -> "list[Answer]":
        async def main() -> list[Answer]:
            return await asyncio.gather(*(self.hear(job) for job in jobs))

        return asyncio.run(main())

    async def hear(self, job: Job) -> "Answer":
        steps = [step async for step in self.engine.generate(job)]
        logprobs = [one for step in steps for one in step.logprobs or ()]
        cached = next(step.cached_tokens for step in steps if step.cached_tokens is not None)
        return Answer([id_ for step in steps for id_ in step.ids], [one.logprob for one in logprobs], cached)

    def expect(self, *parts: str | NDArray[Any], count: int = 6) -> "Answer":
        ids, rows = self.by_hand.answer(list(parts), count)
        exact = rows.astype(np.float64)
        sums = np.log(np.exp(exact - exact.max(axis=1, keepdims=True)).sum(axis=1)) + exact.max(axis=1)
        return Answer(
            ids, [float(row[id_] - total) for row, id_, total in zip(exact, ids, sums, strict=True)]
        )

    def _encode(self, text: str) -> list[int]:
        library, data = self.by_hand.library, text.encode()
        room = (ctypes.c_int32 * 256)()
        vocab = library.model_get_vocab(self.by_hand.model.pointer)
        return room[: library.tokenize(vocab, data, len(data), room, len(room), False, True)]


class Answer(Struct):
    ids: list[int]
    logprobs: list[float]
    cached: int = 0


def as_media(shown: NDArray[Any]) -> Media:
    data = shown.tobytes()
    digest = sha256(data).hexdigest()
    if shown.ndim == 1:
        return Media(kind="audio", format="raw", data=data, digest=digest, seconds=shown.size / 16000)
    height, width, _ = shown.shape
    return Media(kind="image", format="raw", data=data, digest=digest, width=width, height=height)


def check_same(answer: Answer, expected: Answer) -> None:
    assert answer.ids == expected.ids
    assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


@pytest.fixture(scope="module", params=["plain", "mrope", "whole"])
def seer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Viewer]:
    with closing(Viewer(tmp_path_factory.mktemp("tiny"), request.param)) as result:
        yield result


@pytest.fixture(scope="module", params=KINDS)
def viewer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Viewer]:
    with closing(Viewer(tmp_path_factory.mktemp("tiny"), request.param)) as result:
        yield result


def test_the_same_as_by_hand(viewer: Viewer) -> None:
    shown = viewer.make(1)
    (answer,) = viewer.ask(viewer.job("a b", shown, "what is it?", salt="alone"))
    check_same(answer, viewer.expect("a b", shown, "what is it?"))
    assert answer.cached == 0


def test_at_the_end_of_a_prompt(seer: Viewer) -> None:
    shown = seer.make(1)
    job = seer.job("a b", shown, salt="end", count=1)
    # The helper has no logits for what ends with a picture, so the next id is the same as with more behind.
    (answer,), (again,) = seer.ask(job), seer.ask(replace(job, cache_salt="end again"))
    assert answer.ids == again.ids


def test_beside_others(seer: Viewer) -> None:
    first, second = seer.make(1), seer.make(2)
    asked = [
        ("see", first, "and?"),
        ("look", second, "and?"),
        ("nothing to see here",),
        (first, "b", second, "a"),
    ]
    answers = seer.ask(*(seer.job(*parts, salt=f"beside {n}") for n, parts in enumerate(asked)))
    for parts, answer in zip(asked, answers, strict=True):
        check_same(answer, seer.expect(*parts))


def test_a_second_question_encodes_nothing(viewer: Viewer) -> None:
    shown = viewer.make(3)
    first = viewer.job("a", shown, "what is it?", salt="second")
    viewer.ask(first)
    encoded, decoded = viewer.pictures.encoded, len(viewer.decoder.asked)
    second = viewer.job("a", shown, "how large is it?", salt="second")
    (answer,) = viewer.ask(second)
    assert (viewer.pictures.encoded, len(viewer.decoder.asked)) == (encoded, decoded)
    assert answer.cached >= second.media[0].start + second.media[0].count
    check_same(answer, viewer.expect("a", shown, "how large is it?"))


def test_another_picture_shares_nothing_behind_its_begin(viewer: Viewer) -> None:
    first, second = viewer.make(4), viewer.make(5)
    viewer.ask(viewer.job("a b", first, "what is it?", salt="other"))
    job = viewer.job("a b", second, "what is it?", salt="other")
    (answer,) = viewer.ask(job)
    around = len(viewer.pictures._measure(job.media[0].media)[0].ids)
    assert answer.cached <= job.media[0].start + around
    check_same(answer, viewer.expect("a b", second, "what is it?"))


def test_a_prefix_that_is_copied(seer: Viewer) -> None:
    """The slot that has it is at work."""
    shown = seer.make(6)
    long = seer.job("a", shown, "tell me all of it", salt="copy", count=60)

    async def main() -> tuple[Answer, Answer]:
        heard = asyncio.Event()
        handle = seer.engine.submit(long, lambda step: heard.set())
        await heard.wait()
        answer = await seer.hear(seer.job("a", shown, "in short", salt="copy"))
        handle.cancel()
        return answer, await seer.hear(seer.job("a", shown, "in short", salt="copied not"))

    answer, alone = asyncio.run(main())
    assert answer.cached >= long.media[0].start + long.media[0].count
    check_same(answer, alone)
    check_same(answer, seer.expect("a", shown, "in short"))


def test_several_who_wait_for_one_picture_cause_one_encoding(seer: Viewer) -> None:
    shown, before = seer.make(7), seer.pictures.encoded
    jobs = [seer.job(text, shown, "a", salt="one") for text in ("see", "look", "what")]
    answers = seer.ask(*jobs, replace(jobs[0], n=2))
    assert seer.pictures.encoded == before + 1
    check_same(answers[2], seer.expect("what", shown, "a"))


def test_a_picture_that_is_interrupted_begins_again(seer: Viewer, monkeypatch: pytest.MonkeyPatch) -> None:
    runner: Any = seer.engine._runner
    step, left = runner.step, [2]

    def interrupted(rows: StepRows) -> Any:
        if not rows.media_rows or not left[0]:
            return step(rows)
        left[0] -= 1
        if left[0]:
            return step(rows)
        # As the library leaves it: something is written, and is cut off again.
        step(rows)
        runner._undo(rows)
        raise StepInterrupted

    monkeypatch.setattr(runner, "step", interrupted)
    shown = seer.make(8)
    (answer,) = seer.ask(seer.job("a b", shown, shown, "what is it?", salt="interrupted"))
    assert left == [0]
    check_same(answer, seer.expect("a b", shown, shown, "what is it?"))


def test_who_steps_back_sees_again(seer: Viewer) -> None:
    """Where owners have to share, an answer gives up its slot and goes on later."""
    shown = seer.make(9)
    jobs = [seer.job("a", shown, "b" * n, salt=f"way {n}", owner="many", count=40) for n in range(1, 5)]
    others = [seer.job("a", shown, "what", salt=f"way of {owner}", owner=owner) for owner in "xyz"]
    answers = seer.ask(*jobs, *others)
    for number, answer in enumerate(answers[:4], 1):
        assert answer.ids == seer.expect("a", shown, "b" * number, count=40).ids
    check_same(answers[4], seer.expect("a", shown, "what"))
