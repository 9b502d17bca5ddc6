"""What is refused before anything is queued for it."""

from collections.abc import Sequence
from typing import Protocol

from dragoman.errors import ANSWERS, MODEL, PROMPT, BadRequest, ContextOverflow, Part
from dragoman.types import Job


class Bounds(Protocol):
    """What a runner can hold."""

    @property
    def context(self) -> int: ...

    @property
    def vocabulary(self) -> int: ...

    @property
    def adapters(self) -> Sequence[str]: ...


def check_job(job: Job, bounds: Bounds) -> None:
    """Raise BadRequest for a job that cannot be run."""
    check_prompt(job.prompt, bounds)
    if job.n < 1:
        raise BadRequest("A job is for one answer at least.", param=ANSWERS)
    for name, _scale in job.adapters:
        if name not in bounds.adapters:
            known = ", ".join(sorted(bounds.adapters)) or "none"
            raise BadRequest(f"There is no adapter {name!r}; loaded: {known}.", param=MODEL)
    sampling = job.sampling
    if sampling.allowed_token_ids is not None and not sampling.allowed_token_ids:
        raise BadRequest("'allowed_token_ids' must not be empty.", param=Part("allowed_token_ids"))
    check_ids(Part("allowed_token_ids"), sampling.allowed_token_ids or (), bounds)
    check_ids(Part("logit_bias"), tuple(sampling.logit_bias), bounds)
    check_ids(Part("stop_token_ids"), tuple(sampling.stop_token_ids), bounds)
    check_ids(Part("bad_words"), [token for word in sampling.bad_words for token in word], bounds)


def check_prompt(prompt: Sequence[int], bounds: Bounds) -> None:
    if not prompt:
        raise BadRequest("The prompt is empty.", param=PROMPT)
    if len(prompt) >= bounds.context:
        raise ContextOverflow(
            f"The prompt has {len(prompt)} tokens; prompt and answer together may have {bounds.context}."
        )
    check_ids(PROMPT, prompt, bounds)


def check_ids(param: Part, ids: Sequence[int], bounds: Bounds) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < bounds.vocabulary):
        raise BadRequest(f"'{param}' holds an id that is not in the vocabulary.", param=param)
