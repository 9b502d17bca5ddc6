"""How families of models write reasoning and tool calls: declarations, and what is made of them.

`dragoman.dialects()` lists them all.
"""

import sys
from types import ModuleType

from dragoman.dialects.declare import Dialect
from dragoman.dialects.registry import dialects


class _Room(ModuleType):
    """The room has the name that people look for a list under, so the room itself answers."""

    def __call__(self) -> dict[str, Dialect]:
        """Every dialect under its name."""
        return dict(dialects())


sys.modules[__name__].__class__ = _Room
