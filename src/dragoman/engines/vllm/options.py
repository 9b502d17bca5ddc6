"""Options for a model that vLLM runs, and their conversion to vLLM's arguments."""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

import msgspec
from msgspec import Struct, field

from dragoman.errors import BindingError, ModelFileError, SettingsError

_INSTEAD = {
    "model": "--model",
    "served_model_name": "--model-name",
    "enable_lora": "--lora",
    "max_num_queued_reqs": "--limit-queue",
    "max_num_queued_tokens": "--limit-queue",
    "api_key": "--api-key",
}
"""Arguments of vLLM that dragoman has a setting for."""
MOST_ADAPTERS = 64
"""Adapters cached besides those in use, if adapters are loaded while serving."""


class VllmOptions(Struct, frozen=True, kw_only=True):
    name: str | None = None
    """Public name of the model; default the name of its folder."""
    context: int | None = None
    """Maximum tokens of one sequence, prompt and answer together: vLLM's `max_model_len`."""
    slots: int | None = None
    """Sequences in one step: vLLM's `max_num_seqs`."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """LoRA adapters: public name to folder."""
    loads_adapters: bool = False
    """Whether adapters may be loaded later."""
    statistics: bool = False
    """Whether the core reports statistics with each step: the use of its KV cache."""
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's `AsyncEngineArgs`, by name."""


def engine_args(model: str, options: VllmOptions) -> Any:
    """Create vLLM's AsyncEngineArgs. Raises SettingsError for unknown arguments."""
    try:
        from vllm.engine.arg_utils import AsyncEngineArgs
    except ImportError as error:
        raise BindingError(
            "vLLM is not installed: run `pip install vllm`, then install dragoman again."
        ) from error
    fields = {name.replace("-", "_"): value for name, value in options.engine_args.items()}
    _check(fields, [each.name for each in dataclasses.fields(AsyncEngineArgs)])
    ours: dict[str, Any] = {"model": model}
    if options.context is not None:
        ours["max_model_len"] = options.context
    if options.slots is not None:
        ours["max_num_seqs"] = options.slots
    if options.adapters:
        ours |= _adapter_args(options.adapters.values())
    twice = fields.keys() & ours.keys() - {"max_loras", "max_lora_rank"}
    if twice:
        raise SettingsError(f"`{min(twice)}` is set twice: in the engine's arguments and as a setting.")
    # Priorities have no effect otherwise.
    usual: dict[str, Any] = {"scheduling_policy": "priority", "disable_log_stats": not options.statistics}
    if not model.endswith(".gguf"):
        # `auto` would unpickle weights if there are no others.
        usual["load_format"] = "safetensors"
    if options.loads_adapters:
        # Adapters that are not cached are read again on use, when their folder may be gone.
        usual |= {"enable_lora": True, "max_cpu_loras": MOST_ADAPTERS}
    mapping = {"structured_outputs_config": _choose_structured(fields), **_transfer_of(fields)}
    return AsyncEngineArgs(**usual | ours | fields | mapping)


def _transfer_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the configuration of KV cache transfer from a mapping, which vLLM does not accept here."""
    value = fields.get("kv_transfer_config")
    if not isinstance(value, Mapping):
        return {}
    from vllm.config import KVTransferConfig

    try:
        return {"kv_transfer_config": KVTransferConfig(**value)}
    except (TypeError, ValueError) as error:
        raise SettingsError("The engine's argument `kv_transfer_config` is not valid for vLLM.") from error


def _check(texts: Iterable[str], known: Iterable[str]) -> None:
    known = list(known)
    for name in texts:
        if name in _INSTEAD:
            raise SettingsError(f"The engine's argument `{name}` has its own setting; use {_INSTEAD[name]}.")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean `{near[0]}`?" if near else "."
            raise SettingsError(f"vLLM has no engine argument `{name}`{hint}")


def _choose_structured(fields: Mapping[str, Any]) -> Any:
    """Select llguidance, unless another backend is set: it reads exactly the grammars that dragoman
    writes.
    """
    chosen = fields.get("structured_outputs_config", {})
    return {"backend": "guidance", **chosen} if isinstance(chosen, dict) else chosen


def _adapter_args(folders: Iterable[str]) -> dict[str, Any]:
    """Return the arguments that fit all adapters at once, with the largest of their ranks."""
    from vllm.config.lora import MaxLoRARanks

    ranks = [rank_of(Path(folder).expanduser()) for folder in folders]
    room = next((size for size in sorted(get_args(MaxLoRARanks)) if size >= max(ranks)), None)
    if room is None:
        raise ModelFileError(f"vLLM does not support adapters of rank {max(ranks)}.")
    return {"enable_lora": True, "max_loras": len(ranks), "max_lora_rank": room}


def rank_of(folder: Path) -> int:
    file = folder / "adapter_config.json"
    try:
        rank = msgspec.json.decode(file.read_bytes())["r"]
    except (OSError, msgspec.DecodeError, KeyError, TypeError) as error:
        raise ModelFileError(f"{folder} has no LoRA adapter: {file.name} is missing or damaged.") from error
    if not isinstance(rank, int):
        raise ModelFileError(f"{file} has no valid rank `r`; it must be an integer.")
    return rank
