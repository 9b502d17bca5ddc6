"""Sampling of many rows at once on the device that has them: only ids and log probabilities are copied.

It does the same as `sampler.py` does row by row in numpy. Changes to a row come as data. The random numbers
come from each answer's own generator, so seeds mean the same here.
"""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from dragoman.engines.sampling import RowChanges
from dragoman.engines.sampling.batched import SamplingBatch
from dragoman.types import Sampling, TokenLogprob

Chosen: TypeAlias = tuple[int, TokenLogprob | None]


class DrawKernel(Protocol):
    """Kernels for sampling, whose order of operations depends on the row alone."""

    def __call__(
        self, rows: torch.Tensor, samplings: Sequence[Sampling], uniforms: Sequence[float]
    ) -> torch.Tensor:
        """Sample as `draw_rows` does."""

    def total(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the logarithm of the total weight of each row's ids, as a column."""


def at(rows: torch.Tensor, indices: list[int]) -> torch.Tensor:
    """Return the rows at these indices, without a copy if it is all of them."""
    return rows if len(indices) == rows.size(0) else rows[put(indices, rows.device)]


def put(values: Any, device: torch.device) -> torch.Tensor:
    """Copy numbers to a device, without waiting for the work queued there."""
    result = torch.as_tensor(values)
    return result.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else result


def choose(
    rows: torch.Tensor,
    samplings: Sequence[Sampling],
    uniforms: Sequence[float],
    draw: DrawKernel | None = None,
) -> list[Chosen]:
    """Sample an id for each row, with its log probability if requested."""
    return PendingSamples(rows, ids_of(rows, samplings, uniforms, draw), samplings, draw).wait()


def ids_of(
    rows: torch.Tensor,
    samplings: Sequence[Sampling],
    uniforms: Sequence[float],
    draw: DrawKernel | None = None,
) -> torch.Tensor:
    """Sample ids; at temperature 0 the largest. `draw` is a kernel with the result of `draw_rows`."""
    ids = rows.argmax(dim=-1)
    drawn = [index for index, sampling in enumerate(samplings) if sampling.temperature > 0]
    if drawn:
        asked, numbers = [samplings[position] for position in drawn], [uniforms[row] for row in drawn]
        result = (draw or draw_rows)(at(rows, drawn), asked, numbers)
        ids = result if len(drawn) == len(ids) else ids.index_copy_(0, put(drawn, rows.device), result)
    return ids


def chosen_ids(rows: torch.Tensor, drawn: SamplingBatch, draw: DrawKernel | None = None) -> torch.Tensor:
    """Sample an id for each row after its changes; -1 if all ids are forbidden."""
    if not drawn.row_changes and not drawn.known:
        return ids_of(rows, drawn.asked, drawn.uniforms, draw)
    ids = torch.zeros(len(drawn.rows), dtype=torch.int64, device=rows.device)
    plain = [
        index for index in range(len(ids)) if index not in drawn.row_changes and index not in drawn.known
    ]
    for indices in (plain, [*drawn.row_changes]):
        if not indices:
            continue
        mine = at(rows, indices)
        if indices is not plain:
            mine = edit(mine.clone() if mine is rows else mine, [*drawn.row_changes.values()])
        asked, uniforms = (
            [drawn.asked[position] for position in indices],
            [drawn.uniforms[row] for row in indices],
        )
        result = ids_of(mine, asked, uniforms, draw)
        if indices is not plain:
            result = torch.where(mine.amax(dim=-1) == -torch.inf, -1, result)
        ids.index_copy_(0, put(indices, rows.device), result)
    if drawn.known:
        ids.index_copy_(0, put([*drawn.known], ids.device), put([*drawn.known.values()], ids.device))
    return ids


def edit(rows: torch.Tensor, rules: Sequence[RowChanges]) -> torch.Tensor:
    """Change rows in place, as `logits_processors.apply` does one: the first change of all rows, then the
    second, and so on. Masks come last, because no change re-allows a forbidden id.
    """
    flat, size = rows.view(-1), rows.size(1)
    for changes in zip_longest(*(one.changes for one in rules)):
        parts = [(index, one) for index, one in enumerate(changes) if one is not None and not one.alone]
        for adds in (True, False):
            mine = [(position, one) for position, one in parts if (one.amounts is not None) == adds]
            if not mine:
                continue
            where = put(np.concatenate([row * size + one.ids for row, one in mine]), rows.device)
            by = [
                np.full(one.ids.size, one.factor, np.float32) if one.amounts is None else one.amounts
                for _, one in mine
            ]
            values, amounts = flat[where], put(np.concatenate(by), rows.device)
            if adds:
                values += amounts
            else:
                values = torch.where(values > 0, values / amounts, values * amounts)
            flat.index_copy_(0, where, values)
    masks = {place: mask for place, one in enumerate(rules) if (mask := _mask(one, size)) is not None}
    if masks:
        where = put([*masks], rows.device)
        bits = put(np.stack([*masks.values()]).view(np.uint8), rows.device)
        bits = bits.unsqueeze(2) >> torch.arange(8, dtype=torch.uint8, device=rows.device) & 1
        rows.index_copy_(
            0, where, rows[where].masked_fill_(bits.view(len(masks), -1)[:, :size] == 0, -torch.inf)
        )
    return rows


def _mask(rules: RowChanges, size: int) -> NDArray[np.uint32] | None:
    """Return the bits of all ids that are not forbidden; None if there is no mask."""
    array = np.full(-(-size // 32), 2**32 - 1, np.uint32)
    masks = [_bits(change.ids, size) for change in rules.changes if change.alone]
    if rules.bitmask is not None and rules.bitmask.size:
        masks.append(rules.bitmask)
    for words in masks:
        array[: words.size] &= words[: array.size]
        array[words.size :] = 0
    return array if masks else None


def _bits(indices: NDArray[np.intp], size: int) -> NDArray[np.uint32]:
    possible = np.zeros(-(-size // 32) * 32, np.bool_)
    possible[indices] = True
    return np.packbits(possible, bitorder="little").view(np.uint32)


class PendingSamples:
    """Sampled ids and their log probabilities, on their way from the device."""

    def __init__(
        self,
        rows: torch.Tensor,
        ids: torch.Tensor,
        samplings: Sequence[Sampling],
        draw: DrawKernel | None = None,
    ) -> None:
        self._ids = _fetch(ids)
        self._reported = [index for index, one in enumerate(samplings) if one.logprobs is not None]
        self._tops = [samplings[position].logprobs or 0 for position in self._reported]
        if self._reported:
            items = report(at(rows, self._reported), at(ids, self._reported), max(self._tops), draw)
            self._told = [_fetch(each) for each in items]
        self._done = torch.cuda.Event() if ids.is_cuda else None
        if self._done is not None:
            self._done.record()

    def wait(self) -> list[Chosen]:
        if self._done is not None:
            self._done.synchronize()
        ids: list[int] = self._ids.tolist()
        if not self._reported:
            return [(id_, None) for id_ in ids]
        own, likely, theirs = (each.tolist() for each in self._told)
        mapping = {
            index: _entry(ids[index], own[number], top, likely[number], theirs[number])
            for number, (index, top) in enumerate(zip(self._reported, self._tops, strict=True))
        }
        return [(id_, mapping.get(position)) for position, id_ in enumerate(ids)]


def _fetch(values: torch.Tensor) -> torch.Tensor:
    """Start a copy to the host."""
    if not values.is_cuda:
        return values
    here = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return here.copy_(values, non_blocking=True)


def draw_rows(rows: torch.Tensor, samplings: Sequence[Sampling], uniforms: Sequence[float]) -> torch.Tensor:
    """Draw an id for each row by temperature and filters; a number in [0, 1) decides which."""

    def column(values: Sequence[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=rows.device).unsqueeze(1)

    weights = rows / column([sampling.temperature for sampling in samplings])
    weights = weights.sub_(weights.amax(dim=-1, keepdim=True)).exp_()
    if any(sampling.min_p > 0 for sampling in samplings):
        weights[weights < column([sampling.min_p for sampling in samplings])] = 0
    if any(0 < sampling.top_k < rows.size(1) for sampling in samplings):
        weights = _largest(weights, [sampling.top_k for sampling in samplings])
    if any(sampling.top_p < 1 for sampling in samplings):
        weights = _nucleus(weights, column([sampling.top_p for sampling in samplings]))
    sums = weights.cumsum(dim=-1, dtype=torch.float64)
    total = sums[:, -1:]
    # Below the total, so that the id has a weight, whatever is rounded.
    target = torch.minimum(column(uniforms, torch.float64) * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(sums, target, right=True).squeeze(1).clamp_(max=rows.size(1) - 1)


def report(
    rows: torch.Tensor, ids: torch.Tensor, most: int, draw: DrawKernel | None = None
) -> tuple[torch.Tensor, ...]:
    """Return the log probability of each row's id, and the `most` most likely ids with theirs."""
    base = rows.logsumexp(dim=-1, keepdim=True) if draw is None else draw.total(rows)
    own = (rows.gather(1, ids.clamp(min=0).unsqueeze(1)) - base).squeeze(1)
    values, indices = rows.topk(min(most, rows.size(1)), dim=-1)
    return own, indices, values - base


def _entry(id_: int, own: float, top: int, likely: list[int], theirs: list[float]) -> TokenLogprob:
    # Equal values are ordered by id, so that the result does not depend on the device.
    ranked = sorted(zip(theirs[:top], likely[:top], strict=True), key=lambda pair: (-pair[0], pair[1]))
    return TokenLogprob(id_, own, tuple((likely_id, value) for value, likely_id in ranked))


def _largest(weights: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Keep only the given number of largest weights in each row; a count of 0 keeps all."""
    size = weights.size(1)
    limits = [min(count, size) if count > 0 else size for count in counts]
    most = max(limit for limit in limits if limit < size)
    values, indices = weights.topk(most, dim=-1)
    limit = torch.tensor(limits, device=weights.device).unsqueeze(1)
    values[torch.arange(most, device=weights.device) >= limit] = 0
    kept = torch.zeros_like(weights).scatter_(1, indices, values)
    return torch.where(limit < size, kept, weights)


def _nucleus(weights: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keep the fewest largest weights that sum to `top_p` of the total; equal weights are kept together."""
    descending = weights.sort(dim=-1, descending=True).values
    reached = descending.cumsum(dim=-1, dtype=torch.float64)
    last = torch.searchsorted(reached, top_p * reached[:, -1:]).clamp_(max=weights.size(1) - 1)
    # A row with top-p 1 also keeps weights too small to change the sum, as it would alone.
    return torch.where((weights >= descending.gather(1, last)) | (top_p >= 1), weights, 0)
