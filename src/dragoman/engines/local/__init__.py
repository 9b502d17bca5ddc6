"""The embedded engine: a scheduler of our own over a runner, llama.cpp's by default."""

from dragoman.engines.local.engine import LocalEngine, LocalHandle, TrainableEngine
from dragoman.engines.local.options import LocalOptions

__all__ = ["LocalEngine", "LocalHandle", "LocalOptions", "TrainableEngine"]
