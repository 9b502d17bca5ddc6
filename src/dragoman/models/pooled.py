"""One model of a pool in any state: names, holders, memory, progress."""

import asyncio
from collections.abc import Callable
from typing import Literal, TypeAlias

from dragoman.engines.protocol import Engine
from dragoman.errors import ModelLoading
from dragoman.models.loaded import LoadedModel
from dragoman.settings import Settings, adapters_of

ModelState: TypeAlias = Literal["unloaded", "loading", "loaded", "sleeping", "failed"]
USUAL_KV = 2 << 30
RETRY_S = 2


class PooledModel:
    """One model of a pool, loaded or not."""

    def __init__(
        self,
        name: str,
        settings: Settings,
        open: Callable[[], Engine] | None = None,
        size: Callable[[], int] = lambda: 0,
        *,
        named: bool = True,
    ) -> None:
        """`open` makes its engine; without it the engine was passed in and stays. `size` returns the bytes of
        its weights.

        `named` tells whether `name` is final; otherwise the model's own name is known after loading.
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
        self.holders = 0
        self.last_used_at = 0.0
        """Time when it was last held."""
        self.is_unloading = False
        """Whether it is to be unloaded when it has no holders; new requests wait."""
        self.load_seconds: float | None = None
        """Seconds that the last load took."""
        self.keep_alive = settings.sleep_idle_seconds
        """Seconds without a request after which it is unloaded; None for never."""
        self.keep_until: float | None = None
        """Wall-clock time at which it will be unloaded."""
        self.size = size
        self._kv = (settings.kv_memory or 0) << 20
        self.task: asyncio.Task[None] | None = None
        """Task that loads it."""
        self.waiters: list[asyncio.Future[LoadedModel]] = []
        """Requests that get it as soon as it is loaded, before it can be unloaded again."""
        self.timer: asyncio.TimerHandle | None = None
        self.idle = asyncio.Event()
        self.idle.set()
        self.failed_at = 0.0
        self.opening = False
        """Whether memory is reserved for it and it is being opened."""

    @property
    def names(self) -> tuple[str, ...]:
        if self.loaded is not None:
            return self.loaded.names
        return (self.name, *self.settings.model_alias, *adapters_of(self.settings))

    @property
    def ready(self) -> bool:
        return self.state == "loaded" and not self.is_unloading

    @property
    def can_unload(self) -> bool:
        """Whether it can be unloaded; an engine that was passed in cannot be opened again."""
        return self.open is not None

    def take_bytes(self, most: int) -> int:
        """Return the bytes that it occupies, or an estimate of what it will."""
        if self.loaded is not None and (held := self.loaded.held_bytes):
            return held
        weights = self.size()
        return weights + (self._kv or min(USUAL_KV, max(0, most - weights) // 4))

    def note_size(self) -> None:
        """Record the KV cache size of the loaded model, for the next load."""
        kv_bytes = self.loaded.card.details.get("kv_bytes", "") if self.loaded else ""
        self._kv = int(kv_bytes) if kv_bytes.isdecimal() else self._kv

    @property
    def status(self) -> dict[str, object]:
        """Status in llama-server's format."""
        status: dict[str, object] = {"value": self.state}
        if self.state == "loading":
            status["progress"] = round(self.progress, 3)
        if self.state == "failed":
            status["error"] = self.error
        return status

    def loading_error(self) -> ModelLoading:
        done = f" ({self.progress:.0%})" if self.progress else ""
        seconds = self.load_seconds and max(1, round(self.load_seconds * (1 - self.progress)))
        return ModelLoading(
            f"The model '{self.name}' is being loaded{done}; retry later.", retry_after=seconds or RETRY_S
        )
