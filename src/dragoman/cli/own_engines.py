"""Engines that come with dragoman, each made from the settings."""

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
    from dragoman.hub.names import ModelName, Variant

Options = TypeVar("Options")


def local(settings: Settings) -> "LocalEngine":
    """A model in this process; without a model the default weights are fetched once and cached."""
    from dragoman.engines.local import LocalEngine, LocalOptions

    if settings.engine_args:
        raise SettingsError("The embedded engine has no `engine_args`: it is set by flags alone.")
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
            "`deterministic` means one `slots` with transformers: products of torch depend on others."
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
        # It is read when vLLM is imported, in whatever processes that starts.
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
    """Other servers; `model` is the name that the model has there."""
    from dragoman.engines.remote import RemoteEngine, RemoteOptions
    from dragoman.engines.remote.engine import tokenizer_of

    _leave_to_local(settings)
    if not settings.upstream:
        raise SettingsError("The engine `remote` needs `upstream`: the address of a server, or several.")
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
    """As MODULE:OBJECT: an executor, or what makes one."""
    args: dict[str, Any] = {}
    """What it is made with."""
    batch: int = 64
    """Prompts in one call."""


def rollout(settings: Settings) -> "Engine":
    """An executor that blocks, as trainers have them."""
    from dragoman.cli.engine import import_named
    from dragoman.engines.rollout import shape_of, wrap_executor

    _leave_to_local(settings)
    _leave_to_others(settings, "executor")
    options = _options(RolloutArgs, settings, {})
    thing = import_named(options.executor)
    if shape_of(thing) is None and callable(thing):
        thing = thing(**options.args)
    shape = shape_of(thing)
    if shape is None:
        message = f"`{options.executor}` has neither generate_candidates nor a generate that takes prompts."
        raise SettingsError(message)
    said = settings.tokenizer, None, settings.model_name, settings.context
    return wrap_executor(thing, shape, *said, batch=options.batch)


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
        raise SettingsError(f"{names} are for the {who} to know; leave them out.")


def model_file(settings: Settings) -> Path:
    """The file to load; the default weights are fetched the first time, with progress on stderr."""
    if settings.model is None:
        from dragoman.engines.weights import default_model

        return default_model()
    path = Path(settle(settings).model or "").expanduser()
    if not path.exists():
        raise ModelFileError(
            f"There is no file {path}. A model of a hub is named hf:ORG/REPO, one of Ollama's ollama:NAME."
        )
    return path


# A model by its name.


def settle(settings: Settings) -> Settings:
    """With the path of a model that is given by its name, fetched if it is not here, and what runs its files.

    `hf:org/repo` with safetensors alone is for transformers or vLLM, whichever is there.
    """
    if settings.draft is not None and settings.engine == "local":
        settings = msgspec.structs.replace(settings, draft=_find_draft(settings))
    if settings.model is None or settings.engine not in ("local", "transformers", "vllm"):
        return settings
    from dragoman.hub import find_name

    name = find_name(settings.model)
    if name is not None:
        settings = _fetch(settings, name)
    path = Path(settings.model or "").expanduser()
    if settings.engine != "local":
        return settings
    if settings.runner == "torch" or (settings.runner == "auto" and _suits_torch(settings, path)):
        # There it computes so fast that the event loop would steal its time, by the interpreter's lock.
        apart = _has_gpu() if settings.isolate_engine is None else settings.isolate_engine
        return msgspec.structs.replace(settings, runner="torch", isolate_engine=apart)
    if not is_safetensors(path):
        return settings
    _check_safetensors(path.name)
    return msgspec.structs.replace(settings, engine=_runs_safetensors()[0])


def _suits_torch(settings: Settings, path: Path) -> bool:
    """Whether the embedded engine can run it by PyTorch on a GPU, and by nothing that is better there.

    llama.cpp is, for a GGUF file, where its build finds the GPU: weights stay there as small as they are.
    """
    if not (is_safetensors(path) or (path.is_file() and _is_left_over(settings, path))):
        return False
    if not all(map(find_spec, ("safetensors", "gguf"))) or not _has_gpu():
        return False
    from dragoman.engines.local.pytorch.opening import is_known

    return is_known(path)


def _is_left_over(settings: Settings, path: Path) -> bool:
    """Whether a file would be left to the processor though there is a GPU, for which nothing speaks."""
    wanted = (settings.draft, settings.lora, settings.lora_dir, _find_mmproj(settings, path))
    if any(wanted) or settings.gpu_layers is not None or settings.kv_cache in ("int8", "f16"):
        return False
    from dragoman.engines.local import binding, machine

    return any(gpu.kind == "cuda" for gpu in machine.find_gpus()) and not binding.load().gpus()


def _has_gpu() -> bool:
    """Whether PyTorch is here, and finds one."""
    try:
        import torch
    except ImportError:
        return False

    found: bool = torch.cuda.is_available()
    return found


def _fetch(settings: Settings, name: "ModelName") -> Settings:
    from dragoman.engines.local import machine
    from dragoman.engines.weights import show_progress
    from dragoman.hub import ROOM, locate

    if settings.engine != "local" and name.kind == "hub" and not name.choice:
        name = msgspec.structs.replace(name, choice="safetensors")
    progress = partial(show_progress, doing=f"fetching {name.repo}", did=f"fetched {name.repo}")

    def check(variant: "Variant") -> None:
        if settings.engine == "local" and settings.runner != "torch" and variant.label == "safetensors":
            _check_safetensors(name.repo)

    room = int(ROOM * machine.free_memory())
    found = locate(name, progress, room=room, check=check, projector=settings.mmproj_auto)
    public = settings.model_name or found.name.public
    return msgspec.structs.replace(settings, model=str(found.path), model_name=public)


def _find_draft(settings: Settings) -> str | None:
    """A draft may be given by its name, too."""
    if settings.draft is None:
        return None
    return str(model_file(msgspec.structs.replace(settings, model=settings.draft, draft=None)))


def _find_mmproj(settings: Settings, path: Path) -> str | None:
    """The projector that is named, or that lies beside the model where its runner could use one."""
    if settings.mmproj is not None or not settings.mmproj_auto or settings.runner in ("openvino", "torch"):
        return settings.mmproj
    from dragoman.hub import find_projector

    found = find_projector(path) if path.is_file() else None
    return None if found is None else str(found)


def is_safetensors(path: Path) -> bool:
    """Whether it is a folder of weights that the embedded engine does not run."""
    if not path.is_dir() or (path / "openvino_model.xml").exists():
        return False
    return any(path.glob("*.safetensors"))


def _runs_safetensors() -> list[str]:
    needed = {"vllm": ("vllm",), "transformers": ("transformers", "torch")}
    return [engine for engine, packages in needed.items() if all(map(find_spec, packages))]


def _check_safetensors(model: str) -> None:
    if not _runs_safetensors():
        raise ModelFileError(
            f"{model} has safetensors alone, which the embedded engine does not run: pip install "
            "'dragoman[transformers]', or vllm, which do. GGUF files, which it does run, are mostly in a "
            "repository whose name ends with -GGUF."
        )


def _options(kind: type[Options], settings: Settings, own: dict[str, Any]) -> Options:
    """What has a flag, and beside it what is given by name."""
    try:
        return msgspec.convert({**settings.engine_args, **own}, kind)
    except msgspec.ValidationError as error:
        raise SettingsError(f"`engine_args` is wrong for {settings.engine}: {error}.") from error


def _named_model(settings: Settings) -> str:
    if settings.model is None:
        raise SettingsError(
            f"The engine `{settings.engine}` needs `model`: a folder, or a name on Hugging Face's hub."
        )
    return settle(settings).model or ""
