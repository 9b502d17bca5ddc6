"""Settings for serving several models; all other settings are in `settings.py`."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field


class PoolSettings(Struct, frozen=True, kw_only=True):
    models: Annotated[
        dict[str, dict[str, Any]],
        Meta(
            description="further models by client-visible name, each with its own settings: "
            '{"NAME": {"model": "FILE", "context": 8192}}'
        ),
    ] = field(default_factory=dict)
    models_dir: Annotated[
        str | None,
        Meta(description="folder of models, each loaded on its first request"),
    ] = None
    models_from_cache: Annotated[
        bool,
        Meta(
            description="also serve models in this machine's Hugging Face cache and Ollama store, "
            "loaded on first request; nothing is downloaded"
        ),
    ] = False
    models_max: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="models loaded at the same time; default: as many as fit in memory"),
    ] = None
    models_autoload: Annotated[
        bool, Meta(description="load models when requests name them; otherwise only /models/load does")
    ] = True
    memory_limit: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="MiB for all models together, weights and KV caches; default: 90% of free memory"),
    ] = None
    sleep_idle_seconds: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        Meta(
            description="seconds without a request after which a model is unloaded, until the next "
            "request; default: never"
        ),
    ] = None
    while_loading: Annotated[
        Literal["wait", "refuse"],
        Meta(description="requests for a model being loaded wait, or get a 503 with Retry-After"),
    ] = "wait"
