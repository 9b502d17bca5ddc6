"""Several models in one server: the catalogue, loading and unloading, and memory."""

from dragoman.models.pool import ModelPool
from dragoman.models.pooled import PooledModel

__all__ = ["ModelPool", "PooledModel"]
