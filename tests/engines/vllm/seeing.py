"""A model that sees or hears, in this process: `python -m tests.engines.vllm.seeing MODEL ENGINE_ARGS`.

It prints what it found, as JSON, in the last line.
"""

import asyncio
import json
import sys
from itertools import count
from typing import Any

from msgspec.structs import replace

from dragoman.cli.engine_checks import wrong_media
from dragoman.engines.vllm import VllmEngine, VllmOptions, open_vllm
from dragoman.media import Media, MediaSpan
from dragoman.types import Job, Sampling, Step
from tests.engines.transformers.seeing import picture
from tests.engines.vllm.models import BEFORE, BEHIND, GOLDEN_TOKENS, PICTURES, TONES, sound

NUMBERS = count()
SAMPLING = Sampling(max_tokens=GOLDEN_TOKENS, temperature=0, ignore_eos=True)


def about(engine: VllmEngine, *pictures: Media, behind: list[int] = BEHIND) -> Job:
    prompt, spans = list(BEFORE), []
    for each in pictures:
        ids = engine.media_token_ids(each)
        spans.append(MediaSpan(each, len(prompt), len(ids)))
        prompt += [*ids, *behind]
    return Job(id=f"{next(NUMBERS)}", prompt=tuple(prompt), sampling=SAMPLING, media=tuple(spans))


async def ask(engine: VllmEngine, job: Job) -> dict[str, Any]:
    steps = [step async for step in engine.generate(job)]
    return {"said": [id_ for step in steps for id_ in step.ids], "cached": steps[0].cached_tokens}


async def cancelled(engine: VllmEngine, job: Job) -> list[str | None]:
    """What is heard of a job that was cancelled while its picture was being processed."""
    heard: list[Step] = []
    assert engine._model.senses is not None
    engine._model.senses._kept._kept.clear()
    handle = engine.submit(job, heard.append)
    handle.cancel()
    await ask(engine, about(engine))
    return [step.finish for step in heard]


async def find(engine: VllmEngine) -> dict[str, Any]:
    await engine.start()
    hears = "audio" in engine.card.modalities
    one, other, third = map(sound, TONES) if hears else map(picture, PICTURES)
    fields: dict[str, Any] = {
        "modalities": sorted(engine.card.modalities),
        "place": engine.media_token_ids(one),
    }
    fields["alone"] = await ask(engine, about(engine, one))
    fields["again"] = await ask(engine, about(engine, one))
    fields["other"] = await ask(engine, about(engine, other))
    jobs = [about(engine, third), about(engine), about(engine, one), about(engine, other, third)]
    fields["together"] = [
        await answer for answer in [asyncio.ensure_future(ask(engine, job)) for job in jobs]
    ]
    fields["text"] = await ask(engine, about(engine))
    fields["both"] = await ask(engine, about(engine, other, third))
    fields["bare"] = await ask(engine, replace(about(engine, one), media=()))
    fields["wrong"] = await wrong_media(engine)
    fields["cancelled"] = await cancelled(engine, about(engine, sound(700) if hears else picture(9)))
    await engine.stop()
    return fields


def main() -> None:
    engine = open_vllm(sys.argv[1], VllmOptions(context=512, slots=4, engine_args=json.loads(sys.argv[2])))
    assert isinstance(engine, VllmEngine)
    print(json.dumps(asyncio.run(find(engine))))


if __name__ == "__main__":
    main()
