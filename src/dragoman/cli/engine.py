"""Turns settings into an engine: a built-in one, one from another package, or any importable object.

    --engine transformers      a built-in engine by its name
    --engine NAME              an entry point NAME of another package, in the group `dragoman.engines`
    --engine module:object     an engine, or a callable that returns one; it may take the settings

`make_served_engine` also restarts the engine after a failure, and runs it in a subprocess if requested.
"""

import os
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from dragoman.cli.builtin_engines import model_file, settle
from dragoman.engines.contract import as_engine, check_engine, takes_requests
from dragoman.errors import DragomanError, SettingsError
from dragoman.logs import safe_message
from dragoman.settings import Settings, options

if TYPE_CHECKING:
    from dragoman.engines.isolated import IsolatedEngine
    from dragoman.engines.protocol import Engine, Tokenizer


GROUP = "dragoman.engines"
OWN = ("local", "transformers", "vllm", "remote", "rollout")


def engine_of(settings: Settings) -> "Engine":
    """Open the engine that the settings name. Raises SettingsError, ModelFileError or BindingError."""
    settings = settle(settings)
    thing = _find(settings.engine)
    if not _is_engine(thing):
        thing = _make(thing, settings)
    if not hasattr(thing, "card"):
        return as_engine(
            thing,
            tokenizer=settings.tokenizer,
            model_name=settings.model_name,
            max_model_len=settings.context,
        )
    engine: Engine = thing
    return engine


def is_made(settings: Settings) -> bool:
    """Whether the engine is created here and so can be created again; the settings may name an existing
    object.
    """
    return not _is_engine(_find(settings.engine))


def _is_engine(thing: Any) -> bool:
    names = ("generate", "generate_candidates")
    return takes_requests(thing) or (not isinstance(thing, type) and any(hasattr(thing, n) for n in names))


def _make(maker: Any, settings: Settings) -> Any:
    if not callable(maker):
        raise SettingsError(f"`{settings.engine}` is neither an engine nor a callable that returns one.")
    try:
        return maker(settings) if _takes_one(maker) else maker()
    except DragomanError:
        raise
    except Exception as error:
        raise SettingsError(
            f"The engine `{settings.engine}` cannot be created: {safe_message(error)}."
        ) from error


def _find(name: str) -> Any:
    if ":" in name:
        return import_named(name)
    if name in OWN:
        from dragoman.cli import builtin_engines

        return getattr(builtin_engines, name)
    others = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in others:
        known = ", ".join([*OWN, *sorted(others)])
        raise SettingsError(f"There is no engine `{name}`; choose from {known}, or use MODULE:OBJECT.")
    return _load(name, others[name].load)


def import_named(name: str) -> Any:
    """Import the object named by `module:object`."""
    module, _, path = name.partition(":")
    # The current folder is importable, as with other servers that take MODULE:OBJECT.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    thing = _load(name, lambda: import_module(module))
    for part in path.split("."):
        if not hasattr(thing, part):
            raise SettingsError(f"`{name}`: {module} has no {path}.")
        thing = getattr(thing, part)
    return thing


def _load(name: str, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"The engine `{name}` needs the module {error.name}, which is not installed."
        ) from error
    except Exception as error:
        raise SettingsError(f"The engine `{name}` cannot be imported: {safe_message(error)}.") from error


def _takes_one(maker: Callable[..., Any]) -> bool:
    """Whether the callable takes the settings as its only argument."""
    try:
        signature(maker).bind(None)
    except TypeError:
        return False
    return True


# The engine of a server, restarted after failures.


_RUNNERS = {"llama.cpp": "llamacpp", "OpenVINO": "openvino", "PyTorch": "torch"}
"""Names of runners, by the first word of their descriptions."""
# `-P`: the folder that the server starts in must not shadow modules.
CHILD = (sys.executable, "-P", "-m", "dragoman.cli.isolated")


def make_served_engine(settings: Settings) -> "Engine":
    """Open the engine that the settings name, supervised and restarted where that is possible."""
    # Download the weights here, once, where the user sees the progress.
    settings = settle(settings)
    if settings.isolate_engine and settings.engine in ("remote", "vllm"):
        raise SettingsError(
            f"The engine `{settings.engine}` computes in other processes; leave out `isolate_engine`."
        )
    if not settings.isolate_engine and (settings.engine == "remote" or not is_made(settings)):
        # Upstreams recover by themselves, and an existing object cannot be created again.
        if settings.engine_timeout is not None:
            message = f"The engine `{settings.engine}` cannot be restarted; leave out `engine_timeout`."
            raise SettingsError(message)
        engine = engine_of(settings)
        check_engine(engine)
        return engine
    from dragoman.engines.supervisor import SupervisedEngine

    return SupervisedEngine(EngineOpener(settings), timeout=settings.engine_timeout)


class EngineOpener:
    """Opens an engine, and reopens it with the same size and runner."""

    def __init__(self, settings: Settings) -> None:
        if settings.isolate_engine and settings.engine == "local":
            settings = replace(settings, model=str(model_file(settings)))
        self._settings = settings

    def __call__(self) -> "Engine":
        settings = self._settings
        engine: Engine = isolate(settings) if settings.isolate_engine else engine_of(settings)
        check_engine(engine)
        if settings.engine == "local":
            # Use the first engine's sizes and runner, whatever memory is free by then: the card must stay
            # true.
            card = engine.card
            runner = _RUNNERS.get(card.details.get("runner", "").split(" ")[0], settings.runner)
            self._settings = replace(settings, slots=card.slots, context=card.max_model_len, runner=runner)
        return engine


def isolate(settings: Settings) -> "IsolatedEngine":
    from dragoman.engines.isolated import IsolatedEngine

    name = _tokenizer_name(settings)
    # The engine's process gets no API keys and no database URL.
    keyless = replace(settings, api_key=[], api_key_file=None, admin_key=[], admin_key_file=None)
    result = replace(keyless, store="none", mcp_config=None)
    secret = {option.env for option in options()}
    environ = {name: value for name, value in os.environ.items() if name not in secret}
    return IsolatedEngine.open(CHILD, result, lambda: _tokenizer(settings.engine, name), environ)


def _tokenizer_name(settings: Settings) -> str:
    name = settings.tokenizer or (settings.model if settings.engine in ("local", "transformers") else None)
    if name is None:
        raise SettingsError(
            f"To isolate the engine `{settings.engine}`, set `tokenizer` to the model's folder or GGUF file."
        )
    return name


@cache
def _tokenizer(engine: str, name: str) -> "Tokenizer":
    """Open the tokenizer in the server's process. It outlives the engine, so it must not load the weights."""
    if engine == "local" and not Path(name).expanduser().is_dir():
        from dragoman.engines.local.gguf_model import LlamaModel, LlamaTokenizer

        return LlamaTokenizer(LlamaModel(Path(name).expanduser(), vocabulary_only=True))
    if engine == "local":
        from dragoman.engines.hf_tokenizer import HfTokenizer
        from dragoman.engines.model_files import vocabulary_in

        return HfTokenizer(Path(name).expanduser(), size=vocabulary_in(Path(name).expanduser()))
    from dragoman.engines.remote.engine import tokenizer_of

    return tokenizer_of(name)
