"""What a turn may ask for, at all and of this engine; the rest is refused here, before anything is done."""

from collections.abc import Sequence

from dragoman.engines.protocol import ModelCard
from dragoman.errors import ADAPTERS, ALTERNATIVES, ANSWERS, STOP, BadRequest, Part
from dragoman.limits import Limits, check_count
from dragoman.turns.spec import AdapterWish, TurnSpec
from dragoman.types import Adapters, Sampling

_UNASKED = Sampling(max_tokens=0)


def check_turn(spec: TurnSpec, limits: Limits) -> None:
    """How long a prompt may be, the prompter says when it gets one."""
    check_count(len(spec.prompts) * spec.n, limits.choices, ANSWERS, "answers to all prompts")
    _check_stops(spec, limits)
    _check_logprobs(spec, limits)
    asked = spec.sampling
    check_count(len(asked.logit_bias), limits.logit_bias, Part("logit_bias"), "entries")
    check_count(len(spec.bad_words), limits.bad_words, Part("bad_words"), "entries")
    check_count(len(asked.allowed_token_ids or ()), limits.token_ids, Part("allowed_token_ids"), "ids")


def _check_stops(spec: TurnSpec, limits: Limits) -> None:
    count = len(spec.stop) + len(spec.sampling.stop_token_ids)
    check_count(count, limits.stops, STOP, "stop strings and ids")
    for stop in spec.stop:
        check_count(len(stop), limits.stop_chars, STOP, "characters in a stop string")


def check_told_prompts(spec: TurnSpec, lengths: Sequence[int], limits: Limits) -> None:
    """What is told of prompts of so many ids, once for each answer."""
    if spec.sampling.prompt_logprobs is not None:
        count = sum(lengths) * spec.n * (1 + spec.sampling.prompt_logprobs)
        check_count(count, limits.told_logprobs, Part("prompt_logprobs"), "log probabilities of prompts")


def tokens_told(spec: TurnSpec, tokens: int, limits: Limits) -> int:
    """How many of so many tokens an answer may have, if alternatives are told beside each of them.

    Who has said how many it wants is refused rather than given less.
    """
    if not spec.sampling.logprobs:
        return tokens
    answers, each = len(spec.prompts) * spec.n, 1 + spec.sampling.logprobs
    most = max(limits.told_logprobs // (answers * each), 1)
    if tokens > most and spec.sampling.max_tokens:
        message = (
            f"{tokens} tokens with {each} log probabilities each, for {answers} answers, are more than the "
            f"{limits.told_logprobs} that are allowed: ask for {most} tokens, or for fewer alternatives."
        )
        raise BadRequest(message, param=ALTERNATIVES, code="limit_exceeded")
    return min(tokens, most)


def _check_logprobs(spec: TurnSpec, limits: Limits) -> None:
    check_count(spec.sampling.logprobs or 0, limits.logprobs, ALTERNATIVES, "alternatives")
    check_count(spec.sampling.prompt_logprobs or 0, limits.logprobs, Part("prompt_logprobs"), "alternatives")


def refuse_unsupported(spec: TurnSpec, card: ModelCard) -> None:
    if spec.sampling.samplers is not None and not card.has_samplers:
        message = (
            "The engine behind this model has the usual samplers only (temperature, top_p, top_k, min_p and"
            " penalties), in their usual order; leave the others out."
        )
        raise BadRequest(message, param=Part("samplers"), code="unsupported_field")
    for name in card.refused:
        if _asked(spec, name):
            message = f"The engine behind this model does not support '{name}'; leave it out."
            raise BadRequest(message, param=Part(name), code="unsupported_field")


def _asked(spec: TurnSpec, name: str) -> bool:
    match name:
        case "bad_words":
            return bool(spec.bad_words)
        case "priority":
            return spec.priority != 0
        case "cache_salt":
            return spec.cache_salt != ""
        case "reuse_prefix":
            return not spec.reuse_prefix
        case "return_token_ids":
            return spec.token_ids
    return bool(getattr(spec.sampling, name) != getattr(_UNASKED, name))


def choose_adapters(card: ModelCard, named: str | None, wishes: Sequence[AdapterWish] | None) -> Adapters:
    """`named` is the adapter that the model's name stands for; what has a scale of 0 is not there."""
    if wishes is None:
        return ((named, 1.0),) if named is not None else ()
    if named is not None:
        message = f"'{named}' is an adapter already; leave out '{ADAPTERS}', or send the model's own name."
        raise BadRequest(message, param=ADAPTERS, code="invalid_value")
    scales: dict[str, float] = {}
    for wish in wishes:
        name = _known(card, wish)
        if name in scales:
            message = f"The adapter '{name}' is there a second time; name it once."
            raise BadRequest(message, param=wish.place, code="invalid_value")
        scales[name] = wish.scale
    chosen = {name: scale for name, scale in scales.items() if scale}
    if not card.mixes_adapters:
        _check_single(chosen, wishes)
    return tuple(sorted(chosen.items()))


def _known(card: ModelCard, wish: AdapterWish) -> str:
    if isinstance(wish.adapter, int):
        if wish.adapter < len(card.adapters):
            return card.adapters[wish.adapter]
    elif wish.adapter in card.adapters:
        return wish.adapter
    known = ", ".join(f"{name} ({number})" for number, name in enumerate(card.adapters)) or "none"
    message = f"There is no adapter {wish.adapter!r}; there are: {known}."
    raise BadRequest(message, param=wish.place, code="invalid_value")


def _check_single(chosen: dict[str, float], wishes: Sequence[AdapterWish]) -> None:
    if len(chosen) > 1:
        message = "The engine behind this model uses one adapter at a time; name one."
        raise BadRequest(message, param=ADAPTERS, code="unsupported_field")
    for wish in wishes:
        if wish.scale not in (0.0, 1.0):
            message = "The engine behind this model has no scales of adapters; leave out the scale."
            raise BadRequest(message, param=f"{wish.place}.scale", code="unsupported_field")
