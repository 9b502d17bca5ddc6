"""Models by name: parsing names, finding files on this machine, and downloading them."""

from dragoman.hub.cache import find_name, find_projector
from dragoman.hub.names import ModelName, read_name
from dragoman.hub.obtain import ROOM, locate, pull

__all__ = ["ROOM", "ModelName", "find_name", "find_projector", "locate", "pull", "read_name"]
