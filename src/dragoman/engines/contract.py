"""Checks of an engine and of the values that it returns: each function describes what is wrong, in a
sentence.

Used by the server, which trusts no engine, and by `doctor`, for the engine's author.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from inspect import iscoroutine
from typing import Any, get_args

from msgspec.structs import replace

from dragoman.engines.protocol import OPTIONAL_FIELDS, Engine, MediaEngine, ModelCard
from dragoman.errors import EngineFailed, SettingsError
from dragoman.logs import safe_message
from dragoman.media import MediaKind
from dragoman.types import TokenLogprob

logger = logging.getLogger("dragoman.engine")

PROTOCOL_VIOLATED = "The engine violated its protocol; see the server log."
PARTS = ("card", "tokenizer", "generate")
GREETING = "Hello, world!"
TOKENIZER = ("pieces", "special_ids", "bos_id", "eos_id", "end_ids", "add_bos", "infill", "encode")
FEW, PIECE = 16, 64 * 1024
"""`FEW`: up to this many ids, as in a step, a plain loop is fastest. `PIECE`: longer lists, such as
prompts of millions of ids, are checked in chunks of this size.
"""
ABOVE_ZERO = 1e-3
"""Rounding error by which a log probability may exceed 0."""


def as_engine(
    thing: Any,
    *,
    tokenizer: Any = None,
    chat_template: str | None = None,
    model_name: str | None = None,
    max_model_len: int | None = None,
    special_tokens: Mapping[str, str] | None = None,
) -> Engine:
    """Return `thing` as an Engine: itself if it implements the protocol, else wrapped in an adapter.

    Raises SettingsError, which names what is missing, for an object that is not an engine.
    """
    parts = tokenizer, chat_template, model_name, max_model_len
    if takes_requests(thing):
        from dragoman.engines.asyncllm import AsyncLLMEngine

        return AsyncLLMEngine(thing, *parts, special_tokens=special_tokens)
    from dragoman.engines.rollout import executor_interface, wrap_executor

    if (shape := executor_interface(thing)) is not None:
        return wrap_executor(thing, shape, *parts, special_tokens=special_tokens)
    check_engine(thing)
    engine: Engine = thing
    if tokenizer is not None:
        raise SettingsError("This engine has its own tokenizer; remove the argument `tokenizer`.")
    fields = {"name": model_name, "max_model_len": max_model_len, "special_tokens": special_tokens}
    if changes := {name: value for name, value in fields.items() if value is not None}:
        try:
            thing.card = replace(engine.card, **changes)
        except AttributeError:
            names = ", ".join(changes)
            message = f"The card of {type(thing).__name__} is read-only; set {names} in the engine itself."
            raise SettingsError(message) from None
    return engine


def takes_requests(thing: Any) -> bool:
    """Whether it has `generate_request`, or contains an object that does, and no card of its own."""
    parts = (thing, getattr(thing, "tokenizer_manager", None))
    own = not isinstance(thing, type) and not hasattr(thing, "card")
    return own and any(hasattr(part, "generate_request") for part in parts)


def check_engine(engine: Any) -> None:
    """Raise SettingsError for an engine that cannot be served; the message lists everything that is wrong."""
    wrong = [f"it has no {name}" for name in PARTS if not hasattr(engine, name)]
    if not wrong:
        wrong = [f"card: {each}" for each in (*wrong_card(engine.card), *wrong_modalities(engine))]
        wrong += [f"tokenizer: {each}" for each in wrong_tokenizer(engine.tokenizer)]
    if wrong:
        message = f"The engine {type(engine).__name__} cannot be served; {'; '.join(wrong)}."
        if not any(hasattr(engine, name) for name in PARTS):
            message += " (It does not have generate_request either, as AsyncLLM and SGLang's engines do.)"
        raise SettingsError(message)


def wrong_card(card: Any) -> Iterator[str]:
    if not isinstance(card, ModelCard):
        yield f"it is a {type(card).__name__}, not a dragoman.ModelCard"
        return
    if not isinstance(card.name, str) or not card.name.strip() or not card.name.isprintable():
        yield "name is empty or not printable text"
    if card.max_model_len is not None and (type(card.max_model_len) is not int or card.max_model_len < 2):
        yield f"max_model_len is {show_value(card.max_model_len)}; it must be at least 2"
    for name in ("slots", "dimensions"):
        value = getattr(card, name)
        if value is not None and (type(value) is not int or value < 1):
            yield f"{name} is {show_value(value)}; it must be an int from 1, or None if unknown"
    if card.returns_ids and not card.has_tokenizer:
        yield "samples_ids is true, and has_ids is not"
    if unknown := frozenset(card.unsupported) - OPTIONAL_FIELDS:
        yield f"unsupported has unknown fields: {', '.join(sorted(map(str, unknown)))}"


def wrong_modalities(engine: Any) -> Iterator[str]:
    """Check the modalities of an engine that has a valid card."""
    taken = getattr(engine.card, "modalities", ())
    if unknown := set(taken) - set(get_args(MediaKind)):
        yield f"modalities has unknown kinds: {', '.join(sorted(map(str, unknown)))}"
    elif taken and not isinstance(engine, MediaEngine):
        yield "modalities is not empty, but the engine has no method `place`"


def wrong_tokenizer(tokenizer: Any) -> Iterator[str]:
    if lacking := [name for name in TOKENIZER if not hasattr(tokenizer, name)]:
        yield f"it has no {', no '.join(lacking)}"
        return
    size = len(tokenizer.pieces)
    if set(map(type, tokenizer.pieces)) != {bytes}:
        yield "pieces is empty, or has an entry that is not bytes"
        return
    if not isinstance(tokenizer.special_ids, Mapping):
        yield "special is not a mapping of texts to ids"
        return
    named = (tokenizer.bos_id, tokenizer.eos_id, *(tokenizer.infill or ()))
    ids = [*tokenizer.end_ids, *tokenizer.special_ids.values(), *(id_ for id_ in named if id_ is not None)]
    if wrong := wrong_ids(ids, size):
        yield f"among its special or end ids {wrong}"
        return
    try:
        encoded = tokenizer.encode(GREETING)
        wrong = wrong_ids(encoded, size) or (None if len(encoded) else "are none")
    except Exception as error:
        wrong = f"are missing: it raises {safe_message(error)}"
    if wrong:
        yield f"the ids that encode gives {wrong}"


def wrong_ids(ids: Any, size: int) -> str | None:
    """Describe what is wrong with a list of ids: `wrong_ids([1, -1], 9)` is `hold -1, which is not in a
    vocabulary of 9`.
    """
    if type(ids) is not list and type(ids) is not tuple:
        return f"are a {type(ids).__name__}, not a list of ints"
    if len(ids) <= FEW:
        return _first_wrong(ids, size)
    for at in range(0, len(ids), PIECE):
        # Check thousands at once, but not so many that other threads wait for the GIL.
        some = ids[at : at + PIECE]
        if set(map(type, some)) != {int} or min(some) < 0 or max(some) >= size:
            return _first_wrong(some, size)
    return None


def _first_wrong(ids: Sequence[Any], size: int) -> str | None:
    for id_ in ids:
        if type(id_) is not int:
            return f"hold a {type(id_).__name__}; ids must be of Python's own type int"
        if not 0 <= id_ < size:
            return f"hold {show_value(id_)}, which is not in a vocabulary of {size}"
    return None


def wrong_placed(ids: Any, size: int) -> str | None:
    """Check the result of `place`."""
    if wrong := wrong_ids(ids, size):
        return f"the ids that place returns {wrong}"
    return None if len(ids) else "place returns no ids"


def wrong_logprobs(result: Any, ids: Sequence[int], size: int, most: int) -> str | None:
    if not isinstance(result, list | tuple) or len(result) != len(ids):
        return "logprobs were requested, but a step does not have one for each of its ids"
    for entry, id_ in zip(result, ids, strict=True):
        if wrong := wrong_logprob(entry, size, most):
            return wrong
        if entry.id != id_:
            return "logprobs were requested, but a step has logprobs of other ids than its own"
    return None


def wrong_prompt_logprobs(result: Any, prompt: Sequence[int]) -> str | None:
    """Check the list's length; `wrong_prompt_entries` checks each entry."""
    if not isinstance(result, list | tuple) or len(result) != len(prompt):
        return "prompt_logprobs does not have one entry for each id of the prompt"
    return None


def wrong_prompt_entries(items: Sequence[Any], size: int, most: int) -> str | None:
    """Check each entry. For a worker thread: there can be half a million values."""
    return next(
        (wrong for each in items if each is not None and (wrong := wrong_logprob(each, size, most))), None
    )


def wrong_logprob(entry: Any, size: int, most: int) -> str | None:
    if not isinstance(entry, TokenLogprob):
        return f"a log probability is a {type(entry).__name__}, not a dragoman.types.TokenLogprob"
    if len(entry.top) > most:
        return f"{most} alternatives per id were requested, but there are {len(entry.top)}"
    for id_, logprob in ((entry.id, entry.logprob), *entry.top):
        if type(id_) is not int or not 0 <= id_ < size:
            return f"a log probability is of {show_value(id_)}, which is not in a vocabulary of {size}"
        if type(logprob) not in (float, int) or not logprob <= ABOVE_ZERO:
            return f"a log probability is {show_value(logprob)}; it must be a float of at most 0"
    return None


def wrong_vectors(vectors: Any, count: int) -> str | None:
    """Check the result of `embed` for `count` prompts."""
    if not isinstance(vectors, list | tuple) or len(vectors) != count:
        return f"embed did not return a list of {count} vectors for {count} prompts"
    if any(type(vector) not in (list, tuple) or not vector for vector in vectors):
        return "embed returned a vector that is empty or not a list of floats"
    if len({len(vector) for vector in vectors}) > 1:
        return "embed returned vectors of different lengths"
    return next((wrong for vector in vectors if (wrong := wrong_numbers(vector, "embed"))), None)


def wrong_scores(scores: Any, count: int) -> str | None:
    """Check the result of `score` for `count` pairs."""
    if not isinstance(scores, list | tuple) or len(scores) != count:
        return f"score did not return a list of {count} numbers for {count} pairs"
    return wrong_numbers(scores, "score")


def wrong_numbers(numbers: Sequence[Any], method: str) -> str | None:
    # One element of another type, a NaN or an infinity shows in the sum: only the sum is checked.
    try:
        total = sum(numbers)
    except TypeError:
        total = None
    if type(total) not in (float, int):
        return f"{method} returned a value that is not a Python float; use .tolist()"
    return None if math.isfinite(total) else f"{method} returned a number that is not finite"


def raise_on_fault(engine: Any, wrong: str | None) -> None:
    """Raise EngineFailed if `wrong` is not None, and log it."""
    if wrong:
        logger.error("The engine %s violated its protocol: %s", type(engine).__name__, wrong)
        raise EngineFailed(PROTOCOL_VIOLATED)


def wrong_iterator(result: Any) -> str | None:
    """Check the return value of `generate`."""
    if iscoroutine(result):
        result.close()
        return "generate is a coroutine function; it must be an async generator, or return one"
    if not hasattr(result, "__anext__") or not hasattr(result, "aclose"):
        return f"generate returns a {type(result).__name__}; it must return an async generator"
    return None


def show_value(value: Any) -> str:
    """Format a value for a log line. Text may hold anything, so it is quoted only if it looks like a word."""
    if value is None or isinstance(value, bool) or type(value) in (int, float):
        return repr(value) if not isinstance(value, int) or abs(value) < 1 << 64 else "a very large number"
    if isinstance(value, str) and value.isidentifier() and len(value) <= 20:
        return repr(value)
    return f"a {type(value).__name__}"
