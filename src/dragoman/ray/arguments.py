"""What an application on Ray Serve is told: the models, what each of them takes, and what is before them.

`serve run` gives texts (`model=a.gguf replicas=2`), a Serve YAML gives values: both are read here, and what
is wrong is said by the name of the argument. What dragoman itself is told are its settings, by their names.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct, field
from msgspec.structs import replace

from dragoman.errors import SettingsError
from dragoman.http.keys import is_open
from dragoman.settings import Settings, change_settings

Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=200)]
Amount: TypeAlias = Annotated[float, Meta(ge=0)]
Strategy: TypeAlias = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]

LOOPBACK, EVERYWHERE = "127.0.0.1", "0.0.0.0"
TAKEN = frozenset({"host", "port", "uds", "tls_cert", "tls_key", "ollama_port", "reuse_port", "model_name"})
"""Settings that are not for the operator to choose: replicas listen where the others find them."""
OWN_STORES = frozenset({"sqlite", "memory"})
"""What one process keeps, and another does not see."""


class AutoscalingArguments(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """As many replicas as it takes for `target` answers at each, those that wait for their turn included."""

    min: Annotated[int, Meta(ge=0)] = 1
    max: Annotated[int, Meta(ge=1)]
    target: Annotated[float, Meta(gt=0)] = 8.0
    up_delay_s: Amount = 5.0
    down_delay_s: Amount = 60.0

    def __post_init__(self) -> None:
        if self.max < self.min:
            raise ValueError(f"`max` is {self.max}, and `min` is {self.min}")


class ModelArguments(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model: what it is, how many replicas it has, and what each of them takes of the cluster."""

    name: Name | None = None
    """What clients call it. One model alone may have its own name."""
    model: str | None = None
    engine: str = "local"
    settings: dict[str, Any] = field(default_factory=dict)
    """Of dragoman, for this model alone."""
    replicas: Annotated[int, Meta(ge=1)] = 1
    autoscaling: AutoscalingArguments | None = None
    cpus: Amount = 1.0
    gpus: Amount = 0.0
    memory_bytes: Amount = 0.0
    resources: dict[str, Amount] = field(default_factory=dict)
    """Further ones, by the names that the cluster has for them."""
    placement_bundles: list[dict[str, Amount]] = field(default_factory=list)
    """For an engine of several processes, such as vLLM with tensor or pipeline parallel: what each takes. The
    first is that of the replica itself."""
    placement_strategy: Strategy = "PACK"
    env: dict[str, str] = field(default_factory=dict)
    """Variables of its processes."""

    def __post_init__(self) -> None:
        if self.placement_bundles and (self.gpus or self.memory_bytes or self.resources):
            raise ValueError(
                "with `placement_bundles`, the first bundle says what the replica takes: leave out `gpus`, "
                "`memory_bytes` and `resources`"
            )


class FleetArguments(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that `dragoman.ray:build` takes. Of one model the arguments may stand here directly."""

    models: list[ModelArguments] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    """Of dragoman, for all models."""
    door: bool = True
    """Whether there is a deployment in front that knows the replicas. Without one Serve's proxy chooses by
    the number of connections, of one model, and a stream whose replica dies just breaks off."""
    doors: Annotated[int, Meta(ge=1)] = 1
    door_cpus: Amount = 1.0
    max_ongoing_requests: Annotated[int, Meta(ge=1)] = 1024
    """That one door has inside, or one replica where there is no door."""
    local: bool = False
    """All of it is on one machine: replicas listen on the loopback, where nobody else comes."""
    drain_s: Annotated[int, Meta(ge=0)] = 30
    """Seconds that answers get to finish when their replica is stopped."""
    beat_s: Annotated[float, Meta(gt=0)] = 1.0
    """How often replicas tell the doors how much they have to do, and what keys have taken."""


def read_arguments(given: Mapping[str, Any]) -> FleetArguments:
    """Raises SettingsError. What belongs to one model may stand beside what belongs to all."""
    merged = {name: _read_text(name, value) for name, value in given.items()}
    own = {name: merged.pop(name) for name in ModelArguments.__struct_fields__ if name in merged}
    settings = own.pop("settings", None)
    if settings is not None:
        merged["settings"] = settings
    if own and merged.get("models"):
        names = ", ".join(f"`{name}`" for name in own)
        raise SettingsError(f"With `models` each model says its own: move {names} into one of them.")
    try:
        read = msgspec.convert(merged, FleetArguments, strict=False)
        if not read.models:
            read = replace(read, models=[msgspec.convert(own, ModelArguments, strict=False)])
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$")
        name = f"`{path.strip('.`')}`: " if path else ""
        raise SettingsError(f"An argument is wrong: {name}{what}.") from error
    _check(read)
    return read


def _read_text(name: str, value: Any) -> Any:
    """A command line has texts alone: `'settings={"insecure": true}'`."""
    if not isinstance(value, str) or not value.startswith(("{", "[")):
        return value
    try:
        return msgspec.json.decode(value)
    except msgspec.DecodeError as error:
        raise SettingsError(f"An argument is wrong: `{name}` is no JSON.") from error


def _check(read: FleetArguments) -> None:
    names = [model.name for model in read.models]
    if len(names) > 1 and (None in names or len({*names}) < len(names)):
        raise SettingsError("Of several models each needs a `name` of its own.")
    if len(names) > 1 and not read.door:
        raise SettingsError("Several models need the door, which knows them apart: leave out `door`.")
    for model in read.models:
        settings = settings_of(read, model)
        host = LOOPBACK if read.local else EVERYWHERE
        if is_open(replace(settings, host=host)) and not settings.insecure:
            raise SettingsError(
                "Serve listens on all addresses, and so do replicas, and there is no key: set `api_key` or "
                "`api_key_file` in `settings`, or `insecure` to serve everybody."
            )
        several = model.replicas > 1 or model.autoscaling is not None or len(names) > 1
        if several and settings.store in OWN_STORES and "store" in {**read.settings, **model.settings}:
            raise SettingsError(
                f"`store = {settings.store}` is one replica's own, and the others would not find what it "
                "keeps: name a PostgreSQL database, or none."
            )


def settings_of(fleet: FleetArguments, model: ModelArguments) -> Settings:
    """The settings of the replicas of one model, but for the address, which each finds for itself."""
    said = {**fleet.settings, **model.settings}
    if taken := sorted(TAKEN & said.keys()):
        raise SettingsError(f"`{taken[0]}` is not for settings to say here: replicas find their own.")
    own = {"engine": model.engine, "shutdown_grace": fleet.drain_s}
    if model.model is not None:
        own["model"] = model.model
    if model.name is not None:
        own["model_name"] = model.name
    # Where nobody says where to keep things, replicas keep nothing that the others could not find.
    return change_settings(Settings(store="none"), {**said, **own})
