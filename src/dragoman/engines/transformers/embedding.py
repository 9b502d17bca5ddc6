"""Vectors of prompts: the mean of the last hidden states."""

from collections.abc import Iterable, Sequence
from typing import Any


def mean_vectors(model: Any, prompts: Iterable[Sequence[int]]) -> list[list[float]]:
    """One vector of length one per prompt; one at a time, because padding would change them."""
    import torch

    with torch.no_grad():
        return [_vector(model.base_model, torch.tensor([list(ids)], device=model.device)) for ids in prompts]


def _vector(model: Any, ids: Any) -> list[float]:
    states = model(input_ids=ids).last_hidden_state[0].float()
    mean = states.mean(dim=0)
    vector: list[float] = (mean / mean.norm().clamp(min=1e-12)).tolist()
    return vector
