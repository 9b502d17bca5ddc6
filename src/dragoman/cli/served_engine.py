"""The engine of a server: one that comes back when it has died."""

from typing import TYPE_CHECKING

from msgspec.structs import replace

from dragoman.cli import engine
from dragoman.settings import Settings

if TYPE_CHECKING:
    from dragoman.engines.protocol import Engine


def served_engine(settings: Settings) -> "Engine":
    """What the settings name, watched and opened again where that is possible."""
    if settings.engine == "remote" or not engine.is_made(settings):
        # Upstreams come back by themselves; and an object of somebody else's is there once.
        return engine.engine_of(settings)
    from dragoman.engines.supervised import Supervised

    return Supervised(Opener(settings), timeout=settings.engine_timeout)


class Opener:
    """Opens an engine, and later the same one again."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def __call__(self) -> "Engine":
        made = engine.engine_of(self._settings)
        if self._settings.engine == "local":
            # As large as the first time, however much memory is free by then: the card stays true.
            self._settings = replace(self._settings, slots=made.card.slots, context=made.card.max_model_len)
        return made
