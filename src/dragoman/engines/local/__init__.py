"""The embedded engine: our scheduler over a runner, by default llama.cpp."""

from dragoman.engines.local.engine import LocalEngine, LocalHandle, TrainableEngine
from dragoman.engines.local.options import LocalOptions

__all__ = ["LocalEngine", "LocalHandle", "LocalOptions", "TrainableEngine"]
