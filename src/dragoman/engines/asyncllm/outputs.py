"""What an engine yields for one request, as steps. Ids are what counts; the text beside them is not read."""

from collections.abc import Mapping, Sequence
from math import isnan
from typing import Any

from dragoman.engines.asyncllm.endings import ending
from dragoman.errors import EngineFailed
from dragoman.types import Job, Step, TokenLogprob


class OutputReader:
    """Reads the outputs of one request, in order."""

    def __init__(self, job: Job) -> None:
        self.begun = False
        self.over = False
        self._job = job
        self._told: list[int] = []

    def step(self, output: Mapping[str, Any]) -> Step:
        meta: Mapping[str, Any] = output.get("meta_info") or {}
        first, self.begun = not self.begun, True
        ids = self._new(output.get("output_ids") or (), meta.get("completion_tokens"))
        finish, error = ending(meta.get("finish_reason"))
        self.over = finish is not None
        step = Step(ids, finish=finish, error=error)
        if finish == "stop" and ids and ids[-1] in self._job.sampling.stop_token_ids:
            step.stop_id = ids[-1]
        if self._job.sampling.logprobs is not None:
            step.logprobs = _logprobs(ids, meta, self._job.sampling.logprobs)
        if first:
            step.cached_tokens = meta.get("cached_tokens")
            if self._job.sampling.prompt_logprobs is not None and error is None:
                step.prompt_logprobs = _of_prompt(self._job, meta)
        version = meta.get("weight_version")
        step.weight_version = None if version is None else str(version)
        return step

    def _new(self, ids: Sequence[int], count: int | None) -> list[int]:
        """What was not there before. Some engines give all ids each time, although they were asked to stream:
        then there are more than the count has grown by, and they begin with those that are known."""
        seen = len(self._told)
        if seen and count is not None and len(ids) > count - seen and list(ids[:seen]) == self._told:
            ids = ids[seen:]
        new = [int(id_) for id_ in ids]
        self._told += new
        return new


def _logprobs(ids: list[int], meta: Mapping[str, Any], most: int) -> list[TokenLogprob]:
    """Of the new ids. The engine's lists may hold those of earlier ids too: their end is what counts."""
    own = _end(meta.get("output_token_logprobs"), len(ids))
    tops: Sequence[Any] = _end(meta.get("output_top_logprobs"), len(ids)) if most else [()] * len(ids)
    made = [_entry(told, top, most) for told, top in zip(own, tops, strict=True)]
    if [entry.id for entry in made] != ids:
        raise EngineFailed("The engine's log probabilities are of other tokens than it gave.")
    return made


def _of_prompt(job: Job, meta: Mapping[str, Any]) -> list[TokenLogprob | None]:
    most = job.sampling.prompt_logprobs or 0
    # Nothing precedes the first id; engines say None there, or nothing.
    size = len(job.prompt) - 1
    own = _end(meta.get("input_token_logprobs"), size)
    tops: Sequence[Any] = _end(meta.get("input_top_logprobs"), size) if most else [()] * size
    return [None, *(_entry(told, top, most) for told, top in zip(own, tops, strict=True))]


def _end(entries: Sequence[Any] | None, size: int) -> Sequence[Any]:
    if len(entries or ()) < size:
        raise EngineFailed("The engine gave no log probabilities for some tokens.")
    return entries[len(entries) - size :] if entries else ()


def _entry(told: Sequence[Any], top: Sequence[Sequence[Any]] | None, most: int) -> TokenLogprob:
    others = tuple((int(id_), _number(logprob)) for logprob, id_, *_ in (top or ())[:most])
    return TokenLogprob(int(told[1]), _number(told[0]), others)


def _number(logprob: Any) -> float:
    if logprob is None or isnan(logprob):
        raise EngineFailed("The engine gave a log probability that is not a number.")
    return float(logprob)
