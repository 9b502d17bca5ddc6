"""Models by name: parsing names, finding files on this machine, and downloading them."""

from dragoman.hub.cache import find_projector, resolve_name
from dragoman.hub.download import ROOM, locate, pull
from dragoman.hub.names import ModelName, parse_name

__all__ = ["ROOM", "ModelName", "find_projector", "locate", "parse_name", "pull", "resolve_name"]
