"""An engine in a process of its own: what it breaks is not the server."""

from dragoman.engines.isolated.engine import IsolatedEngine

__all__ = ["IsolatedEngine"]
