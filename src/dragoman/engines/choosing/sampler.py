"""From a row of logits to the next id.

The order is vLLM's: allowed ids, bad words, minimum length, bias, penalties, temperature, min-p, typical-p,
top-k, top-p. Another order, and samplers beyond these, are in `filters.py`. Reported log probabilities are
those of the row as it came from the model.

Nearly all of a vocabulary is so unlikely that it decides nothing. So a draw first looks at the likely ids
alone, and knows what all the others weigh at most. Only where that much could change what comes out is the
whole row computed. Either way the id is the one that the whole row gives.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from dragoman.engines.choosing import Change, Edit, Ids, Logits, Places, Weights, scratch
from dragoman.engines.choosing.edits import apply, edits
from dragoman.engines.choosing.filters import Ordered, Undecided, largest, nucleus, pick, typical
from dragoman.engines.steps import seed_of
from dragoman.types import Sampling, TokenLogprob

# What the unlikely ids together weigh at most, where the likeliest id weighs 1. With less, more ids are
# likely; with more, the whole row is needed more often.
_REST = 1e-2
# Where more than one in so many ids is likely, to compute the whole row takes no longer.
_MANY = 32
# Nothing changes below that, and 1 / temperature stays a number.
COLDEST = 1e-30
_NEVER = np.float32(-np.inf)
_AT_ONCE = 32


class NoTokenLeft(Exception):
    """Masks and filters together leave nothing to choose from."""


class Sampler:
    """The choices of one continuation.

    With a seed they are the same each time the same logits come in: each continuation has a generator of
    its own, made from the seed and its index. The logits themselves may differ in their last bits with the
    other sequences in the step and with where the prompt was cut, so a seed does not promise the same text
    under another load.
    """

    def __init__(
        self, sampling: Sampling, index: int, prompt: Ids, vocabulary: int, ends: frozenset[int]
    ) -> None:
        self._sampling = sampling
        self._edits = edits(sampling, prompt, ends)
        self._mask: Callable[[Logits], None] | None = None
        self._uniforms: list[float] = []
        """Drawn in advance, the next one last."""
        self._random = None if sampling.temperature <= 0 else _generator(sampling.seed, index)
        asked = sampling.samplers
        self._ordered = None if asked is None else Ordered(sampling, asked, vocabulary)

    def add(self, edit: Edit) -> None:
        """One more rule, applied after the others."""
        self._edits.append(edit)

    def hold_to(self, mask: Callable[[Logits], None]) -> None:
        """What a constraint forbids. It comes after all rules, so that none of them lets a wrong id pass."""
        self._mask = mask

    @property
    def takes_largest(self) -> bool:
        """Whether it is the largest logit that decides, and no rule changes any."""
        return self._random is None and not self.edited

    @property
    def edited(self) -> bool:
        """Whether anything changes the row."""
        return bool(self._edits) or self._mask is not None

    @property
    def drawable(self) -> bool:
        """Whether temperature, min-p, top-k and top-p say all that is done with a row that rules changed."""
        return self._sampling.typical_p >= 1 and self._ordered is None

    def changes(self, output: Sequence[int]) -> list[Change]:
        """What the rules change next. They are asked once for each id, by this or by `sample`."""
        return [change for edit in self._edits for change in edit(output)]

    def uniform(self) -> float:
        """The number in [0, 1) that decides the next draw; 0 where nothing is drawn."""
        if self._random is None:
            return 0.0
        if not self._uniforms:
            # One by one the same would come, in more time.
            self._uniforms = self._random.random(_AT_ONCE)[::-1].tolist()
        return self._uniforms.pop()

    def give_back(self, uniforms: Sequence[float]) -> None:
        """The last ones that were drawn decided nothing: they are drawn again."""
        if self._random is not None:
            self._uniforms += reversed(uniforms)

    def sample(self, row: Logits, output: Sequence[int]) -> int:
        """The next id, given the row for it and the ids generated so far. `row` is left as it is."""
        if self.edited:
            own = scratch(row.size, "row")
            np.copyto(own, row)
            row = own
            apply(row, self.changes(output))
            if self._mask is not None:
                self._mask(row)
        if self._random is None:
            best = int(row.argmax())
            if row[best] == _NEVER:
                raise NoTokenLeft
            return best
        if self._ordered is not None:
            if row.max() == _NEVER:
                raise NoTokenLeft
            return self._ordered.draw(row, self._random.random)
        return draw(row, self._sampling, self.uniform())

    def report(self, row: Logits, token: int) -> TokenLogprob:
        return logprob(row, token, self._sampling.logprobs or 0)


def draw(row: Logits, sampling: Sampling, uniform: float) -> int:
    """Pick an id by temperature and filters; `uniform` in [0, 1) decides which."""
    peak = row.max()
    if peak == _NEVER:
        raise NoTokenLeft
    ids, rest = _likely(row, float(peak), sampling)
    if rest:
        try:
            return _choose(row, peak, ids, rest, sampling, uniform)
        except Undecided:
            ids = None
    return _choose(row, peak, ids, 0.0, sampling, uniform)


def _likely(row: Logits, peak: float, sampling: Sampling) -> tuple[Places | None, float]:
    """The ids to look at, in order, and what the others weigh at most. None stands for all ids."""
    if sampling.min_p > 0:
        floor = np.float32(peak + math.log(sampling.min_p) * sampling.temperature)
        return (row >= floor).nonzero()[0], 0.0
    if sampling.top_k > 0 or sampling.typical_p < 1:
        return None, 0.0
    floor = np.float32(peak + math.log(_REST / row.size) * sampling.temperature)
    # Rounded down, so that nothing that weighs more is left out.
    likely = row >= np.nextafter(floor, _NEVER)
    if np.count_nonzero(likely) > row.size // _MANY:
        return None, 0.0
    return likely.nonzero()[0], _REST


def _choose(
    row: Logits, peak: np.float32, ids: Places | None, rest: float, sampling: Sampling, uniform: float
) -> int:
    """Draw from these ids, if the others, which weigh `rest` at most, cannot change what comes out."""
    values = row if ids is None else row[ids]
    if sampling.typical_p < 1:
        places = typical(_weights(values, peak, sampling.temperature), sampling.typical_p)
        ids, values = _narrow(ids, values, places)
    if 0 < sampling.top_k < values.size:
        ids, values = _narrow(ids, values, np.sort(largest(values, sampling.top_k)))
    weights = _weights(values, peak, sampling.temperature)
    if sampling.top_p < 1:
        kept, rest = nucleus(weights, sampling.top_p, rest)
        ids, weights = _narrow(ids, weights, kept)
    place = pick(weights, uniform, rest)
    return place if ids is None else int(ids[place])


def _weights(values: Logits, peak: np.float32, temperature: float) -> Weights:
    """How likely each is, against the likeliest."""
    weights = np.subtract(values, peak, out=scratch(values.size))
    if temperature != 1:
        weights *= np.float32(1 / max(temperature, COLDEST))
    return np.exp(weights, out=weights)


def _narrow(ids: Places | None, values: Logits, places: Places) -> tuple[Places, Logits]:
    return (places if ids is None else ids[places]), values[places]


def logprob(row: Logits, token: int, top: int) -> TokenLogprob:
    """The log probability of `token` in `row`, and the `top` most likely ids with theirs."""
    peak = row.max()
    base = float(peak) + math.log(_weights(row, peak, 1.0).sum())
    if top <= 0:
        return TokenLogprob(token, float(row[token]) - base)
    places = largest(row, min(top, row.size))
    # Equal values are put in the order of their ids, so that the answer does not depend on the partition.
    places = places[np.lexsort((places, -row[places]))]
    alternatives = tuple((int(i), float(row[i]) - base) for i in places)
    return TokenLogprob(token, float(row[token]) - base, alternatives)


def _generator(seed: int | None, index: int) -> np.random.Generator:
    if seed is None:
        return np.random.Generator(np.random.PCG64())
    return np.random.Generator(np.random.PCG64([seed_of(seed, index) & (2**64 - 1), 0]))
