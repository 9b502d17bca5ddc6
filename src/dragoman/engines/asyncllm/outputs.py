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
        finish, error = ending(meta.get("finish_reason"))
        self.over = finish is not None
        seen = len(self._told)
        ids = self._new(output.get("output_ids") or (), meta.get("completion_tokens"))
        step = Step(ids, finish=finish, error=error)
        if finish == "stop" and ids and ids[-1] in self._job.sampling.stop_token_ids:
            step.stop_id = ids[-1]
        if self._job.sampling.logprobs is not None:
            step.logprobs = _logprobs(ids, seen, meta, self._job.sampling.logprobs)
        if first:
            step.cached_tokens = meta.get("cached_tokens")
            if self._job.sampling.prompt_logprobs is not None and error is None:
                step.prompt_logprobs = _of_prompt(self._job, meta)
        version = meta.get("weight_version")
        step.weight_version = None if version is None else str(version)
        return step

    def _new(self, ids: Sequence[int], count: int | None) -> list[int]:
        """What was not there before. Some engines give all ids each time, although they were asked to stream:
        then there are more than the count has grown by, and they begin with those that are known. It may be
        the list that the engine still adds to, so what is beyond the count belongs to the next output."""
        seen = len(self._told)
        if count is not None and len(ids) > count - seen and list(ids[:seen]) == self._told:
            ids = ids[seen:] if self.over else ids[seen:count]
        new = [int(id_) for id_ in ids]
        self._told += new
        return new


def _logprobs(ids: list[int], seen: int, meta: Mapping[str, Any], most: int) -> list[TokenLogprob]:
    """Of the new ids, after those that were seen."""
    size = len(ids)
    own = _part(meta.get("output_token_logprobs"), seen, size)
    tops = _part(meta.get("output_top_logprobs"), seen, size) if most else [()] * size
    made = [_entry(told, top, most) for told, top in zip(own, tops, strict=True)]
    if [entry.id for entry in made] != ids:
        raise EngineFailed("The engine's log probabilities are of other tokens than it gave.")
    return made


def _of_prompt(job: Job, meta: Mapping[str, Any]) -> list[TokenLogprob | None]:
    most = job.sampling.prompt_logprobs or 0
    # Nothing precedes the first id; engines say None there, or nothing.
    size = len(job.prompt) - 1
    own = _part(meta.get("input_token_logprobs"), 1, size)
    tops = _part(meta.get("input_top_logprobs"), 1, size) if most else [()] * size
    return [None, *(_entry(told, top, most) for told, top in zip(own, tops, strict=True))]


def _part(entries: Sequence[Any] | None, before: int, size: int) -> Sequence[Any]:
    """The entries after the first ones; if those are not in the list, all of it."""
    told = entries or ()
    start = before if len(told) >= before + size else 0
    if len(told) < size:
        raise EngineFailed("The engine gave no log probabilities for some tokens.")
    return told[start : start + size]


def _entry(told: Sequence[Any], top: Sequence[Sequence[Any]] | None, most: int) -> TokenLogprob:
    others = tuple((int(id_), _number(logprob)) for logprob, id_, *_ in (top or ())[:most])
    return TokenLogprob(int(told[1]), _number(told[0]), others)


def _number(logprob: Any) -> float:
    if logprob is None or isnan(logprob):
        raise EngineFailed("The engine gave a log probability that is not a number.")
    return float(logprob)
