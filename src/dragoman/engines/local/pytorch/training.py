"""New weights for a running model: tensors of this process or of another one, or files.

Everything is validated before the first weight is changed. They are copied into the existing matrices, so
recorded graphs stay valid, and only the given tensors change.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from dragoman.engines.local.pytorch.weights import ModelWeights, TensorFiles, read_tensors
from dragoman.errors import BadRequest, EngineFailed

TensorHandle: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...]]
"""A tensor of another process, as `torch.multiprocessing.reductions.reduce_tensor` returns it: on a GPU
that is a CUDA handle, and the data is not copied.
"""
WeightSource: TypeAlias = (
    Mapping[str, Tensor | TensorHandle] | Iterable[tuple[str, Tensor | TensorHandle]] | str | Path
)


def read_weights(weights: ModelWeights, source: WeightSource) -> Callable[[], None]:
    """Return the function that installs the weights. Raises BadRequest or ModelFileError for weights that
    do not fit.
    """
    if isinstance(source, str | Path):
        path = Path(source).expanduser()
        _check_files(weights, path)
        return partial(_put, weights, read_tensors(path))
    pairs = source.items() if isinstance(source, Mapping) else source
    named = [(name, _tensor(name, value)) for name, value in pairs]
    if not named:
        raise BadRequest("No weights were given; give at least one tensor.")
    for name, tensor in named:
        weights.find_matrix(name, tensor.shape)
    if any(tensor.is_cuda for _, tensor in named):
        # They may depend on work that is still running on another stream.
        torch.cuda.synchronize()
    return partial(_put, weights, named)


def _tensor(name: str, value: object) -> Tensor:
    if isinstance(value, tuple) and len(value) == 2:
        rebuild, args = value
        if getattr(rebuild, "__module__", "") != reductions.__name__:
            raise BadRequest(f"{name!r} is not a handle of torch.multiprocessing.reductions.reduce_tensor.")
        value = rebuild(*args)
    if not isinstance(value, Tensor) or value.is_meta or not value.is_floating_point():
        raise BadRequest(f"{name!r} is not a tensor of floating-point numbers.")
    if value.element_size() == 1:
        raise BadRequest(
            f"{name!r} has 8 bits without scales; give the dequantized values in 16 bits or more."
        )
    return value


def _check_files(weights: ModelWeights, path: Path) -> None:
    """Check files by their headers, without reading the weights."""
    files = TensorFiles(path)
    for name in files:
        weights.find_matrix(name, files.shape(name))


def _put(weights: ModelWeights, named: Iterable[tuple[str, Tensor]]) -> None:
    try:
        weights.update(named)
        if weights.embedding.is_cuda:
            # The caller may change the tensors as soon as this call ends.
            torch.cuda.synchronize()
    except Exception as error:
        raise EngineFailed("Only a part of the weights was updated; send all of them again.") from error
