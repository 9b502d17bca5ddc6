"""An executor that blocks, as trainers have them, as an engine."""

from dragoman.engines.rollout.engine import RolloutEngine

__all__ = ["RolloutEngine"]
