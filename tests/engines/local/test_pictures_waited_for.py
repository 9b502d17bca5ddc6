"""Pictures while they are encoded: who waits for one, who does not, and what is kept of it."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from dragoman.engines.local import LocalEngine, LocalOptions, binding, encoder_cache
from dragoman.engines.local.projector import DecodedMedia, IdleOpenMPTeam
from dragoman.errors import BadRequest, DragomanError, EngineFailed, ModelFileError, SettingsError
from dragoman.media import MediaSpan
from dragoman.types import Job, Sampling, Step
from tests.engines.local.test_encoder_cache import Viewer, as_media
from tests.support.tiny_gguf import write_tiny
from tests.support.tiny_projectors import write_pair, write_projector
from tests.support.wait import becomes

PATIENCE = 60


class Gate:
    """Encoding stands still until it is opened; each that begins is counted."""

    def __init__(self, viewer: Viewer, monkeypatch: pytest.MonkeyPatch) -> None:
        self._open, self.begun = threading.Event(), 0
        encode = viewer.pictures.projector.encode
        self._begun = threading.Semaphore(0)

        def wait(decoded: DecodedMedia) -> Any:
            self.begun += 1
            self._begun.release()
            assert self._open.wait(PATIENCE)
            return encode(decoded)

        monkeypatch.setattr(viewer.pictures.projector, "encode", wait)

    async def until_begun(self) -> None:
        assert await asyncio.to_thread(self._begun.acquire, timeout=PATIENCE)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def viewer(tmp_path: Path) -> Iterator[Viewer]:
    with closing(Viewer(tmp_path, "plain")) as result:
        yield result


@pytest.fixture
def gate(viewer: Viewer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    result = Gate(viewer, monkeypatch)
    yield result
    result.open()


def test_others_go_on_while_one_is_encoded(viewer: Viewer, gate: Gate) -> None:
    async def main() -> None:
        waits = asyncio.create_task(viewer.hear(viewer.job(viewer.make(1), "a")))
        await gate.until_begun()
        # More of them than there are slots: who waits for a picture has none.
        for number in range(6):
            await viewer.hear(viewer.job("b" * number, "a"))
        assert not waits.done()
        gate.open()
        assert (await waits).ids == viewer.expect(viewer.make(1), "a").ids

    asyncio.run(main())


def test_who_cancels_while_waiting_is_rid_of_it(viewer: Viewer, gate: Gate) -> None:
    async def main() -> None:
        steps: asyncio.Queue[Step] = asyncio.Queue()
        handle = viewer.engine.submit(viewer.job(viewer.make(1), "a"), steps.put_nowait)
        await gate.until_begun()
        # It is behind the first, and is not begun any more.
        second = viewer.engine.submit(viewer.job(viewer.make(2), "a"), steps.put_nowait)
        for each in (handle, second):
            each.cancel()
            assert (await asyncio.wait_for(steps.get(), PATIENCE)).finish == "abort"
        gate.open()
        await viewer.hear(viewer.job(viewer.make(3), "a"))
        assert gate.begun == 2

    asyncio.run(main())


def test_one_that_comes_when_another_has_left_is_answered(viewer: Viewer, gate: Gate) -> None:
    async def main() -> None:
        first = asyncio.create_task(viewer.hear(viewer.job(viewer.make(1), "a")))
        await gate.until_begun()
        steps: asyncio.Queue[Step] = asyncio.Queue()
        viewer.engine.submit(viewer.job(viewer.make(2), "a"), steps.put_nowait).cancel()
        await steps.get()
        again = asyncio.create_task(viewer.hear(viewer.job(viewer.make(2), "b")))
        await viewer.engine.check()
        gate.open()
        await first
        assert (await again).ids == viewer.expect(viewer.make(2), "b").ids

    asyncio.run(main())


def test_a_picture_that_cannot_be_encoded_fails_who_wants_it_alone(
    viewer: Viewer, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = viewer.pictures.projector.encode
    failed: list[DecodedMedia] = []

    def fail(decoded: DecodedMedia) -> Any:
        if not failed:
            failed.append(decoded)
            raise RuntimeError("words of a library")
        return encode(decoded)

    monkeypatch.setattr(viewer.pictures.projector, "encode", fail)
    job = viewer.job(viewer.make(1), "a")
    with pytest.raises(EngineFailed, match="failed to encode") as exception_info:
        viewer.ask(job)
    assert "library" not in exception_info.value.message
    # It is tried anew.
    (answer,) = viewer.ask(job)
    assert answer.ids == viewer.expect(viewer.make(1), "a").ids


def test_what_is_damaged_is_found_when_it_is_placed(viewer: Viewer, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(media: object) -> Any:
        raise BadRequest("It is damaged.")

    monkeypatch.setattr(viewer.decoder, "decode_image", fail)
    with pytest.raises(BadRequest, match="damaged"):
        viewer.engine.media_token_ids(as_media(viewer.make(1)))


def test_what_was_encoded_is_kept_within_bounds(viewer: Viewer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for two: twelve at once are answered all the same, and none of it is kept for ever."""
    each = 16 * 32 * 4
    monkeypatch.setattr(encoder_cache, "KEPT", 2 * each)
    jobs = [viewer.job(viewer.make(number), "a") for number in range(12)]
    held = []
    take_in = viewer.pictures.take_in

    def look(picture: encoder_cache.EncoderCacheEntry) -> Any:
        known = viewer.pictures._pictures.values()
        held.append(sum(one.size for one in known if one.users or one.parts is not None))
        return take_in(picture)

    monkeypatch.setattr(viewer.pictures, "take_in", look)
    answers = viewer.ask(*jobs)
    assert [answer.ids for answer in answers] == [viewer.expect(viewer.make(n), "a").ids for n in range(12)]
    assert len(held) == 12
    assert max(held) <= 2 * each
    assert sum(one.size for one in viewer.pictures._pictures.values()) <= 2 * each


def test_owners_take_turns(viewer: Viewer, gate: Gate) -> None:
    async def main() -> list[str]:
        texts: list[str] = []

        async def ask(seed: int, owner: str) -> None:
            await viewer.hear(viewer.job(viewer.make(seed), "a", owner=owner, count=1))
            texts.append(owner)

        first = asyncio.create_task(ask(0, "many"))
        await gate.until_begun()
        others = [asyncio.create_task(ask(seed, "many")) for seed in (1, 2, 3)]
        await asyncio.sleep(0)
        others.append(asyncio.create_task(ask(4, "one")))
        await asyncio.sleep(0)
        await viewer.engine.check()
        await viewer.engine.check()
        queued = {owner: len(mine) for owner, mine in viewer.pictures._queues.items()}
        assert queued == {"many": 3, "one": 1}
        gate.open()
        await asyncio.gather(first, *others)
        return texts

    assert sorted(asyncio.run(main())) == ["many"] * 4 + ["one"]


def test_stopping_while_one_is_encoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    viewer = Viewer(tmp_path, "plain")
    gate = Gate(viewer, monkeypatch)

    async def main() -> str | None:
        steps: asyncio.Queue[Step] = asyncio.Queue()
        viewer.engine.submit(viewer.job(viewer.make(1), "a"), steps.put_nowait)
        await gate.until_begun()
        stopping = asyncio.create_task(viewer.engine.stop())
        last = await asyncio.wait_for(steps.get(), PATIENCE)
        gate.open()
        await stopping
        return last.finish

    assert asyncio.run(main()) == "abort"
    assert viewer.pictures._thread is None


def test_a_salt_keeps_pictures_apart(viewer: Viewer) -> None:
    shown = viewer.make(1)
    viewer.ask(viewer.job(shown, "a", salt="one"), viewer.job(shown, "a", salt="two"))
    assert viewer.pictures.encoded == 2


def test_ids_that_do_not_stand_for_the_picture(viewer: Viewer) -> None:
    media = as_media(viewer.make(1))
    sampling = Sampling(max_tokens=1)
    job = Job(id="a", prompt=(3, 4, 5), sampling=sampling, media=(MediaSpan(media, 0, 3),))
    with pytest.raises(BadRequest, match="represent its images"):
        viewer.ask(job)


def test_no_log_probabilities_of_pictures(viewer: Viewer) -> None:
    job = viewer.job(viewer.make(1), "a")
    with pytest.raises(BadRequest, match="prompt_logprobs"):
        viewer.ask(replace(job, sampling=replace(job.sampling, prompt_logprobs=0)))


def test_a_draft_guesses_beside_pictures(tmp_path: Path) -> None:
    model, _ = write_pair(tmp_path, "mrope")
    with closing(Viewer(tmp_path, "mrope", draft=str(model))) as viewer:
        shown = viewer.make(1)
        (answer,) = viewer.ask(viewer.job("a", shown, "what", count=24))
        assert answer.ids == viewer.expect("a", shown, "what", count=24).ids


def test_sounds_are_nothing_for_eyes(viewer: Viewer) -> None:
    sound = as_media(viewer.make(1))
    with pytest.raises(BadRequest, match="images; audio is not supported"):
        viewer.engine.media_token_ids(replace(sound, kind="audio"))


def open_error(model: Path, **options: Any) -> DragomanError:
    with pytest.raises(DragomanError) as exception_info:
        LocalEngine.open(model, LocalOptions(**options))
    return exception_info.value


def test_other_runners_take_no_projector(tmp_path: Path) -> None:
    model, projector = write_pair(tmp_path, "plain")
    error = open_error(model, runner="openvino", mmproj=str(projector))
    assert isinstance(error, SettingsError)
    assert "--no-mmproj" in error.message


def test_a_projector_of_another_model(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "model.gguf")
    error = open_error(model, mmproj=str(write_projector(tmp_path / "other.gguf", "plain", width=64)))
    assert isinstance(error, ModelFileError)
    assert "Check that it belongs to model.gguf" in error.message


def test_a_model_is_no_projector(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "model.gguf")
    assert isinstance(open_error(model, mmproj=str(model)), ModelFileError)


def test_without_a_projector_nothing_is_placed(tmp_path: Path) -> None:
    with closing(
        LocalEngine.open(write_tiny(tmp_path / "m.gguf"), LocalOptions(runner="llamacpp"))
    ) as engine:
        assert not engine.card.modalities
        with pytest.raises(BadRequest, match="text only"):
            engine.media_token_ids(as_media(np.zeros((8, 8, 3), np.uint8)))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted as Linux tells them")
def test_threads_that_wait_are_asleep_while_others_compute() -> None:
    """OpenMP has more threads than cores then: its thread, and one of its team, for all who are inside."""

    def count() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    team = IdleOpenMPTeam(binding.load(), threads=2)
    before = count()
    with team, team:
        assert becomes(lambda: count() == before + 2)
    assert becomes(lambda: count() == before)


@pytest.mark.parametrize(("threads", "built"), [(1, True), (2, False)])
def test_nobody_waits_for_others_where_there_are_none(
    monkeypatch: pytest.MonkeyPatch, threads: int, built: bool
) -> None:
    library = binding.load()
    if not built:
        monkeypatch.setattr(library, "parallel", None)
    before = threading.active_count()
    with IdleOpenMPTeam(library, threads):
        assert threading.active_count() == before
