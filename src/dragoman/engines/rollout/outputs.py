"""What an executor answers, read with care: nothing is filled in that it did not say."""

from collections.abc import Mapping, Sequence
from typing import Any

from dragoman.errors import EngineFailed
from dragoman.types import FinishReason, Job, Step, TokenLogprob

_FINISHES: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


def step_of(output: Any, job: Job, index: int, vocabulary: int) -> Step:
    """The one step of an answer. Objects and dicts will do; raises EngineFailed where something is amiss."""
    choices = _get(output, "outputs")
    if choices is not None and len(choices) != 1:
        raise EngineFailed(f"The executor gave {len(choices)} answers to one prompt.")
    answer = output if choices is None else choices[0]
    ids = _ids(_get(answer, "token_ids"), job, vocabulary)
    reason = str(_get(answer, "finish_reason"))
    if reason not in _FINISHES:
        raise EngineFailed(f"The executor ended an answer for a reason that is not known: {reason}.")
    stop = _get(answer, "stop_reason")
    return Step(
        ids,
        index,
        logprobs=_logprobs(_get(answer, "logprobs"), ids, job.sampling.logprobs),
        finish=_FINISHES[reason],
        stop_id=stop if isinstance(stop, int) and stop in job.sampling.stop_token_ids else None,
    )


def _get(thing: Any, name: str) -> Any:
    return thing.get(name) if isinstance(thing, Mapping) else getattr(thing, name, None)


def _ids(told: Any, job: Job, vocabulary: int) -> list[int]:
    if told is None:
        raise EngineFailed("The executor gave an answer without token_ids.")
    ids = [int(id_) for id_ in told]
    if any(not 0 <= id_ < vocabulary for id_ in ids):
        raise EngineFailed("The executor gave an id that is not in the vocabulary.")
    if len(ids) > job.sampling.max_tokens:
        raise EngineFailed(
            f"The executor gave {len(ids)} tokens where {job.sampling.max_tokens} were asked for."
        )
    return ids


def _logprobs(told: Any, ids: Sequence[int], top: int | None) -> list[TokenLogprob] | None:
    if top is None:
        return None
    if told is None or len(told) != len(ids):
        raise EngineFailed("The executor was asked for a log probability per token, and did not give that.")
    return [_entry(entry, id_, top) for entry, id_ in zip(told, ids, strict=True)]


def _entry(entry: Any, id_: int, top: int) -> TokenLogprob:
    """A number, or the likeliest ids with theirs, among which the chosen one is."""
    if not isinstance(entry, Mapping):
        return TokenLogprob(id_, _number(entry))
    known = {int(other): _number(value) for other, value in entry.items()}
    if id_ not in known:
        raise EngineFailed("The executor gave log probabilities in which the chosen token is missing.")
    best = sorted(known.items(), key=lambda pair: -pair[1])[:top]
    return TokenLogprob(id_, known[id_], tuple(best))


def _number(value: Any) -> float:
    return float(getattr(value, "logprob", value))
