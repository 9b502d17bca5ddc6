"""Models of `transformers` that see, held against the library's own `generate` with the same inputs."""

import asyncio
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from msgspec import Struct
from msgspec.structs import replace

import dragoman
from dragoman.cli.engine_checks import wrong_media
from dragoman.engines.protocol import MediaEngine
from dragoman.engines.transformers import TransformersEngine, TransformersOptions
from dragoman.errors import BadRequest
from dragoman.media import Media, MediaSpan
from dragoman.types import Job, Sampling, Step
from tests.engines.transformers.conftest import OPTIONS
from tests.engines.transformers.seeing import (
    make_gemma,
    make_hearing,
    make_idefics,
    make_llava,
    make_qwen,
    picture,
    tone,
)

torch = pytest.importorskip("torch")

ONE, OTHER = picture(1), picture(2)
NUMBERS = count()
BEFORE, BEHIND = list(range(60, 80)), [72, 105, 33]


class Seer(Struct):
    engine: TransformersEngine
    plain: Any
    """The same model without anything of ours, and its processor."""
    processor: Any

    def shows(self, *pictures: Media, before: list[int] = BEFORE, behind: list[int] = BEHIND) -> Job:
        """Some text, and each picture with text behind it."""
        prompt, spans = list(before), []
        for each in pictures:
            ids = self.engine.media_token_ids(each)
            spans.append(MediaSpan(each, len(prompt), len(ids)))
            prompt += [*ids, *behind]
        asked = Sampling(max_tokens=6, temperature=0.0, ignore_eos=True)
        return Job(id=f"{next(NUMBERS)}", prompt=tuple(prompt), sampling=asked, media=tuple(spans))

    def says(self, *jobs: Job) -> list[list[int]]:
        """Answers to jobs that come at the same time."""

        async def main() -> list[list[Step]]:
            return list(await asyncio.gather(*(collect(self.engine, job) for job in jobs)))

        return [[id_ for step in steps for id_ in step.ids] for steps in asyncio.run(main())]

    def expected(self, job: Job) -> list[int]:
        fields: dict[str, Any] = {}
        if job.media:
            pictures = [self.engine._senses._decode(span.media) for span in job.media]
            text = self.processor.image_token * len(pictures)
            fields = dict(self.processor(text=[text], images=pictures, return_tensors="pt"))
            del fields["input_ids"], fields["attention_mask"]
            for name in fields.keys() & {"mm_token_type_ids", "token_type_ids"}:
                pad = self.plain.config.image_token_id
                fields[name] = torch.tensor([[int(id_ == pad) for id_ in job.prompt]])
        return self.generates(job, fields)

    def generates(self, job: Job, given: dict[str, Any]) -> list[int]:
        ids = torch.tensor([job.prompt])
        with torch.no_grad():
            result = self.plain.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=6, **given
            )
        return [int(id_) for id_ in result[0, len(job.prompt) :]]


async def collect(engine: TransformersEngine, job: Job) -> list[Step]:
    return [step async for step in engine.generate(job)]


MAKERS: dict[str, Callable[[Path], Any]] = {
    "llava": make_llava,
    "idefics3": make_idefics,
    "qwen2": partial(make_qwen, version=2),
    "qwen3": partial(make_qwen, version=3),
    "gemma3": make_gemma,
}


@contextmanager
def opened(
    maker: Callable[[Path], Any], folder: Path, options: TransformersOptions = OPTIONS
) -> Iterator[TransformersEngine]:
    with pytest.MonkeyPatch.context() as patch:
        processor = maker(folder)
        if processor is not None:
            loader = SimpleNamespace(from_pretrained=lambda *_args, **_kwargs: processor)
            patch.setattr("dragoman.engines.transformers.media_encoder.AutoProcessor", loader)
        engine = TransformersEngine.open(str(folder), options)
    yield engine
    engine.close()


@pytest.fixture(scope="module", params=MAKERS)
def seer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seer]:
    import transformers

    folder = tmp_path_factory.mktemp("seer")
    with opened(MAKERS[request.param], folder) as engine:
        plain = transformers.AutoModelForImageTextToText.from_pretrained(str(folder)).eval()
        yield Seer(engine, plain, engine._senses._processor)


def test_it_says_that_it_sees(seer: Seer) -> None:
    assert isinstance(seer.engine, MediaEngine)
    assert seer.engine.card.modalities == {"image"}


def test_answers_about_pictures_are_the_models_own(seer: Seer) -> None:
    for job in (seer.shows(ONE), seer.shows(ONE, OTHER), seer.shows(OTHER, before=[])):
        assert seer.says(job) == [seer.expected(job)]


def test_beside_others_they_are_the_same(seer: Seer) -> None:
    jobs = [seer.shows(ONE), seer.shows(), seer.shows(OTHER), seer.shows(ONE, behind=[70])]
    assert seer.says(*jobs) == [seer.expected(job) for job in jobs]


def test_the_same_words_about_another_picture_are_another_prompt(seer: Seer) -> None:
    one, other = seer.shows(ONE), seer.shows(OTHER)
    assert one.prompt == other.prompt
    items = seer.says(one)
    assert seer.says(other) == [seer.expected(other)]
    assert items != seer.says(other)
    assert seer.says(one) == items


def test_a_picture_is_encoded_once(seer: Seer, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []
    senses = seer.engine._senses
    encode = senses._encode

    def count_it(result: Any) -> None:
        encoded.append(1)
        encode(result)

    monkeypatch.setattr(senses, "_encode", count_it)
    fresh = picture(3)
    for jobs in [(seer.shows(fresh), seer.shows(fresh, behind=[80, 81])), (seer.shows(fresh, behind=[82]),)]:
        assert seer.says(*jobs) == [seer.expected(job) for job in jobs]
    assert encoded == [1]


def test_what_is_kept_is_bounded(seer: Seer, monkeypatch: pytest.MonkeyPatch) -> None:
    senses = seer.engine._senses
    monkeypatch.setattr("dragoman.engines.transformers.media_encoder.KEPT_BYTES", 1)
    senses.forget()
    job = seer.shows(ONE)
    assert seer.says(job) == [seer.expected(job)]
    assert len(senses._kept) == 0


def test_when_numbers_run_out_all_begins_anew(seer: Seer) -> None:
    senses = seer.engine._senses
    one = seer.shows(picture(4))
    items = seer.says(one)
    senses._next = 2**31 - 2
    other = seer.shows(picture(5))
    assert seer.says(other) == [seer.expected(other)]
    assert senses._next < 2**20
    assert seer.says(one) == items


def test_a_picture_whose_asker_is_gone_is_not_computed_with(seer: Seer) -> None:
    job = seer.shows(picture(6))

    async def main() -> list[Step]:
        steps: list[Step] = []
        with seer.engine._senses.still():
            handle = seer.engine.submit(job, steps.append)
            handle.cancel()
        await collect(seer.engine, seer.shows())
        return steps

    assert asyncio.run(main()) == []
    assert seer.engine.live == 0


def test_it_keeps_what_doctor_asks_of_engines_that_take_media(seer: Seer) -> None:
    assert asyncio.run(wrong_media(seer.engine)) == []


def test_ids_of_a_picture_without_one_are_ids_like_others(seer: Seer) -> None:
    bare = replace(seer.shows(ONE), media=())
    assert len(seer.says(bare)[0]) == 6
    shown = seer.shows(ONE)
    assert seer.says(shown) == [seer.expected(shown)]


def test_a_second_question_begins_with_the_pages_of_the_first(
    seer: Seer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dragoman.engines.transformers.media_encoder import PromptMediaView

    fresh, begun = picture(7), list[int]()
    within = PromptMediaView.within

    def note(view: Any, begin: int, end: int) -> Any:
        begun.append(begin)
        return within(view, begin, end)

    monkeypatch.setattr(PromptMediaView, "within", note)
    seer.says(seer.shows(fresh))
    begun.clear()
    again = seer.shows(fresh, behind=[90] * 8)
    assert seer.says(again) == [seer.expected(again)]
    # The library shares no pages of models with a sliding window.
    shares = seer.engine._manager.batch_processor.cache.use_prefix_sharing
    assert (min(begun) >= 32) is shares


def test_what_is_read_in_both_directions_is_never_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    from dragoman.engines.transformers.media_encoder import PromptMediaView

    steps: list[tuple[PromptMediaView, int, int]] = []
    see_whole = PromptMediaView.see_whole

    def note(view: Any, mask: Any, begin: int) -> None:
        steps.append((view, begin, begin + mask.shape[0]))
        see_whole(view, mask, begin)

    monkeypatch.setattr(PromptMediaView, "see_whole", note)
    with opened(make_gemma, tmp_path, replace(OPTIONS, batch=24, slots=3)) as engine:
        plain = transformers.AutoModelForImageTextToText.from_pretrained(str(tmp_path)).eval()
        seer = Seer(engine, plain, engine._senses._processor)
        # Steps of 24 ids end before, within and behind the sixteen of each picture.
        jobs = [seer.shows(ONE, OTHER, before=BEFORE[:size]) for size in range(0, 20, 3)]
        assert seer.says(*jobs) == [seer.expected(job) for job in jobs]
    ends = {(id(view), end) for view, _, end in steps}
    assert len(ends) > len(jobs)
    assert not [end for view, _, end in steps for low, high in view.blocks() if low < end < high]


def test_a_picture_that_no_step_has_room_for_is_refused(tmp_path: Path) -> None:
    with opened(make_gemma, tmp_path) as engine:
        engine._start()
        engine._senses._room = 15
        job = Job(id="1", prompt=(65,) * 24, sampling=Sampling(max_tokens=2), media=(MediaSpan(ONE, 1, 22),))
        with pytest.raises(BadRequest, match="16 ids that must be in one step"):
            asyncio.run(collect(engine, job))


def test_a_model_that_hears(tmp_path: Path) -> None:
    import transformers

    heard = [tone(200), tone(400)]
    with opened(make_hearing, tmp_path) as engine:
        assert engine.card.modalities == {"audio"}
        hearer = Seer(engine, transformers.Qwen2AudioForConditionalGeneration.from_pretrained(tmp_path), None)
        jobs = [hearer.shows(each) for each in heard]
        items = hearer.says(*jobs)
        for job, ids in zip(jobs, items, strict=True):
            result = engine._senses._process("audio", engine._senses._decode(job.media[0].media)).inputs
            fields = {name: result[name] for name in ("input_features", "feature_attention_mask")}
            assert ids == hearer.generates(job, fields)
    assert items[0] != items[1]


def test_a_picture_comes_all_the_way_from_a_request(tmp_path: Path) -> None:
    template = (
        "{% for message in messages %}{% for part in message.content %}{% if part.type == 'image' %}<image>"
    )
    template += "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
    make_llava(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    url = f"data:image/png;base64,{b64encode(ONE.data).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "Hi!"}]
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 6}
    with opened(lambda _: None, tmp_path) as engine, dragoman.background(engine) as server:
        reply = httpx.post(f"{server}/v1/chat/completions", json=body | {"return_token_ids": True}).json()
    import transformers

    plain = transformers.AutoModelForImageTextToText.from_pretrained(str(tmp_path)).eval()
    seer = Seer(engine, plain, engine._senses._processor)
    job = Job(
        id="1",
        prompt=tuple(reply["prompt_token_ids"]),
        sampling=Sampling(max_tokens=6),
        media=(MediaSpan(ONE, 0, 16),),
    )
    assert reply["usage"]["prompt_tokens"] == 16 + len(engine.tokenizer.encode("Hi!"))
    assert reply["choices"][0]["token_ids"] == seer.expected(job)
