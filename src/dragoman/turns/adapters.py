"""LoRA adapters of a served model: names, default scales, and which turns use them.

The engine knows an adapter by a key, and keys are never reused. Whatever the engine caches for an adapter
(prefixes, built requests) is therefore never used for a later adapter of the same name, and an unloaded
adapter stays with the engine until the last turn that uses its key has ended.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from dragoman.engines.lifecycle import call_engine
from dragoman.engines.model_files import digest_samples
from dragoman.engines.protocol import AdapterEngine, Engine, ModelCard
from dragoman.errors import (
    ADAPTER_NAME,
    ADAPTER_PATH,
    ADAPTERS,
    MODEL,
    BadRequest,
    Forbidden,
    ModelFileError,
    ModelNotFound,
)
from dragoman.limits import check_count
from dragoman.settings import Settings, adapters_of
from dragoman.turns.spec import AdapterRequest
from dragoman.types import Adapters

logger = logging.getLogger("dragoman.turns")

AGAIN = "#"
"""Separates name and number in the key of a second adapter of the same name; not allowed in names."""
ONE_AT_A_TIME = "The engine behind this model uses one adapter at a time; name one."
NO_SCALES = "The engine behind this model has no scales of adapters; leave out the scale."


class LoadedAdapter(Struct, kw_only=True):
    name: str
    id: int
    """The number for clients; numbers of unloaded adapters are not reused."""
    key: str
    """The name that the engine knows it by."""
    path: str = ""
    """Where it was loaded from, for display."""
    scale: float = 0.0
    """The scale for requests that name no adapter."""
    contents: str = ""
    """Digest of its files; empty for adapters loaded at the start, which the engine's numerics cover."""


class AdapterRegistry:
    """Registry of adapters. Turns are planned in threads, so the mapping is replaced, never changed in
    place.
    """

    def __init__(self, card: ModelCard) -> None:
        self.card = card
        self._by_name = {
            name: LoadedAdapter(name=name, id=number, key=name) for number, name in enumerate(card.adapters)
        }
        self._first = _state(self._by_name)
        self.fingerprint = ""
        """Digest of everything answers depend on that changed since the start; empty if nothing did."""
        self._count = len(self._by_name)
        self._loads = Counter(self._by_name)
        self._users: Counter[str] = Counter()
        """The number of turns per key."""
        self._leaving: dict[str, Callable[[], None]] = {}
        """Callbacks to run once the last turn with a key has ended."""

    @property
    def all(self) -> list[LoadedAdapter]:
        return list(self._by_name.values())

    @property
    def used(self) -> list[str]:
        """The names of the adapters that running turns use."""
        return [each.name for each in self.all if self._users[each.key]]

    def get(self, name: str) -> LoadedAdapter | None:
        return self._by_name.get(name)

    def new_key(self, name: str) -> str:
        """Return a new key: `poet`, and for the second adapter of that name `poet#2`."""
        self._loads[name] += 1
        return name if self._loads[name] == 1 else f"{name}{AGAIN}{self._loads[name]}"

    def register(self, name: str, key: str, path: str, contents: str) -> LoadedAdapter | None:
        """Add an adapter, or replace and return the one of the same name."""
        before = self._by_name.get(name)
        number = self._count if before is None else before.id
        self._count += before is None
        added = LoadedAdapter(name=name, id=number, key=key, path=path, contents=contents)
        self._set({**self._by_name, name: added})
        return before

    def unregister(self, name: str) -> LoadedAdapter:
        """Remove an adapter; new requests can no longer name it."""
        adapter = self._known(name)
        self._set({other: each for other, each in self._by_name.items() if other != name})
        return adapter

    def set_scales(self, scales: Mapping[int, float]) -> None:
        """Set default scales by number; adapters that are missing get 0."""
        known = {each.id for each in self.all}
        for index, number in enumerate(scales):
            if number not in known:
                message = f"There is no adapter {number}; GET /lora-adapters lists them."
                raise BadRequest(message, param=f"adapters[{index}].id", code="invalid_value")
        chosen = {number: scale for number, scale in scales.items() if scale}
        if not self.card.combines_adapters and (len(chosen) > 1 or set(chosen.values()) - {1.0}):
            raise BadRequest(
                "The engine behind this model uses one adapter at a time, at a scale of 1.",
                code="unsupported_field",
            )
        self._set({each.name: replace(each, scale=chosen.get(each.id, 0.0)) for each in self.all})

    def resolve(self, named: str | None, wishes: Sequence[AdapterRequest] | None) -> Adapters:
        """Return keys and scales for a request; `named` is the adapter that its model name stands for. Scales
        of 0 are left out.
        """
        by_name = self._by_name
        if wishes is None and named is None:
            return _keys(by_name, {each.name: each.scale for each in by_name.values()})
        if wishes is None or named is None:
            return _keys(by_name, {named: 1.0} if named else self._wished(by_name, wishes or ()))
        message = f"'{named}' is an adapter already; leave out '{ADAPTERS}', or send the model's own name."
        raise BadRequest(message, param=ADAPTERS, code="invalid_value")

    def retain(self, used: Adapters) -> Callable[[], None]:
        """Count a turn as a user of the adapters until the returned callback is called."""
        keys = [key for key, _ in used]
        there = {each.key for each in self.all} | self._leaving.keys()
        if keys and not there.issuperset(keys):
            raise ModelNotFound(
                "An adapter of this request was just unloaded; choose another one.", param=MODEL
            )
        self._users.update(keys)

        def release() -> None:
            while keys:
                key = keys.pop()
                self._users[key] -= 1
                if not self._users[key]:
                    del self._users[key]
                    self._leaving.pop(key, _nothing)()

        return release

    def when_unused(self, key: str, then: Callable[[], None]) -> None:
        """Call `then` once no turn uses the key, at once if none does."""
        if self._users[key]:
            self._leaving[key] = then
        else:
            then()

    def _set(self, by_name: dict[str, LoadedAdapter]) -> None:
        self._by_name = by_name
        self.card.adapters = tuple(by_name)
        now = _state(by_name)
        self.fingerprint = "" if now == self._first else blake2b(now.encode(), digest_size=6).hexdigest()

    def _known(self, name: str) -> LoadedAdapter:
        adapter = self._by_name.get(name)
        if adapter is None:
            raise ModelNotFound(f"There is no adapter {name!r} here.", param=ADAPTER_NAME)
        return adapter

    def _wished(
        self, by_name: Mapping[str, LoadedAdapter], wishes: Sequence[AdapterRequest]
    ) -> dict[str, float]:
        scales: dict[str, float] = {}
        for wish in wishes:
            name = _find(by_name, wish).name
            if name in scales:
                message = f"The adapter '{name}' is named twice; name it once."
                raise BadRequest(message, param=wish.param, code="invalid_value")
            scales[name] = wish.scale
        if not self.card.combines_adapters:
            _check_single(scales, wishes)
        return scales


def _nothing() -> None:
    pass


def _state(by_name: Mapping[str, LoadedAdapter]) -> str:
    return repr(sorted((each.name, each.contents, each.scale) for each in by_name.values()))


def _keys(by_name: Mapping[str, LoadedAdapter], scales: Mapping[str, float]) -> Adapters:
    return tuple(
        (by_name[name].key, scale) for name, scale in sorted(scales.items()) if scale and name in by_name
    )


def _find(by_name: Mapping[str, LoadedAdapter], wish: AdapterRequest) -> LoadedAdapter:
    for each in by_name.values():
        if wish.adapter in (each.name, each.id):
            return each
    known = ", ".join(f"{each.name} ({each.id})" for each in by_name.values()) or "none"
    message = f"There is no adapter {wish.adapter!r}; there are: {known}."
    raise BadRequest(message, param=wish.param, code="invalid_value")


def _check_single(scales: Mapping[str, float], wishes: Sequence[AdapterRequest]) -> None:
    if sum(map(bool, scales.values())) > 1:
        raise BadRequest(ONE_AT_A_TIME, param=ADAPTERS, code="unsupported_field")
    for wish in wishes:
        if wish.scale not in (0.0, 1.0):
            raise BadRequest(NO_SCALES, param=f"{wish.param}.scale", code="unsupported_field")


# Loading and unloading while the model is served, if the operator allows it.


_OFF = (
    "Adapters cannot be changed while this server runs: start it with --lora-dir FOLDER (`lora_dir`), the "
    "folder of adapters that may be loaded."
)


class AdapterManager:
    """Loads and unloads adapters, one change at a time."""

    def __init__(
        self, engine: Engine, shelf: AdapterRegistry, settings: Settings, taken: Sequence[str] = ()
    ) -> None:
        """`taken` are names that stand for the model itself."""
        for name, file in adapters_of(settings).items():
            if (known := shelf.get(name)) is not None:
                known.path = Path(file).name
        self._engine = engine
        self._shelf = shelf
        self._folder = settings.lora_dir
        self._most = settings.limits.adapters
        self._taken = taken
        self._lock = asyncio.Lock()
        self._freeing: set[asyncio.Task[None]] = set()

    async def load(self, name: str, path: str, *, in_place: bool = False) -> None:
        """Load an adapter. With `in_place` it replaces one of that name; running turns keep the old one."""
        file, text = self._allowed(path)
        engine = self._adaptable()
        async with self._lock:
            self._check_name(name, in_place)
            key = self._shelf.new_key(name)
            try:
                contents = await asyncio.to_thread(digest_samples, file)
                await call_engine(engine, "load_adapter", key, str(file))
            except ModelFileError as error:
                # Clients must not learn where the operator's folder is.
                message = error.message.replace(str(file), text)
                raise BadRequest(message, param=ADAPTER_PATH, code="invalid_value") from error
            except OSError as error:
                message = f"{text} cannot be read ({error.strerror})."
                raise BadRequest(message, param=ADAPTER_PATH, code="invalid_value") from None
            before = self._shelf.register(name, key, text, contents.hex())
            logger.info("Adapter %s loaded from %s", name, text)
            if before is not None:
                self._let_go(engine, before)

    async def unload(self, name: str) -> None:
        """Remove an adapter; the engine frees it once no turn uses it."""
        self._check_allowed()
        engine = self._adaptable()
        async with self._lock:
            self._let_go(engine, self._shelf.unregister(name))
            logger.info("Adapter %s unloaded", name)

    def set_scales(self, scales: Mapping[int, float]) -> None:
        """Set the scale of each adapter by number, for requests that name none."""
        self._check_allowed()
        self._shelf.set_scales(scales)

    def _let_go(self, engine: AdapterEngine, gone: LoadedAdapter) -> None:
        def free() -> None:
            task = asyncio.get_running_loop().create_task(_free(engine, gone))
            self._freeing.add(task)
            task.add_done_callback(self._freeing.discard)

        self._shelf.when_unused(gone.key, free)

    def _adaptable(self) -> AdapterEngine:
        if isinstance(self._engine, AdapterEngine):
            return self._engine
        message = "This engine loads adapters only at its start: name them with --lora NAME=FILE."
        raise BadRequest(message, code="unsupported_model")

    def _check_name(self, name: str, in_place: bool) -> None:
        if not name.isprintable() or not name.strip() or AGAIN in name:
            message = f"The name of an adapter must have printable characters and no {AGAIN}."
            raise BadRequest(message, param=ADAPTER_NAME, code="invalid_value")
        known = self._shelf.get(name) is not None
        if name in self._taken or (known and not in_place):
            message = f"The name '{name}' is taken: choose another one"
            message += ", unload that adapter, or send 'load_inplace'." if known else "."
            raise BadRequest(message, param=ADAPTER_NAME, code="invalid_value")
        if not known:
            check_count(len(self._shelf.all) + 1, self._most, ADAPTER_NAME, "adapters")

    def _check_allowed(self) -> None:
        if self._folder is None:
            raise Forbidden(_OFF, code="lora_dir_not_set")

    def _allowed(self, path: str) -> tuple[Path, str]:
        """Resolve a path inside the operator's folder; return it with the path that errors may show."""
        self._check_allowed()
        assert self._folder is not None
        folder = Path(self._folder).expanduser().resolve()
        try:
            target = (folder / path).resolve()
            inside = target.is_relative_to(folder) and target != folder and target.exists()
        except (OSError, ValueError, RuntimeError):
            inside = False
        if not inside:
            message = "There is no such adapter in the adapter folder; 'lora_path' is a path within it."
            raise BadRequest(message, param=ADAPTER_PATH, code="invalid_value")
        return target, str(target.relative_to(folder))


async def _free(engine: AdapterEngine, gone: LoadedAdapter) -> None:
    try:
        await call_engine(engine, "unload_adapter", gone.key)
    except Exception:
        # The adapter is already unregistered, so only its memory leaks.
        logger.warning("Adapter %s is unloaded, but the engine did not free it", gone.name, exc_info=True)
