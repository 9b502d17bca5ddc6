"""One model of a server, whatever its state: its names, who has it, what it takes, how far it is."""

import asyncio
from collections.abc import Callable
from typing import Literal, TypeAlias

from dragoman.engines.protocol import Engine
from dragoman.errors import Loading
from dragoman.models.loaded import LoadedModel
from dragoman.settings import Settings, adapters_of

ModelState: TypeAlias = Literal["unloaded", "loading", "loaded", "sleeping", "failed"]
USUAL_KV = 2 << 30
RETRY_S = 2


class PooledModel:
    """One model of a pool, whatever its state."""

    def __init__(
        self,
        name: str,
        settings: Settings,
        open: Callable[[], Engine] | None = None,
        size: Callable[[], int] = lambda: 0,
        *,
        named: bool = True,
    ) -> None:
        """`open` makes its engine; without one it was given, and stays. `size`: bytes of its weights.

        `named`: whether it has the name; else it has its own, which is known when it was loaded.
        """
        self.name = name
        self.settings = settings
        self.named = named
        self.open = open
        self.state: ModelState = "unloaded"
        self.progress = 0.0
        self.error = ""
        """Why it could not be loaded."""
        self.loaded: LoadedModel | None = None
        self.users = 0
        self.used = 0.0
        """When it was last held."""
        self.leaving = False
        """It is to be unloaded when nobody holds it; who asks for it waits."""
        self.load_seconds: float | None = None
        """That the last load took."""
        self.keep_alive = settings.sleep_idle_seconds
        """Seconds without a request after which it sleeps; None: any time."""
        self.keep_until: float | None = None
        """When it goes to sleep, as a time of day."""
        self.size = size
        self._kv = (settings.kv_memory or 0) << 20
        self.task: asyncio.Task[None] | None = None
        """That loads it."""
        self.waiters: list[asyncio.Future[LoadedModel]] = []
        """Who are to hold it as soon as it is loaded, before anybody can have it unloaded again."""
        self.timer: asyncio.TimerHandle | None = None
        self.idle = asyncio.Event()
        self.idle.set()
        self.failed_at = 0.0
        self.opening = False
        """There is room for it, and it takes it now."""

    @property
    def names(self) -> tuple[str, ...]:
        if self.loaded is not None:
            return self.loaded.names
        return (self.name, *self.settings.model_alias, *adapters_of(self.settings))

    @property
    def ready(self) -> bool:
        return self.state == "loaded" and not self.leaving

    @property
    def can_unload(self) -> bool:
        """One that was given cannot be opened again."""
        return self.open is not None

    def take_bytes(self, most: int) -> int:
        """What it takes, or will take, about."""
        if self.loaded is not None and (held := self.loaded.held_bytes):
            return held
        weights = self.size()
        return weights + (self._kv or min(USUAL_KV, max(0, most - weights) // 4))

    def note_size(self) -> None:
        """What is known of a model that is loaded, for the next time."""
        said = self.loaded.card.details.get("kv_bytes", "") if self.loaded else ""
        self._kv = int(said) if said.isdecimal() else self._kv

    @property
    def status(self) -> dict[str, object]:
        """As llama-server tells it."""
        told: dict[str, object] = {"value": self.state}
        if self.state == "loading":
            told["progress"] = round(self.progress, 3)
        if self.state == "failed":
            told["error"] = self.error
        return told

    def loading_error(self) -> Loading:
        done = f" ({self.progress:.0%})" if self.progress else ""
        seconds = self.load_seconds and max(1, round(self.load_seconds * (1 - self.progress)))
        return Loading(
            f"The model '{self.name}' is being loaded{done}; try again soon.", retry_after=seconds or RETRY_S
        )
