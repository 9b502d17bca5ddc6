"""How much a turn may ask for. Whatever API it came through, it is measured here, before anything is done."""

from collections.abc import Sequence

from dragoman.errors import ANSWERS, LOGPROBS, STOP, BadRequest, Part
from dragoman.limits import Limits, check_count
from dragoman.turns.spec import TurnSpec


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
        raise BadRequest(message, param=LOGPROBS, code="limit_exceeded")
    return min(tokens, most)


def _check_logprobs(spec: TurnSpec, limits: Limits) -> None:
    check_count(spec.sampling.logprobs or 0, limits.logprobs, LOGPROBS, "alternatives")
    check_count(spec.sampling.prompt_logprobs or 0, limits.logprobs, Part("prompt_logprobs"), "alternatives")
