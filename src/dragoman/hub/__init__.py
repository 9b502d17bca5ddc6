"""Models by their names: what a person calls one, where its files are, and how they come here."""

from dragoman.hub.names import ModelName, read_name
from dragoman.hub.obtain import locate, pull

__all__ = ["ModelName", "locate", "pull", "read_name"]
