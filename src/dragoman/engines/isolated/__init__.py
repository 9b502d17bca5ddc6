"""An engine in a process of its own, whose crashes do not affect the server."""

from dragoman.engines.isolated.engine import IsolatedEngine

__all__ = ["IsolatedEngine"]
