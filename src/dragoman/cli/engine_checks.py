"""The tests that `doctor` runs on an engine: first its attributes, then its behavior.

Each check yields its complaints as sentences. Behavior is tested with short jobs, each with a time limit, so
that a hanging engine is reported as well.
"""

import asyncio
import io
import math
import struct
import time
import wave
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from itertools import count
from typing import Any, TypeAlias

from msgspec.structs import replace

from dragoman.cli.checks import Finding
from dragoman.engines.contract import (
    GREETING,
    PARTS,
    wrong_card,
    wrong_iterator,
    wrong_modalities,
    wrong_tokenizer,
    wrong_vectors,
)
from dragoman.engines.lifecycle import validated_media_ids
from dragoman.engines.protocol import CallbackEngine, EmbeddingEngine, LifecycleEngine
from dragoman.engines.validate import start_job
from dragoman.errors import DragomanError
from dragoman.limits import Limits
from dragoman.logs import safe_message
from dragoman.media import Media, MediaSpan
from dragoman.media.headers import read_media
from dragoman.types import Conversation, Job, Message, Sampling, Step

SECONDS = 60.0
"""The time limit of a job with a few tokens."""
TOKENS = 8
BEAT_S = 0.05
PAUSE_S = 1.0
"""The longest time for which an engine may block the event loop."""
SIDE, RATE = 64, 16_000
_NUMBERS = count()
Trial: TypeAlias = Callable[[Any], Awaitable[list[str]]]


def examine(engine: Any) -> Iterator[Finding]:
    """Yield findings on an engine; its behavior is tested only if all required attributes exist."""
    lacking = [name for name in PARTS if not hasattr(engine, name)]
    if lacking:
        advice = "docs/engines.md describes the protocol."
        yield Finding("engine", "failed", f"it has no {', no '.join(lacking)}", advice)
        return
    parts = {
        "card": [*wrong_card(engine.card), *wrong_modalities(engine)],
        "tokenizer": list(wrong_encoding(engine.tokenizer)),
    }
    for name, wrong in parts.items():
        yield _finding(name, wrong)
    if not any(parts.values()):
        yield from asyncio.run(_try_all(engine))


def _finding(name: str, wrong: Sequence[str]) -> Finding:
    if not wrong:
        return Finding(name, "ok", "matches the protocol")
    return Finding(name, "failed", "; ".join(wrong))


def wrong_encoding(tokenizer: Any) -> Iterator[str]:
    """Yield what makes prompts wrong, beyond what keeps a tokenizer from being served."""
    wrong = list(wrong_tokenizer(tokenizer))
    yield from wrong
    if wrong:
        return
    if b"".join(tokenizer.pieces[id_] for id_ in tokenizer.encode(GREETING)).strip() != GREETING.encode():
        yield f"the pieces of the ids of {GREETING!r} are not its bytes"
    for text, id_ in list(tokenizer.special_ids.items())[:64]:
        if id_ in tokenizer.encode(text):
            yield f"the text {text!r} becomes the control token; encode must give the ids of its characters"
            return


async def _try_all(engine: Any) -> list[Finding]:
    trials: dict[str, Trial] = {
        "generate": wrong_steps,
        "logprobs": wrong_logprobs,
        "cancel": wrong_cancel,
        "vectors": wrong_embeddings,
        "media": wrong_media,
    }
    findings = []
    try:
        if isinstance(engine, LifecycleEngine):
            await engine.start()
            await asyncio.wait_for(engine.check(), SECONDS)
        for name, trial in trials.items():
            findings.append(_finding(name, await _try_job(trial, engine)))
            if findings[-1].verdict == "failed":
                break
    except Exception as error:
        findings.append(Finding("life", "failed", f"start or check raises {safe_message(error)}"))
    if isinstance(engine, LifecycleEngine):
        try:
            await asyncio.wait_for(engine.stop(), SECONDS)
        except Exception as error:
            findings.append(Finding("life", "failed", f"stop hangs, or raises {safe_message(error)}"))
    return findings


async def _try_job(trial: Trial, engine: Any) -> list[str]:
    try:
        return await asyncio.wait_for(trial(engine), SECONDS)
    except TimeoutError:
        return [f"no result within {SECONDS:.0f} s"]
    except DragomanError as error:
        return [f"it fails: {error.message}"]
    except Exception as error:
        return [f"it raises {safe_message(error)}"]


def _job(engine: Any, **sampling: Any) -> Job:
    asked = Sampling(**{"max_tokens": TOKENS, "temperature": 0.0, **sampling})
    prompt = tuple(engine.tokenizer.encode(GREETING))
    text = GREETING if engine.card.wants_prompt_text else ""
    return Job(id=f"doctor-{next(_NUMBERS)}", prompt=prompt, sampling=asked, text=text)


async def _steps(engine: Any, **sampling: Any) -> AsyncGenerator[Step, None]:
    result = engine.generate(_job(engine, **sampling))
    if wrong := wrong_iterator(result):
        raise DragomanError(wrong)
    async with aclosing(result) as steps:
        async for step in steps:
            yield step


async def wrong_steps(engine: Any) -> list[str]:
    count, finish = 0, None
    async for step in _steps(engine):
        if not isinstance(step, Step):
            break
        if finish is not None:
            return ["a step comes after the one with a finish"]
        if step.error is not None:
            return [f"it fails: {safe_message(step.error)}"]
        count += len(step.ids)
        finish = step.finish
        if count > TOKENS:
            return [f"{count} tokens were generated with max_tokens {TOKENS}"]
    wrong = (await _hear_answer(engine))[1]
    if not wrong and finish == "length" and count < TOKENS:
        return [f"finish is length after {count} of {TOKENS} tokens"]
    return wrong


async def _hear_answer(
    engine: Any, asked: Job | None = None, **sampling: Any
) -> tuple[list[Step], list[str]]:
    """Run a job as the server would; return its steps and the complaints of the step validator."""
    steps, wrong, pauses = list[Step](), list[str](), [0.0]
    over = asyncio.get_running_loop().create_future()

    def sink(step: Step) -> None:
        steps.append(step)
        if step.finish is not None and not over.done():
            over.set_result(None)

    beat = asyncio.ensure_future(_beat(pauses))
    handle = start_job(engine, asked or _job(engine, **sampling), sink, wrong.append)
    try:
        await over
        # A pause of the event loop is measured once it is over.
        await asyncio.sleep(2 * BEAT_S)
    finally:
        handle.cancel()
        beat.cancel()
    if steps[-1].error is not None and not wrong:
        wrong.append(f"it fails: {safe_message(steps[-1].error)}")
    if max(pauses) > PAUSE_S:
        wrong.append(f"it blocks the event loop for {max(pauses):.1f} s; compute in a thread")
    return steps, wrong


async def _beat(pauses: list[float]) -> None:
    while True:
        began = time.monotonic()
        await asyncio.sleep(BEAT_S)
        pauses.append(time.monotonic() - began - BEAT_S)


async def wrong_logprobs(engine: Any) -> list[str]:
    if "logprobs" in engine.card.refused_fields:
        return []
    steps, wrong = await _hear_answer(engine, logprobs=2)
    logprobs = [entry for step in steps for entry in step.logprobs or ()]
    if not wrong and any(len(entry.top) != 2 for entry in logprobs):
        return ["2 alternatives per id were requested, but the engine returned another number"]
    return wrong


async def wrong_embeddings(engine: Any) -> list[str]:
    if not isinstance(engine, EmbeddingEngine):
        return []
    prompt = engine.tokenizer.encode(GREETING)
    wrong = wrong_vectors(await engine.embed([prompt, prompt[:1]]), 2)
    return [wrong] if wrong else []


async def wrong_cancel(engine: Any) -> list[str]:
    """Cancel a long job after its first step."""
    long = min(engine.card.context_tokens // 2, 4096)
    endless = {"ignore_eos": True} if "ignore_eos" not in engine.card.unsupported else {}
    async with aclosing(_steps(engine, max_tokens=long, **endless)) as steps:
        async for _ in steps:
            break
    return await _goes_on(engine, long) if isinstance(engine, CallbackEngine) else []


async def _goes_on(engine: CallbackEngine, long: int) -> list[str]:
    steps, first = list[Step](), asyncio.Event()

    def sink(step: Step) -> None:
        steps.append(step)
        first.set()

    handle = engine.submit(_job(engine, max_tokens=long), sink)
    await first.wait()
    handle.cancel()
    handle.cancel()
    # Steps that were on their way may still arrive.
    await asyncio.sleep(0.2)
    before = len(steps)
    await asyncio.sleep(0.5)
    return ["steps go on after cancel"] if len(steps) > before + 1 else []


# Test images and audio: a square of one color, half a second of one tone.


def make_picture(colour: int) -> Media:
    row = b"\0" + bytes([colour, 255 - colour, 128]) * SIDE
    parts = [
        (b"IHDR", struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(row * SIDE)),
        (b"IEND", b""),
    ]
    data = b"\x89PNG\r\n\x1a\n"
    for name, body in parts:
        data += len(body).to_bytes(4, "big") + name + body + zlib.crc32(name + body).to_bytes(4, "big")
    return read_media(data, "image", Limits(), "")


def make_sound(hertz: int) -> Media:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, RATE, 0, "NONE", ""))
        waves = (math.sin(2 * math.pi * hertz * at / RATE) for at in range(RATE // 2))
        writer.writeframes(b"".join(struct.pack("<h", round(9999 * height)) for height in waves))
    return read_media(file.getvalue(), "audio", Limits(), "")


async def wrong_media(engine: Any) -> list[str]:
    makers: dict[str, Callable[[int], Media]] = {"image": make_picture, "audio": make_sound}
    return [
        f"{kind}: {wrong}"
        for kind in sorted(engine.card.modalities)
        for wrong in await _wrong_medium(engine, [makers[kind](40 * number) for number in (1, 2, 3)])
    ]


async def _wrong_medium(engine: Any, media: Sequence[Media]) -> list[str]:
    """Test that placement is deterministic, that the same medium gives the same answer, that another medium
    is not mistaken for it, and that a job can be canceled.
    """
    one, other, left = [await _job_about(engine, each) for each in media]
    again = await _job_about(engine, media[0])
    if one.prompt != again.prompt:
        return ["place returns other ids the second time"]
    first, wrong = await _hear_answer(engine, one)
    second, more = await _hear_answer(engine, again)
    wrong += more
    if not wrong and _told(first) != _told(second):
        wrong.append("the same request at temperature 0 gets another answer")
    third, more = await _hear_answer(engine, other)
    wrong += more
    shared = max((step.cached_tokens or 0 for step in third), default=0)
    # An engine that renders the conversation itself may have a longer common prefix than is known here.
    if not wrong and shared > one.media[0].start and not engine.card.wants_conversation:
        wrong.append(
            "cached results of one medium are used for another; prefixes must also be compared by digests"
        )
    start_job(engine, left, lambda step: None).cancel()
    return wrong + (await _hear_answer(engine))[1]


def _told(steps: Sequence[Step]) -> tuple[list[int], str]:
    """Join the steps of an answer, however it was split."""
    ids = [id_ for step in steps for id_ in step.ids]
    return ids, "".join(getattr(step, "text", "") for step in steps)


async def _job_about(engine: Any, media: Media) -> Job:
    """Return a job with a greeting, the medium, and the greeting again."""
    ids = await asyncio.to_thread(validated_media_ids, engine, media)
    job = _job(engine)
    text: dict[str, Any] = {"type": "text", "text": GREETING}
    content = [text, {"type": media.kind, "media": media.digest}, text]
    chat = Conversation(messages=(Message(role="user", content=content),), media={media.digest: media})
    return replace(
        job,
        prompt=(*job.prompt, *ids, *job.prompt),
        media=(MediaSpan(media, len(job.prompt), len(ids)),),
        conversation=chat if engine.card.wants_conversation else None,
    )
