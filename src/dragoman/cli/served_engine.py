"""The engine of a server: one that comes back when it has died, in a process of its own if that is wanted."""

import os
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from dragoman.cli import engine
from dragoman.engines.sound import check_engine
from dragoman.errors import SettingsError
from dragoman.settings import Settings, options

if TYPE_CHECKING:
    from dragoman.engines.isolated import IsolatedEngine
    from dragoman.engines.protocol import Engine, Tokenizer

_RUNNERS = {"llama.cpp": "llamacpp", "OpenVINO": "openvino"}
"""By the first word of what is said of them."""
# Not from the folder it is started in: what lies there is not what is to be run.
CHILD = (sys.executable, "-P", "-m", "dragoman.cli.isolated")


def served_engine(settings: Settings) -> "Engine":
    """What the settings name, watched and opened again where that is possible."""
    if settings.isolate_engine and settings.engine in ("remote", "vllm"):
        raise SettingsError(f"The engine `{settings.engine}` computes in other processes; do not isolate it.")
    if not settings.isolate_engine and (settings.engine == "remote" or not engine.is_made(settings)):
        # Upstreams come back by themselves; and an object of somebody else's is there once.
        if settings.engine_timeout is not None:
            message = f"The engine `{settings.engine}` cannot be opened again; leave out `engine_timeout`."
            raise SettingsError(message)
        made = engine.engine_of(settings)
        check_engine(made)
        return made
    from dragoman.engines.supervised import Supervised

    return Supervised(Opener(settings), timeout=settings.engine_timeout)


class Opener:
    """Opens an engine, and later the same one again."""

    def __init__(self, settings: Settings) -> None:
        if settings.isolate_engine and settings.engine == "local":
            from dragoman.cli.own_engines import model_file

            # Weights are fetched where a person sees it, and once.
            settings = replace(settings, model=str(model_file(settings)))
        self._settings = settings

    def __call__(self) -> "Engine":
        settings = self._settings
        made: Engine = isolated(settings) if settings.isolate_engine else engine.engine_of(settings)
        check_engine(made)
        if settings.engine == "local":
            # As large as the first time, however much memory is free by then, and by the same runner: the
            # card stays true.
            card = made.card
            runner = _RUNNERS.get(card.details.get("runner", "").split(" ")[0], settings.runner)
            self._settings = replace(settings, slots=card.slots, context=card.max_model_len, runner=runner)
        return made


def isolated(settings: Settings) -> "IsolatedEngine":
    from dragoman.engines.isolated import IsolatedEngine

    name = _tokenizer_name(settings)
    # Keys and the address of a database are not for the engine to know.
    told = replace(settings, api_key=[], api_key_file=None, store="none", mcp_config=None)
    secret = {option.env for option in options()}
    environ = {name: value for name, value in os.environ.items() if name not in secret}
    return IsolatedEngine.open(CHILD, told, lambda: _tokenizer(settings.engine, name), environ)


def _tokenizer_name(settings: Settings) -> str:
    name = settings.tokenizer or (settings.model if settings.engine in ("local", "transformers") else None)
    if name is None:
        raise SettingsError(
            f"To isolate the engine `{settings.engine}`, set `tokenizer` to the model's folder or GGUF file."
        )
    return name


@cache
def _tokenizer(engine: str, name: str) -> "Tokenizer":
    """It stays with the server, whatever becomes of the engine; so it must not need the weights."""
    if engine == "local":
        from dragoman.engines.local.model import Model
        from dragoman.engines.local.tokenizer import LlamaTokenizer

        return LlamaTokenizer(Model(Path(name).expanduser(), vocabulary_only=True))
    from dragoman.engines.remote.vocabulary import tokenizer_of

    return tokenizer_of(name)
