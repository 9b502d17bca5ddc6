"""The catalogue of a server's models: the one in the settings, further ones there, and those of a folder or
cache.

Nothing is loaded or downloaded here: each model is described, with a function that opens it.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from msgspec.structs import fields, replace

from dragoman.engines.protocol import Engine
from dragoman.errors import ModelFileError, SettingsError
from dragoman.hub.cache import CachedModel, list_cached, list_folder
from dragoman.models.pool import ModelPool
from dragoman.models.pooled import PooledModel
from dragoman.settings import Settings, change_settings

OpenEngine: TypeAlias = Callable[[Settings], Engine]

OWN = frozenset(
    {"model", "model_name", "model_alias", "lora", "lora_dir", "chat_template", "tokenizer", "engine_args"}
    | {"dialect", "tool_call_parser", "reasoning_parser", "reasoning_open", "reasoning_close", "presets"}
    | {"upstream", "upstream_key", "draft", "mmproj"}
)
"""Settings of one model, which others never inherit."""
INHERITED = frozenset(
    {"engine", "isolate_engine", "engine_timeout", "context", "slots", "threads", "runner", "readers"}
    | {"gpu_layers", "mmproj_auto"}
    | {"kv_memory", "kv_cache", "weights", "guesses", "deterministic", "sampling", "override"}
    | {"restore_reasoning", "unconstrained", "history", "sleep_idle_seconds"}
)
"""Settings that a model inherits from the server."""
NOT_ANY_MORE: dict[str, Any] = {"models": {}, "models_dir": None, "models_from_cache": False}
"""Values of the server's list settings in the settings of one model."""
ANY_THREAD = frozenset({"local", "transformers", "remote"})
"""Engines that can be opened in any thread; others may need the main thread, where
they are opened at start.
"""


def build_pool(settings: Settings, open: OpenEngine) -> ModelPool:
    """Build the pool of models. `open` makes an engine from the settings of one model."""
    models = list(_list_models(settings, open))
    if not models:
        where = settings.models_dir or settings.model or "the cache"
        raise ModelFileError(f"{where} has no model that can be served; name another.")
    pool = ModelPool(settings, models)
    named = settings.models or (settings.model is not None and not _is_folder_of_models(settings.model))
    if named or not (settings.models_dir or settings.models_from_cache or settings.model):
        pool.startup_model = models[0]
    pool.describe = partial(describe_cached, settings, open)
    if settings.models_from_cache:
        pool.find_more = partial(_find_more, settings, open)
    if pool.startup_model is not None and pool.startup_model.settings.engine not in ANY_THREAD:
        pool.add_engine(pool.startup_model, open(pool.startup_model.settings))
        pool.startup_model = None
    return pool


def _list_models(settings: Settings, open: OpenEngine) -> Iterator[PooledModel]:
    folders = [settings.models_dir] if settings.models_dir else []
    several = bool(settings.models or folders or settings.models_from_cache)
    if settings.model is not None and settings.engine == "local" and _is_folder_of_models(settings.model):
        folders.insert(0, settings.model)
    elif settings.model is not None or not several:
        yield _describe_first(replace(settings, **NOT_ANY_MORE), open)
    for name, changes in settings.models.items():
        own = own_settings(settings, name, changes)
        yield PooledModel(name, own, partial(open, own), partial(_size_of, own))
    for folder in folders:
        for parts in _list_folder(Path(folder).expanduser()):
            yield _describe_found(settings, open, *parts)
    if settings.models_from_cache:
        for cached in list_cached():
            yield describe_cached(settings, open, cached)


def _describe_first(settings: Settings, open: OpenEngine) -> PooledModel:
    """Describe the model of the server's own settings. It has its own name unless the settings name it."""
    guess = (settings.model or "default").rstrip("/").rpartition("/")[2].removesuffix(".gguf")
    size, named = partial(_size_of, settings), settings.model_name is not None
    return PooledModel(settings.model_name or guess, settings, partial(open, settings), size, named=named)


def own_settings(settings: Settings, name: str, changes: dict[str, object]) -> Settings:
    """Return the settings of one of several models: `[models.NAME]` in a settings file."""
    for key in changes:
        if key not in OWN | INHERITED:
            known = ", ".join(sorted(OWN | INHERITED))
            raise SettingsError(f"`models.{name}` cannot have `{key}`; use one of {known}.")
    usual = {field.name: field.default_factory() if callable(field.default_factory) else field.default
             for field in fields(Settings) if field.name in OWN}  # fmt: skip
    base = replace(settings, **usual, **NOT_ANY_MORE)
    if changes.get("model") is None and changes.get("engine", settings.engine) == "local":
        raise SettingsError(
            f"`models.{name}` needs `model`: a file, a folder, or a name such as hf:ORG/REPO."
        )
    return change_settings(base, {"model_name": name, **changes})


# Folders


def _is_folder_of_models(model: str) -> bool:
    """Whether a path is a folder of models, and not a model itself."""
    folder = Path(model).expanduser()
    return folder.is_dir() and not _is_model(folder) and bool(list_folder(folder))


def _is_model(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("openvino_model.xml", "config.json"))


def _list_folder(folder: Path) -> list[tuple[str, Path, int]]:
    if not folder.is_dir():
        raise SettingsError(f"The folder {folder} does not exist.", param="models_dir")
    return list_folder(folder)


def _describe_found(settings: Settings, open: OpenEngine, name: str, path: Path, size: int) -> PooledModel:
    own = own_settings(settings, name, {"model": str(path)})
    return PooledModel(name, own, partial(open, own), lambda: size)


# The cache


def describe_cached(settings: Settings, open: OpenEngine, cached: CachedModel) -> PooledModel:
    return _describe_found(settings, open, str(cached.name), cached.path, cached.size)


def _find_more(settings: Settings, open: OpenEngine, name: str) -> PooledModel | None:
    """Return a model of the cache by one of its names; a client's text is never used as a path."""
    models = [cached for cached in list_cached() if name in names_of(cached)]
    return describe_cached(settings, open, models[-1]) if models else None


def names_of(cached: CachedModel) -> tuple[str, ...]:
    """Return the names of a cached model: `hf:org/repo:Q4_K_M` and shorter forms."""
    whole = str(cached.name)
    return whole, whole.partition(":")[2], cached.name.repo, f"hf.co/{whole.removeprefix('hf:')}"


def _size_of(settings: Settings) -> int:
    """Return the bytes of the weights, if they are known without loading or downloading anything."""
    if settings.model is None or settings.engine not in ("local", "transformers"):
        return 0
    path = Path(settings.model).expanduser()
    if path.is_dir():
        return sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    if path.is_file():
        parts = (size for _, other, size in list_folder(path.parent) if other == path)
        return next(parts, path.stat().st_size)
    return next((cached.size for cached in list_cached() if settings.model in names_of(cached)), 0)
