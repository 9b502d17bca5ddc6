"""Other servers as an engine: any that speak OpenAI's completions, best those that return token ids."""

from dragoman.engines.remote.engine import RemoteEngine
from dragoman.engines.remote.pool import RemoteOptions

__all__ = ["RemoteEngine", "RemoteOptions"]
