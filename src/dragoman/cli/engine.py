"""From settings to an engine: the model file, fetched if need be, and the options of what runs it."""

from pathlib import Path
from typing import TYPE_CHECKING

from dragoman.errors import SettingsError
from dragoman.settings import Settings

if TYPE_CHECKING:
    from dragoman.engines.local import LocalEngine
    from dragoman.engines.protocol import Engine


def engine_of(settings: Settings) -> "Engine":
    """Load what the settings name. Raises ModelFileError or BindingError where that cannot be done."""
    match settings.engine:
        case "local":
            if settings.engine_args:
                raise SettingsError("The embedded engine has no `engine_args`: it is set by flags alone.")
            return local_engine(settings)
        case "vllm":
            return _vllm_engine(settings)


def _vllm_engine(settings: Settings) -> "Engine":
    from dragoman.engines.vllm import VllmOptions, open_vllm

    if settings.model is None:
        raise SettingsError("vLLM needs `model`: a folder, or a name on Hugging Face's hub.")
    if settings.threads is not None:
        raise SettingsError("vLLM has no `threads`: set OMP_NUM_THREADS or VLLM_CPU_OMP_THREADS_BIND for it.")
    options = VllmOptions(
        name=settings.model_name,
        context=settings.context,
        slots=settings.slots,
        adapters=adapters_of(settings),
        engine_args=settings.engine_args,
    )
    return open_vllm(settings.model, options)


def local_engine(settings: Settings) -> "LocalEngine":
    """The embedded engine, whatever the settings say of others."""
    from dragoman.engines.local import LocalEngine, LocalOptions

    options = LocalOptions(
        name=settings.model_name,
        context=settings.context,
        slots=settings.slots,
        threads=settings.threads,
        adapters=adapters_of(settings),
    )
    return LocalEngine.open(model_file(settings), options)


def model_file(settings: Settings) -> Path:
    """The file to load; the default weights are fetched the first time, with progress on stderr."""
    if settings.model is not None:
        return Path(settings.model).expanduser()
    from dragoman.engines.weights import default_model

    return default_model()


def template_of(settings: Settings) -> str | None:
    """The text of the chat template that replaces the model's own, if one is set."""
    if settings.chat_template is None:
        return None
    path = Path(settings.chat_template).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"The chat template {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"The chat template {path} is not UTF-8 text.") from error


def adapters_of(settings: Settings) -> dict[str, str]:
    """`["poet=poet.gguf"]` gives `{"poet": "poet.gguf"}`."""
    adapters: dict[str, str] = {}
    for entry in settings.lora:
        name, _, file = entry.partition("=")
        if not name.strip() or not file.strip():
            raise SettingsError(f"`lora` takes NAME=FILE, not {entry}.")
        if name.strip() in adapters:
            raise SettingsError(f"`lora` has two adapters named {name.strip()}.")
        adapters[name.strip()] = file.strip()
    return adapters
