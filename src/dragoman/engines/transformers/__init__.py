"""Models of the `transformers` library, run by its own continuous batching: `dragoman[transformers]`."""

from dragoman.engines.transformers.engine import TransformersEngine, TransformersOptions

__all__ = ["TransformersEngine", "TransformersOptions"]
