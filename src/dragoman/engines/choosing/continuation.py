"""One continuation of a job: which id comes next, and whether the answer ends there."""

from dragoman.engines.choosing.arrays import Ids, Logits
from dragoman.engines.choosing.edits import forbid_until
from dragoman.engines.choosing.sampler import NoTokenLeft, Sampler
from dragoman.errors import BadRequest, ConstraintFailed
from dragoman.types import FinishReason, Foreseeing, Job, Preparing, Step, TokenLogprob


class Continuation:
    """`room` is how many ids the context has left after the prompt; `ends` are the model's own end ids."""

    __slots__ = ("_ends", "_matcher", "_most", "_sampler", "foreseen", "index", "output", "sampling")

    def __init__(
        self, job: Job, index: int, prompt: Ids, *, vocabulary: int, ends: frozenset[int], room: int
    ) -> None:
        sampling = self.sampling = job.sampling
        self.index = index
        self.output: list[int] = []
        self.foreseen: list[int] = []
        """What the constraint makes come next, as far as it has been worked out."""
        self._ends = ends
        self._most = min(sampling.max_tokens, room)
        self._sampler = Sampler(sampling, index, prompt, vocabulary, ends)
        matcher = self._matcher = None if job.constraint is None else job.constraint.start()
        if matcher is not None:
            if sampling.ignore_eos:
                # The answer goes on as long as the constraint lets it.
                self._sampler.add(forbid_until(ends, sampling.max_tokens))
            # The mask comes after all other rules, so that none of them lets a wrong id pass.
            self._sampler.add(lambda row, output: matcher.mask(row))

    def advance(self, row: Logits, token: int | None = None) -> Step:
        """Choose the next id, unless it has been chosen. A step with a finish is the last one."""
        if self._most <= 0:
            return Step([], self.index, finish="length")
        try:
            if token is None:
                token = self._sampler.sample(row, self.output)
            if self._matcher is not None:
                self._matcher.accept(token)
                self.foreseen = self.foreseen[1:] if self.foreseen[:1] == [token] else []
        except NoTokenLeft:
            return Step([], self.index, finish="error", error=self._nothing_left())
        except ConstraintFailed as error:
            return Step([], self.index, finish="error", error=error)
        step = self.take(token)
        if self.sampling.logprobs is not None:
            step.logprobs = [self._sampler.report(row, token)]
        return step

    @property
    def constrained(self) -> bool:
        return self._matcher is not None

    def prepare(self, ahead: int) -> None:
        """Work out what the constraint lets come next, before there is a row. On any thread.

        And up to so many ids what has to come.
        """
        if isinstance(self._matcher, Preparing):
            self._matcher.prepare()
        if ahead and isinstance(self._matcher, Foreseeing):
            self.foreseen = self._matcher.foresee(ahead)

    @property
    def takes_largest(self) -> bool:
        """Whether the largest logit decides, and nothing else is asked of the row: then `take` is enough."""
        return self._sampler.takes_largest and self.sampling.logprobs is None and self._most > 0

    @property
    def plain(self) -> bool:
        """Whether row and `sampling` decide alone: then whoever has the row may choose, with `uniform`."""
        return self._sampler.plain and self._most > 0

    def uniform(self) -> float:
        """The number in [0, 1) that decides the next draw."""
        return self._sampler.uniform()

    def take(self, token: int, logprob: TokenLogprob | None = None) -> Step:
        """The id was chosen."""
        self.output.append(token)
        finish, stop_id = self._finish(token)
        logprobs = None if logprob is None else [logprob]
        return Step([token], self.index, finish=finish, stop_id=stop_id, logprobs=logprobs)

    def _finish(self, token: int) -> tuple[FinishReason | None, int | None]:
        sampling, matcher = self.sampling, self._matcher
        # Under a constraint an end id can also be a marker in the middle of an answer.
        may_end = not sampling.ignore_eos if matcher is None else matcher.accepting
        if token in self._ends and may_end:
            return "stop", None
        if token in sampling.stop_token_ids:
            return "stop", token
        if matcher is not None and matcher.over:
            return "stop", None
        return ("length" if len(self.output) >= self._most else None), None

    def _nothing_left(self) -> BadRequest:
        why = "" if self._matcher is None else "the constraint of the answer, "
        message = (
            f"No token can come next after {len(self.output)} of the answer: {why}allowed_token_ids,"
            " bad_words, logit_bias, min_tokens and ignore_eos together forbid all of them."
        )
        return BadRequest(message, code="no_token_left")
