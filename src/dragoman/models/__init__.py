"""Several models in one server: which there are, which of them are loaded, and what they may take."""

from dragoman.models.pool import ModelPool
from dragoman.models.pooled import PooledModel

__all__ = ["ModelPool", "PooledModel"]
