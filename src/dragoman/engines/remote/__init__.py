"""Other servers as an engine: any with OpenAI's completions API, preferably those that return token ids."""

from dragoman.engines.remote.engine import RemoteEngine
from dragoman.engines.remote.upstreams import RemoteOptions

__all__ = ["RemoteEngine", "RemoteOptions"]
