"""What is refused before anything is queued for it."""

from collections.abc import Sequence

from dragoman.engines.local.runner import Runner
from dragoman.errors import BadRequest, ContextOverflow
from dragoman.types import Job


def check_job(job: Job, runner: Runner) -> None:
    """Raise BadRequest for a job that cannot be run."""
    check_prompt(job.prompt, runner)
    if job.n < 1:
        raise BadRequest("`n` must be at least 1.", param="n")
    for name, _scale in job.adapters:
        if name not in runner.adapters:
            known = ", ".join(sorted(runner.adapters)) or "none"
            raise BadRequest(f"There is no adapter {name!r}; loaded: {known}.", param="model")
    sampling = job.sampling
    if sampling.allowed_token_ids is not None and not sampling.allowed_token_ids:
        raise BadRequest("`allowed_token_ids` must not be empty.", param="allowed_token_ids")
    check_ids("allowed_token_ids", sampling.allowed_token_ids or (), runner)
    check_ids("logit_bias", tuple(sampling.logit_bias), runner)
    check_ids("stop_token_ids", tuple(sampling.stop_token_ids), runner)
    check_ids("bad_words", [token for word in sampling.bad_words for token in word], runner)


def check_prompt(prompt: Sequence[int], runner: Runner) -> None:
    if not prompt:
        raise BadRequest("The prompt is empty.", param="prompt")
    if len(prompt) >= runner.context:
        raise ContextOverflow(
            f"The prompt has {len(prompt)} tokens; prompt and answer together may have {runner.context}."
        )
    check_ids("prompt", prompt, runner)


def check_ids(param: str, ids: Sequence[int], runner: Runner) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < runner.vocabulary):
        raise BadRequest(f"`{param}` holds an id that is not in the vocabulary.", param=param)
