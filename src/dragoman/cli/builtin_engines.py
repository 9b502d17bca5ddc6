"""Built-in engines, created from the settings."""

import os
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from dragoman.errors import ModelFileError, SettingsError
from dragoman.settings import Settings, adapters_of

if TYPE_CHECKING:
    from dragoman.engines.local import LocalEngine
    from dragoman.engines.protocol import Engine
    from dragoman.hub.names import ModelName, ModelVariant

Options = TypeVar("Options")


def local(settings: Settings) -> "LocalEngine":
    """Open a model in this process; without one the default weights are downloaded once and cached."""
    from dragoman.engines.local import LocalEngine, LocalOptions

    if settings.engine_args:
        raise SettingsError("The engine `local` has no `engine_args`; use its flags.")
    path = model_file(settings)
    options = LocalOptions(
        name=settings.model_name,
        context=settings.context,
        slots=settings.slots,
        threads=settings.threads,
        adapters=adapters_of(settings),
        mmproj=_find_mmproj(settings, path),
        limits=settings.limits,
        runner=settings.runner,
        readers=settings.readers,
        kv_memory=settings.kv_memory and settings.kv_memory << 20,
        kv_cache=settings.kv_cache,
        weights=settings.weights,
        deterministic=settings.deterministic,
        gpu_layers=settings.gpu_layers,
        draft=_find_draft(settings),
        guesses=LocalOptions().guesses if settings.guesses is None else settings.guesses,
    )
    return LocalEngine.open(path, options)


def transformers(settings: Settings) -> "Engine":
    from dragoman.engines.transformers import TransformersEngine, TransformersOptions

    _leave_to_local(settings)
    if settings.lora:
        raise SettingsError("The engine `transformers` has no adapters; leave out `lora`.")
    if settings.deterministic and settings.slots not in (None, 1):
        raise SettingsError(
            "`deterministic` needs `slots` to be 1 with transformers: batched matrix "
            "products depend on the batch."
        )
    own = {
        "name": settings.model_name,
        "context": settings.context,
        "slots": 1 if settings.deterministic else settings.slots,
        "threads": settings.threads,
    }
    options = _options(TransformersOptions, settings, own)
    return TransformersEngine.open(_named_model(settings), options)


def vllm(settings: Settings) -> "Engine":
    from dragoman.engines.vllm import VllmOptions, open_vllm

    _leave_to_local(settings)
    if settings.threads is not None:
        raise SettingsError("vLLM has no `threads`: set OMP_NUM_THREADS or VLLM_CPU_OMP_THREADS_BIND for it.")
    if settings.deterministic:
        # vLLM reads it on import, in each process that it starts.
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    options = VllmOptions(
        name=settings.model_name,
        context=settings.context,
        slots=settings.slots,
        adapters=adapters_of(settings),
        loads_adapters=settings.lora_dir is not None,
        statistics=settings.metrics_names == "vllm",
        engine_args=settings.engine_args,
    )
    return open_vllm(_named_model(settings), options)


def remote(settings: Settings) -> "Engine":
    """Open an engine over other servers; `model` is the name that the model has there."""
    from dragoman.engines.remote import RemoteEngine, RemoteOptions
    from dragoman.engines.remote.engine import tokenizer_of

    _leave_to_local(settings)
    if not settings.upstream:
        raise SettingsError("The engine `remote` needs `upstream`: the URL of a server, or several.")
    _leave_to_others(settings, "upstreams")
    own = {
        "name": settings.model_name,
        "model": settings.model,
        "key": settings.upstream_key,
        "context": settings.context,
    }
    options = _options(RemoteOptions, settings, own)
    tokenizer = tokenizer_of(settings.tokenizer) if settings.tokenizer else None
    return RemoteEngine.open(settings.upstream, tokenizer, options)


class RolloutArgs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    executor: str
    """MODULE:OBJECT of an executor, or of a callable that returns one."""
    args: dict[str, Any] = {}
    """Arguments for the callable."""
    batch: int = 64
    """Prompts per call."""


def rollout(settings: Settings) -> "Engine":
    """Open a blocking executor, as trainers have them, as an engine."""
    from dragoman.cli.engine import import_named
    from dragoman.engines.rollout import executor_interface, wrap_executor

    _leave_to_local(settings)
    _leave_to_others(settings, "executor")
    options = _options(RolloutArgs, settings, {})
    thing = import_named(options.executor)
    if executor_interface(thing) is None and callable(thing):
        thing = thing(**options.args)
    shape = executor_interface(thing)
    if shape is None:
        message = f"`{options.executor}` has neither generate_candidates nor a generate that takes prompts."
        raise SettingsError(message)
    parts = settings.tokenizer, None, settings.model_name, settings.context
    return wrap_executor(thing, shape, *parts, batch=options.batch)


def _leave_to_local(settings: Settings) -> None:
    names = (
        "runner",
        "readers",
        "kv_memory",
        "kv_cache",
        "weights",
        "gpu_layers",
        "draft",
        "guesses",
        "mmproj",
    )
    for name in names:
        if getattr(settings, name) not in ("auto", None):
            raise SettingsError(f"`{name}` is for the engine `local`; leave it out.")


def _leave_to_others(settings: Settings, who: str) -> None:
    if settings.lora or settings.slots or settings.threads or settings.deterministic:
        names = "`lora`, `slots`, `threads` and `deterministic`"
        raise SettingsError(f"{names} are settings of the {who}; leave them out here.")


def model_file(settings: Settings) -> Path:
    """Return the file to load; the default weights are downloaded on first use, with progress on stderr."""
    if settings.model is None:
        from dragoman.engines.default_weights import default_model

        return default_model()
    path = Path(settle(settings).model or "").expanduser()
    if not path.exists():
        raise ModelFileError(
            f"There is no file {path}. Names of models are hf:ORG/REPO for a hub, ollama:NAME for Ollama."
        )
    return path


# Models by name.


def settle(settings: Settings) -> Settings:
    """Resolve the model's name to a path, download it if it is missing, and choose the engine for its files.

    `hf:org/repo` with only safetensors runs on vLLM if it is installed, else on transformers.
    """
    if settings.draft is not None and settings.engine == "local":
        settings = msgspec.structs.replace(settings, draft=_find_draft(settings))
    if settings.model is None or settings.engine not in ("local", "transformers", "vllm"):
        return settings
    from dragoman.hub import resolve_name

    name = resolve_name(settings.model)
    if name is not None:
        settings = _fetch(settings, name)
    path = Path(settings.model or "").expanduser()
    if settings.engine != "local":
        return settings
    if settings.runner == "torch" or (settings.runner == "auto" and _suits_torch(settings, path)):
        # PyTorch on a GPU steps so fast that the event loop would delay it by the interpreter's lock.
        apart = _has_gpu() if settings.isolate_engine is None else settings.isolate_engine
        return msgspec.structs.replace(settings, runner="torch", isolate_engine=apart)
    if not is_safetensors(path):
        return settings
    _check_safetensors(path.name)
    return msgspec.structs.replace(settings, engine=_runs_safetensors()[0])


def _suits_torch(settings: Settings, path: Path) -> bool:
    """Whether the local engine can run the model by PyTorch on a GPU, and has no better runner for it.

    For a GGUF file llama.cpp is better if its build finds the GPU: the weights stay quantized there.
    """
    if not (is_safetensors(path) or (path.is_file() and _is_left_over(settings, path))):
        return False
    if not all(map(find_spec, ("safetensors", "gguf"))) or not _has_gpu():
        return False
    from dragoman.engines.local.pytorch.opening import is_known

    return is_known(path)


def _is_left_over(settings: Settings, path: Path) -> bool:
    """Whether the CPU would run the file although there is a GPU, and no setting asks for that."""
    wanted = (settings.draft, settings.lora, settings.lora_dir, _find_mmproj(settings, path))
    if any(wanted) or settings.gpu_layers is not None or settings.kv_cache in ("int8", "f16"):
        return False
    from dragoman.engines.local import binding, hardware

    return any(gpu.kind == "cuda" for gpu in hardware.find_gpus()) and not binding.load().gpus()


def _has_gpu() -> bool:
    """Whether PyTorch is installed and finds a GPU."""
    try:
        import torch
    except ImportError:
        return False

    outcome: bool = torch.cuda.is_available()
    return outcome


def _fetch(settings: Settings, name: "ModelName") -> Settings:
    from dragoman.engines.default_weights import show_progress
    from dragoman.engines.local import hardware
    from dragoman.hub import ROOM, locate

    if settings.engine != "local" and name.kind == "hub" and not name.selector:
        name = msgspec.structs.replace(name, selector="safetensors")
    progress = partial(show_progress, doing=f"downloading {name.repo}", did=f"downloaded {name.repo}")

    def check(variant: "ModelVariant") -> None:
        if settings.engine == "local" and settings.runner != "torch" and variant.label == "safetensors":
            _check_safetensors(name.repo)

    room = int(ROOM * hardware.free_memory())
    model = locate(name, progress, room=room, check=check, projector=settings.mmproj_auto)
    public = settings.model_name or model.name.public
    return msgspec.structs.replace(settings, model=str(model.path), model_name=public)


def _find_draft(settings: Settings) -> str | None:
    """Resolve the draft model, which may be a name, too."""
    if settings.draft is None:
        return None
    return str(model_file(msgspec.structs.replace(settings, model=settings.draft, draft=None)))


def _find_mmproj(settings: Settings, path: Path) -> str | None:
    """Return the projector from the settings, or the one beside the model if its runner could use one."""
    if settings.mmproj is not None or not settings.mmproj_auto or settings.runner in ("openvino", "torch"):
        return settings.mmproj
    from dragoman.hub import find_projector

    projector = find_projector(path) if path.is_file() else None
    return None if projector is None else str(projector)


def is_safetensors(path: Path) -> bool:
    """Whether the path is a folder of weights that the local engine runs only by PyTorch."""
    if not path.is_dir() or (path / "openvino_model.xml").exists():
        return False
    return any(path.glob("*.safetensors"))


def _runs_safetensors() -> list[str]:
    needed = {"vllm": ("vllm",), "transformers": ("transformers", "torch")}
    return [engine for engine, packages in needed.items() if all(map(find_spec, packages))]


def _check_safetensors(model: str) -> None:
    if not _runs_safetensors():
        raise ModelFileError(
            f"{model} has only safetensors, which need another engine: pip install "
            "'dragoman[transformers]', or vllm. GGUF files, which the local engine runs, "
            "are usually in a repository whose name ends with -GGUF."
        )


def _options(kind: type[Options], settings: Settings, own: dict[str, Any]) -> Options:
    """Build an engine's options from `engine_args` and the settings."""
    try:
        return msgspec.convert({**settings.engine_args, **own}, kind)
    except msgspec.ValidationError as error:
        raise SettingsError(f"`engine_args` is wrong for {settings.engine}: {error}.") from error


def _named_model(settings: Settings) -> str:
    if settings.model is None:
        raise SettingsError(
            f"The engine `{settings.engine}` needs `model`: a folder, or a name on Hugging Face."
        )
    return settle(settings).model or ""
