"""Arguments of an application on Ray Serve: models, their resources, and the ingress in front of them.

`serve run` passes texts (`model=a.gguf replicas=2`), a Serve YAML passes values: both are parsed here, and
errors name the argument. Settings of dragoman keep their names.
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
"""Settings that operators cannot set here: replicas choose their own address and report it."""
OWN_STORES = frozenset({"sqlite", "memory"})
"""Stores that only the process which writes them can read."""


class AutoscalingArguments(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Scaling to about `target` answers per replica, running and queued."""

    min: Annotated[int, Meta(ge=0)] = 1
    max: Annotated[int, Meta(ge=1)]
    target: Annotated[float, Meta(gt=0)] = 8.0
    up_delay_s: Amount = 5.0
    down_delay_s: Amount = 60.0

    def __post_init__(self) -> None:
        if self.max < self.min:
            raise ValueError(f"`max` is {self.max}, which is less than `min`, {self.min}")


class ModelArguments(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model: its weights, the number of its replicas, and the resources of each."""

    name: Name | None = None
    """The name for clients. A single model may keep its own name."""
    model: str | None = None
    engine: str = "local"
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of dragoman for this model only."""
    replicas: Annotated[int, Meta(ge=1)] = 1
    autoscaling: AutoscalingArguments | None = None
    cpus: Amount = 1.0
    gpus: Amount = 0.0
    memory_bytes: Amount = 0.0
    resources: dict[str, Amount] = field(default_factory=dict)
    """Further resources, by their names in the cluster."""
    placement_bundles: list[dict[str, Amount]] = field(default_factory=list)
    """For engines with several processes, such as vLLM with tensor or pipeline parallelism: the resources of
    each. The first bundle is that of the replica itself.
    """
    placement_strategy: Strategy = "PACK"
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of its processes."""

    def __post_init__(self) -> None:
        if self.placement_bundles and (self.gpus or self.memory_bytes or self.resources):
            raise ValueError(
                "with `placement_bundles`, the first bundle has the replica's resources: "
                "leave out `gpus`, `memory_bytes` and `resources`"
            )


class FleetArguments(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The arguments of `dragoman.ray:build`. Those of a single model may be given here directly."""

    models: list[ModelArguments] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of dragoman for all models."""
    door: bool = True
    """Whether an ingress deployment that knows the replicas is in front of them. Without one, Serve's proxy
    chooses by the number of connections, only one model is possible, and a stream breaks off if its replica
    dies.
    """
    doors: Annotated[int, Meta(ge=1)] = 1
    door_cpus: Amount = 1.0
    max_ongoing_requests: Annotated[int, Meta(ge=1)] = 1024
    """Maximum concurrent requests of one ingress, or of one replica without an ingress."""
    local: bool = False
    """Whether everything runs on one machine: replicas then listen on loopback only."""
    drain_s: Annotated[int, Meta(ge=0)] = 30
    """Seconds that answers get to finish when their replica is stopped."""
    beat_s: Annotated[float, Meta(gt=0)] = 1.0
    """Seconds between two reports of a replica to the ingress, about its load and the use of keys."""


def read_arguments(fields: Mapping[str, Any]) -> FleetArguments:
    """Parse the arguments; raises SettingsError. Arguments of a single model may stand beside the common
    ones.
    """
    merged = {name: _read_text(name, value) for name, value in fields.items()}
    own = {name: merged.pop(name) for name in ModelArguments.__struct_fields__ if name in merged}
    settings = own.pop("settings", None)
    if settings is not None:
        merged["settings"] = settings
    if own and merged.get("models"):
        names = ", ".join(f"`{name}`" for name in own)
        raise SettingsError(
            f"With `models`, each model has its own arguments: move {names} into one of them."
        )
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
    """Parse a JSON text from a command line: `'settings={"insecure": true}'`."""
    if not isinstance(value, str) or not value.startswith(("{", "[")):
        return value
    try:
        return msgspec.json.decode(value)
    except msgspec.DecodeError as error:
        raise SettingsError(f"An argument is wrong: `{name}` is not valid JSON.") from error


def _check(read: FleetArguments) -> None:
    names = [model.name for model in read.models]
    if len(names) > 1 and (None in names or len({*names}) < len(names)):
        raise SettingsError("With several models, each needs its own `name`.")
    if len(names) > 1 and not read.door:
        raise SettingsError("Several models need the ingress, which selects the model: leave out `door`.")
    for model in read.models:
        settings = settings_of(read, model)
        host = LOOPBACK if read.local else EVERYWHERE
        if is_open(replace(settings, host=host)) and not settings.insecure:
            raise SettingsError(
                "Serve and its replicas listen on all addresses, and there is no key: set "
                "`api_key` or `api_key_file` in `settings`, or `insecure` to serve without a "
                "key."
            )
        several = model.replicas > 1 or model.autoscaling is not None or len(names) > 1
        if several and settings.store in OWN_STORES and "store" in {**read.settings, **model.settings}:
            raise SettingsError(
                f"`store = {settings.store}` is private to one replica, and the others would "
                "not find its records: use a PostgreSQL database, or none."
            )


def settings_of(fleet: FleetArguments, model: ModelArguments) -> Settings:
    """Return the settings of a model's replicas, without the address, which each replica chooses itself."""
    fields = {**fleet.settings, **model.settings}
    if taken := sorted(TAKEN & fields.keys()):
        raise SettingsError(f"`{taken[0]}` cannot be set here: replicas choose their own.")
    own = {"engine": model.engine, "shutdown_grace": fleet.drain_s}
    if model.model is not None:
        own["model"] = model.model
    if model.name is not None:
        own["model_name"] = model.name
    # By default replicas store nothing, because other replicas could not find it.
    return change_settings(Settings(store="none"), {**fields, **own})
