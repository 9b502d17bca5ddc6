"""From the events of a completions stream to steps."""

from dragoman.client import Finished, StreamEvent, Text, Token, Unseen, Used
from dragoman.engines.protocol import Tokenizer
from dragoman.errors import EngineFailed
from dragoman.types import FinishReason, Job, Step, TokenLogprob

_FINISHES: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class Hearing:
    """`hear` gives what can be passed on at once, `last` the step that ends the answer.

    Where `sampled` is false the upstream gives text, and ids are made from it.
    """

    def __init__(self, job: Job, tokenizer: Tokenizer, *, sampled: bool) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self._sampled = sampled
        self._ends = tokenizer.end_ids | job.sampling.stop_token_ids
        self._held: Step | None = None
        """A step with what may be the end of the answer, which has to come with its finish."""
        self._finished: Finished | None = None
        self._cached: int | None = None

    def hear(self, event: StreamEvent) -> Step | None:
        match event:
            case Text() | Unseen():
                step = self._step(event.text, event.tokens)
                before, self._held = self._held, None
                if before is not None:
                    step = _joined(before, step)
                if step.ids and step.ids[-1] not in self._ends:
                    return step
                self._held = step
            case Finished():
                self._finished = event
            case Used():
                self._cached = event.usage.cached_tokens
        return None

    def last(self) -> Step:
        if self._finished is None:
            raise EngineFailed("The upstream did not say how the answer ended.")
        finish = _FINISHES.get(self._finished.reason)
        if finish is None:
            raise EngineFailed(
                f"The upstream ended the answer for a reason of its own: {self._finished.reason}."
            )
        step = self._held or Step([], logprobs=None if self._job.sampling.logprobs is None else [])
        step.finish, step.cached_tokens = finish, self._cached
        stop = self._finished.stop
        step.stop_id = stop if isinstance(stop, int) and stop in self._job.sampling.stop_token_ids else None
        return step

    def _step(self, text: str, tokens: list[Token]) -> Step:
        if not self._sampled:
            return Step(self._tokenizer.encode(text))
        ids = [token.id for token in tokens if token.id is not None]
        if len(ids) != len(tokens) or (text and not ids):
            raise EngineFailed("The upstream gave text without its ids.")
        if any(not 0 <= id_ < len(self._tokenizer.pieces) for id_ in ids):
            raise EngineFailed("The upstream gave an id that the vocabulary does not have.")
        wanted = self._job.sampling.logprobs
        return Step(ids, logprobs=None if wanted is None else [_logprob(token, wanted) for token in tokens])


def _joined(first: Step, second: Step) -> Step:
    logprobs = None if first.logprobs is None else first.logprobs + (second.logprobs or [])
    return Step(first.ids + second.ids, logprobs=logprobs)


def _logprob(token: Token, wanted: int) -> TokenLogprob:
    if token.id is None or token.logprob is None:
        raise EngineFailed("The upstream left out log probabilities that it was asked for.")
    top = [(one.id, one.logprob) for one in token.top if one.id is not None and one.logprob is not None]
    top.sort(key=lambda entry: -entry[1])
    return TokenLogprob(token.id, token.logprob, tuple(top[:wanted]))
