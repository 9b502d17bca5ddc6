"""What `doctor` finds out about an engine that somebody wrote: first what it has, then what it does.

Each check yields what is wrong, as sentences. Behaviour is tried with short jobs, each under a time limit: an
engine that hangs is found out, too.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from inspect import iscoroutine
from typing import Any, TypeAlias

from dragoman.cli.findings import Finding
from dragoman.engines.protocol import UNSUPPORTABLE, DirectEngine, LivingEngine, ModelCard
from dragoman.errors import DragomanError
from dragoman.logs import describe
from dragoman.types import Job, Sampling, Step

SECONDS = 60.0
"""That a job of a few tokens may take."""
TOKENS = 8
TOKENIZER = ("pieces", "special", "bos_id", "eos_id", "end_ids", "add_bos", "infill", "encode")
FINISHES = ("stop", "length", "abort", "error")
GREETING = "Hello, world!"
Trial: TypeAlias = Callable[[Any], Awaitable[list[str]]]


def examine(engine: Any) -> Iterator[Finding]:
    """Findings on an engine: behaviour is tried only where the parts are there."""
    lacking = [name for name in ("card", "tokenizer", "generate") if not hasattr(engine, name)]
    if lacking:
        advice = "docs/engines.md says what they are."
        yield Finding("engine", "failed", f"it has no {', no '.join(lacking)}", advice)
        return
    parts = {"card": list(wrong_card(engine.card)), "tokenizer": list(wrong_tokenizer(engine.tokenizer))}
    for name, wrong in parts.items():
        yield _finding(name, wrong)
    if not any(parts.values()):
        yield from asyncio.run(_try_all(engine))


def _finding(name: str, wrong: Sequence[str]) -> Finding:
    if not wrong:
        return Finding(name, "ok", "as the protocol wants it")
    return Finding(name, "failed", "; ".join(wrong))


def wrong_card(card: Any) -> Iterator[str]:
    if not isinstance(card, ModelCard):
        yield f"it is a {type(card).__name__}, not a dragoman.ModelCard"
        return
    if not card.name:
        yield "name is empty"
    if card.max_model_len < 2:
        yield f"max_model_len is {card.max_model_len}; a prompt and an answer need 2 at least"
    if unknown := frozenset(card.unsupported) - UNSUPPORTABLE:
        yield f"unsupported names what is no field: {', '.join(sorted(unknown))}"


def wrong_tokenizer(tokenizer: Any) -> Iterator[str]:
    if lacking := [name for name in TOKENIZER if not hasattr(tokenizer, name)]:
        yield f"it has no {', no '.join(lacking)}"
        return
    size = len(tokenizer.pieces)
    if not all(isinstance(piece, bytes) for piece in tokenizer.pieces):
        yield "pieces has an entry that is not bytes"
        return
    if not isinstance(tokenizer.special, Mapping):
        yield "special is not a mapping of texts to ids"
        return
    named = {"bos_id": tokenizer.bos_id, "eos_id": tokenizer.eos_id}
    ids = [
        *tokenizer.end_ids,
        *tokenizer.special.values(),
        *(id_ for id_ in named.values() if id_ is not None),
    ]
    if outside := [id_ for id_ in ids if not _within(id_, size)]:
        yield f"{outside[0]} is among its special or end ids, but not in a vocabulary of {size}"
        return
    yield from _wrong_encoding(tokenizer, size)


def _wrong_encoding(tokenizer: Any, size: int) -> Iterator[str]:
    try:
        ids = tokenizer.encode(GREETING)
        spelled = {text: tokenizer.encode(text) for text in list(tokenizer.special)[:64]}
    except Exception as error:
        yield f"encode raises {describe(error)}"
        return
    if not ids or not all(_within(id_, size) for id_ in ids):
        yield "encode gives ids that are not in the vocabulary, or none"
        return
    if b"".join(tokenizer.pieces[id_] for id_ in ids).strip() != GREETING.encode():
        yield f"the pieces of the ids of {GREETING!r} are not its bytes"
    for text, found in spelled.items():
        if tokenizer.special[text] in found:
            yield f"the text {text!r} becomes the control token; encode must give the ids of its characters"
            return


async def _try_all(engine: Any) -> list[Finding]:
    trials: dict[str, Trial] = {"generate": wrong_steps, "logprobs": wrong_logprobs, "cancel": wrong_cancel}
    findings = []
    try:
        if isinstance(engine, LivingEngine):
            await engine.start()
            await engine.check()
        for name, trial in trials.items():
            findings.append(_finding(name, await _tried(trial, engine)))
            if findings[-1].verdict == "failed":
                break
    except Exception as error:
        findings.append(Finding("life", "failed", f"start or check raises {describe(error)}"))
    finally:
        if isinstance(engine, LivingEngine):
            await engine.stop()
    return findings


async def _tried(trial: Trial, engine: Any) -> list[str]:
    try:
        return await asyncio.wait_for(trial(engine), SECONDS)
    except TimeoutError:
        return [f"nothing came of it within {SECONDS:.0f} s"]
    except DragomanError as error:
        return [f"it fails: {error.message}"]
    except Exception as error:
        return [f"it raises {describe(error)}"]


async def _steps(engine: Any, **sampling: Any) -> AsyncGenerator[Step, None]:
    prompt = tuple(engine.tokenizer.encode(GREETING))
    asked = Sampling(**{"max_tokens": TOKENS, "temperature": 0.0, **sampling})
    made = engine.generate(Job(id="doctor", prompt=prompt, sampling=asked))
    if iscoroutine(made):
        made.close()
        raise DragomanError("generate is a coroutine; it must be an async generator, or return one")
    if not hasattr(made, "__aiter__") or not hasattr(made, "aclose"):
        raise DragomanError(f"generate gives a {type(made).__name__}; it must give an async generator")
    async with aclosing(made) as steps:
        async for step in steps:
            yield step


async def wrong_steps(engine: Any) -> list[str]:
    size, ids, finish = len(engine.tokenizer.pieces), list[int](), None
    async for step in _steps(engine):
        if not isinstance(step, Step):
            return [f"it yields a {type(step).__name__}, not a dragoman.Step"]
        if finish is not None:
            return ["a step comes after the one with a finish"]
        ids += step.ids
        finish = step.finish
        if step.error is not None:
            return [f"it fails: {describe(step.error)}"]
    return list(_wrong_answer(ids, finish, size))


def _wrong_answer(ids: list[int], finish: Any, size: int) -> Iterator[str]:
    if finish is None:
        yield "the last step has no finish"
    elif finish not in FINISHES:
        yield f"finish is {finish!r}; it must be one of {', '.join(FINISHES)}"
    if outside := [id_ for id_ in ids if not _within(id_, size)]:
        yield f"the id {outside[0]} is not in a vocabulary of {size}"
    if len(ids) > TOKENS:
        yield f"{len(ids)} tokens came where max_tokens was {TOKENS}"
    if finish == "length" and len(ids) < TOKENS:
        yield f"finish is length after {len(ids)} of {TOKENS} tokens"


async def wrong_logprobs(engine: Any) -> list[str]:
    if "logprobs" in engine.card.unsupported:
        return []
    async for step in _steps(engine, logprobs=2):
        told = step.logprobs
        if told is None or [entry.id for entry in told] != step.ids:
            return ["logprobs were asked for, but a step has not one for each of its ids, with that id"]
        if any(entry.logprob > 1e-3 for entry in told):
            return ["a log probability is above 0"]
        if any(len(entry.top) != 2 for entry in told):
            return ["2 alternatives were asked for beside each id, but there are not 2"]
    return []


async def wrong_cancel(engine: Any) -> list[str]:
    """A job that would go on for long is left after its first step."""
    long = min(engine.card.max_model_len // 2, 4096)
    endless = {"ignore_eos": True} if "ignore_eos" not in engine.card.unsupported else {}
    async with aclosing(_steps(engine, max_tokens=long, **endless)) as steps:
        async for _ in steps:
            break
    return await _goes_on(engine, long) if isinstance(engine, DirectEngine) else []


async def _goes_on(engine: DirectEngine, long: int) -> list[str]:
    said, first = list[Step](), asyncio.Event()

    def sink(step: Step) -> None:
        said.append(step)
        first.set()

    prompt = tuple(engine.tokenizer.encode(GREETING))
    handle = engine.submit(Job(id="doctor", prompt=prompt, sampling=Sampling(max_tokens=long)), sink)
    await first.wait()
    handle.cancel()
    handle.cancel()
    # What was on its way may still arrive.
    await asyncio.sleep(0.2)
    before = len(said)
    await asyncio.sleep(0.5)
    return ["steps go on after cancel"] if len(said) > before + 1 else []


def _within(id_: Any, size: int) -> bool:
    return isinstance(id_, int) and 0 <= id_ < size
