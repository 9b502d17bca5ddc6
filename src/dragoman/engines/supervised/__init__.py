"""An engine that is opened again when it has died or is stuck."""

from dragoman.engines.supervised.engine import Supervised

__all__ = ["Supervised"]
