"""New weights for a model that runs: tensors of this process or of another one, or files.

All that can be wrong with them is found before the first is changed. They are copied into the matrices that
are there, so recorded graphs stay as they are, and only the tensors that are given are others then.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from dragoman.engines.local.pytorch.weights import TensorFiles, Weights, read_tensors
from dragoman.errors import BadRequest, EngineFailed

TensorHandle: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...]]
"""A tensor of another process, as `torch.multiprocessing.reductions.reduce_tensor` gives it: on a GPU that is
CUDA's handle, and what is behind it is not copied on the way."""
WeightSource: TypeAlias = (
    Mapping[str, Tensor | TensorHandle] | Iterable[tuple[str, Tensor | TensorHandle]] | str | Path
)


def read_weights(weights: Weights, source: WeightSource) -> Callable[[], None]:
    """What puts them in place. Raises BadRequest or ModelFileError for what is not this model's."""
    if isinstance(source, str | Path):
        path = Path(source).expanduser()
        _check_files(weights, path)
        return partial(_put, weights, read_tensors(path))
    pairs = source.items() if isinstance(source, Mapping) else source
    named = [(name, _tensor(name, value)) for name, value in pairs]
    if not named:
        raise BadRequest("There are no weights in what was given.")
    for name, tensor in named:
        weights.place(name, tensor.shape)
    if any(tensor.is_cuda for _, tensor in named):
        # They may come of work that is still under way on another stream.
        torch.cuda.synchronize()
    return partial(_put, weights, named)


def _tensor(name: str, value: object) -> Tensor:
    if isinstance(value, tuple) and len(value) == 2:
        rebuild, args = value
        if getattr(rebuild, "__module__", "") != reductions.__name__:
            raise BadRequest(f"{name!r} is no handle of torch.multiprocessing.reductions.reduce_tensor.")
        value = rebuild(*args)
    if not isinstance(value, Tensor) or value.is_meta or not value.is_floating_point():
        raise BadRequest(f"{name!r} is no tensor of floating-point numbers.")
    if value.element_size() == 1:
        raise BadRequest(f"{name!r} has eight bits without scales; give what it stands for, in 16 or more.")
    return value


def _check_files(weights: Weights, path: Path) -> None:
    """By their headers: nothing else is read yet."""
    files = TensorFiles(path)
    for name in files:
        weights.place(name, files.shape(name))


def _put(weights: Weights, named: Iterable[tuple[str, Tensor]]) -> None:
    try:
        weights.update(named)
        if weights.embedding.is_cuda:
            # Whoever gave them may change them when this is told to be done.
            torch.cuda.synchronize()
    except Exception as error:
        raise EngineFailed(
            "Only a part of the weights could be put in place; give all of them again."
        ) from error
