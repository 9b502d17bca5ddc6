"""vLLM's outputs as steps, and its exceptions as errors for clients."""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from dragoman.errors import (
    MODEL,
    BadRequest,
    DragomanError,
    EngineFailed,
    ModelNotFound,
    ParamKey,
    Unavailable,
)
from dragoman.types import FinishReason, Job, Sink, Step, TokenLogprob

# Errors.


logger = logging.getLogger("dragoman.engine")
DEAD = "The engine failed and takes no more requests."
FAILED = "The engine failed during the answer."


@contextmanager
def telling_errors() -> Iterator[None]:
    """Convert vLLM's exceptions in the block to DragomanErrors, with the matching status."""
    try:
        yield
    except DragomanError:
        raise
    except Exception as error:
        raise error_of(error) from error


def error_of(error: Exception) -> DragomanError:
    """Convert an exception by its class names: vLLM's errors change, and older versions raise ValueError."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "VLLMNotFoundError" in kinds:
        return ModelNotFound("vLLM no longer has the adapter of this model.", param=MODEL)
    if kinds & {"VLLMClientError", "ValueError"}:
        # These messages are written for clients: vLLM's own server shows them.
        message = str(error.args[0]) if error.args else "vLLM rejected this request."
        named = getattr(error, "parameter", None)
        return BadRequest(message, param=ParamKey(named) if named else None, code="invalid_value")
    if "GracefulHTTPError" in kinds:
        return Unavailable("The engine accepts no more requests at the moment; retry later.")
    if "EngineDeadError" in kinds:
        return EngineFailed(DEAD)
    logger.error("vLLM failed", exc_info=error)
    return EngineFailed("The engine failed in this call.")


# Steps.


_FINISHES: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


def finish_of(reason: Any) -> FinishReason:
    """Convert a finish reason; an unknown one is an error, never a good answer."""
    return _FINISHES.get(str(reason), "error")


def join_outputs(step: Step, later: Step) -> Step:
    """Join two steps of one continuation."""
    step.ids += later.ids
    if step.logprobs is not None and later.logprobs is not None:
        step.logprobs += later.logprobs
    step.finish, step.stop_id, step.error = later.finish, later.stop_id, later.error
    step.weight_version = later.weight_version
    return step


class CoreContinuation:
    """One answer of a job: converts vLLM's outputs to steps for its sink."""

    __slots__ = ("_begun", "_cached", "_index", "_prompt", "_stops", "_top", "_top_prompt", "sink")

    def __init__(self, job: Job, index: int, sink: Sink) -> None:
        self._index = index
        self.sink = sink
        self._stops = job.sampling.stop_token_ids
        self._top = job.sampling.logprobs or 0
        self._top_prompt = job.sampling.prompt_logprobs
        self._prompt: list[TokenLogprob | None] = [None]
        self._cached = 0
        self._begun = False

    def step(self, output: Any, version: str | None) -> Step | None:
        if not self._begun:
            self._read_prompt(output)
            if not output.new_token_ids and output.finish_reason is None:
                # Only a chunk of a long prompt was computed.
                return None
        step = Step(output.new_token_ids, self._index, weight_version=version)
        if output.new_logprobs is not None:
            ids, logprobs, *_ = output.new_logprobs
            step.logprobs = _make_logprobs(ids.tolist(), logprobs.tolist(), self._top)
        if not self._begun:
            self._begin(step)
        if output.finish_reason is not None:
            self._finish(step, output)
        return step

    def end(self, finish: FinishReason, error: DragomanError | None = None) -> None:
        self.sink(Step([], self._index, finish=finish, error=error))

    def _read_prompt(self, output: Any) -> None:
        """Collect facts about the prompt, which come in chunks as it is computed."""
        if output.prefill_stats is not None:
            self._cached = output.prefill_stats.num_cached_tokens
        if self._top_prompt is not None and output.new_prompt_logprobs_tensors is not None:
            ids, logprobs, *_ = output.new_prompt_logprobs_tensors
            self._prompt += _make_logprobs(ids.tolist(), logprobs.tolist(), self._top_prompt)

    def _begin(self, step: Step) -> None:
        self._begun = True
        if self._index == 0:
            step.cached_tokens = self._cached
            if self._top_prompt is not None:
                step.prompt_logprobs = self._prompt

    def _finish(self, step: Step, output: Any) -> None:
        step.finish = finish_of(output.finish_reason)
        if step.finish == "error":
            step.error = EngineFailed(FAILED)
        if output.stop_reason in self._stops:
            step.stop_id = output.stop_reason


def _make_logprobs(ids: Iterable[list[int]], logprobs: Iterable[list[float]], top: int) -> list[TokenLogprob]:
    """Convert vLLM's rows, which have the sampled id first and then as many of the likeliest as any
    request of the step wants.
    """
    return [
        TokenLogprob(row[0], values[0], tuple(zip(row[1 : top + 1], values[1 : top + 1], strict=True)))
        for row, values in zip(ids, logprobs, strict=True)
    ]
