"""How much a turn may ask for. Whatever API it came through, it is measured here, before anything is done."""

from dragoman.limits import Limits, check_count
from dragoman.turns.spec import TurnSpec


def check_turn(spec: TurnSpec, limits: Limits) -> None:
    """How long a prompt may be, the prompter says when it gets one."""
    check_count(len(spec.prompts) * spec.n, limits.choices, "n", "answers to all prompts")
    _check_stops(spec, limits)
    _check_logprobs(spec, limits)
    asked = spec.sampling
    check_count(len(asked.logit_bias), limits.logit_bias, "logit_bias", "entries")
    check_count(len(spec.bad_words), limits.bad_words, "bad_words", "entries")
    check_count(len(asked.allowed_token_ids or ()), limits.token_ids, "allowed_token_ids", "ids")


def _check_stops(spec: TurnSpec, limits: Limits) -> None:
    count = len(spec.stop) + len(spec.sampling.stop_token_ids)
    check_count(count, limits.stops, "stop", "stop strings and ids")
    for stop in spec.stop:
        check_count(len(stop), limits.stop_chars, "stop", "characters in a stop string")


def _check_logprobs(spec: TurnSpec, limits: Limits) -> None:
    # Completions, whose answers are not read, have one field for both whether and how many.
    name = "logprobs" if spec.reading is None else "top_logprobs"
    check_count(spec.sampling.logprobs or 0, limits.logprobs, name, "alternatives")
    check_count(spec.sampling.prompt_logprobs or 0, limits.logprobs, "prompt_logprobs", "alternatives")
