"""The settings of several models in one server; all other settings are in `settings`."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field


class PoolSettings(Struct, frozen=True, kw_only=True):
    models: Annotated[
        dict[str, dict[str, Any]],
        Meta(
            description="further models by their names for clients, each with settings of its own: "
            '{"NAME": {"model": "FILE", "context": 8192}}'
        ),
    ] = field(default_factory=dict)
    models_dir: Annotated[
        str | None,
        Meta(description="a folder whose models are served, each loaded when it is first asked for"),
    ] = None
    models_from_cache: Annotated[
        bool,
        Meta(
            description="models of this machine's Hugging Face cache and Ollama store are served, too, "
            "each loaded when first asked for; nothing is downloaded"
        ),
    ] = False
    models_max: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="models that are loaded at the same time; default: as many as memory has room for"),
    ] = None
    models_autoload: Annotated[
        bool, Meta(description="requests load the model that they name; else only /models/load does")
    ] = True
    memory_limit: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="MiB that all models may take together, weights with keys and values; default: nine "
            "tenths of what is free"
        ),
    ] = None
    sleep_idle_seconds: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        Meta(
            description="seconds without a request after which a model gives its memory back, and is loaded "
            "again by the next one; default: never"
        ),
    ] = None
    while_loading: Annotated[
        Literal["wait", "refuse"],
        Meta(
            description="requests for a model that is being loaded wait for it, or get 503 with Retry-After"
        ),
    ] = "wait"
