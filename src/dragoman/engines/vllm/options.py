"""What can be set about a model that vLLM runs, and what becomes of it there."""

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
"""Arguments of vLLM that are settings of ours."""
MOST_ADAPTERS = 64
"""That are kept beside those in use, where they come and go."""


class VllmOptions(Struct, frozen=True, kw_only=True):
    name: str | None = None
    """The model's public name; by default the name of its folder."""
    context: int | None = None
    """Tokens one sequence may hold, prompt and answer together: vLLM's `max_model_len`."""
    slots: int | None = None
    """Sequences in one step: vLLM's `max_num_seqs`."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """LoRA adapters: public name to folder."""
    loads_adapters: bool = False
    """Whether others may come later."""
    statistics: bool = False
    """Whether somebody reads what its core tells of itself with each step: how full its memory is."""
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    """Anything else that vLLM's `AsyncEngineArgs` takes, by its name there."""


def engine_args(model: str, options: VllmOptions) -> Any:
    """vLLM's AsyncEngineArgs. What it does not know is refused by name."""
    try:
        from vllm.engine.arg_utils import AsyncEngineArgs
    except ImportError as error:
        raise BindingError(
            "vLLM is not installed here: `pip install vllm`, and dragoman after it."
        ) from error
    given = {name.replace("-", "_"): value for name, value in options.engine_args.items()}
    _check(given, [each.name for each in dataclasses.fields(AsyncEngineArgs)])
    ours: dict[str, Any] = {"model": model}
    if options.context is not None:
        ours["max_model_len"] = options.context
    if options.slots is not None:
        ours["max_num_seqs"] = options.slots
    if options.adapters:
        ours |= _adapter_args(options.adapters.values())
    twice = given.keys() & ours.keys() - {"max_loras", "max_lora_rank"}
    if twice:
        raise SettingsError(f"`{min(twice)}` is given twice: in the engine's arguments and as a setting.")
    # Priorities are of no use otherwise.
    usual: dict[str, Any] = {"scheduling_policy": "priority", "disable_log_stats": not options.statistics}
    if not model.endswith(".gguf"):
        # `auto` would unpickle weights where there is nothing else.
        usual["load_format"] = "safetensors"
    if options.loads_adapters:
        # What is not kept is read again when it is asked for, and its folder may be gone by then.
        usual |= {"enable_lora": True, "max_cpu_loras": MOST_ADAPTERS}
    made = {"structured_outputs_config": _choose_structured(given), **_transfer_of(given)}
    return AsyncEngineArgs(**usual | ours | given | made)


def _transfer_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Where keys and values come from and go to. A file says it in members, which vLLM does not read here."""
    said = given.get("kv_transfer_config")
    if not isinstance(said, Mapping):
        return {}
    from vllm.config import KVTransferConfig

    try:
        return {"kv_transfer_config": KVTransferConfig(**said)}
    except (TypeError, ValueError) as error:
        raise SettingsError("The engine's argument `kv_transfer_config` is none that vLLM takes.") from error


def _check(given: Iterable[str], known: Iterable[str]) -> None:
    known = list(known)
    for name in given:
        if name in _INSTEAD:
            raise SettingsError(f"The engine's argument `{name}` is a setting of its own: {_INSTEAD[name]}.")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean `{near[0]}`?" if near else "."
            raise SettingsError(f"vLLM has no engine argument `{name}`{hint}")


def _choose_structured(given: Mapping[str, Any]) -> Any:
    """llguidance, unless another is chosen: it reads the very grammars that we write."""
    chosen = given.get("structured_outputs_config", {})
    return {"backend": "guidance", **chosen} if isinstance(chosen, dict) else chosen


def _adapter_args(folders: Iterable[str]) -> dict[str, Any]:
    """Room for all adapters at once, as large as the largest of them."""
    from vllm.config.lora import MaxLoRARanks

    ranks = [rank_of(Path(folder).expanduser()) for folder in folders]
    room = next((size for size in sorted(get_args(MaxLoRARanks)) if size >= max(ranks)), None)
    if room is None:
        raise ModelFileError(f"vLLM takes no adapter of rank {max(ranks)}.")
    return {"enable_lora": True, "max_loras": len(ranks), "max_lora_rank": room}


def rank_of(folder: Path) -> int:
    file = folder / "adapter_config.json"
    try:
        rank = msgspec.json.decode(file.read_bytes())["r"]
    except (OSError, msgspec.DecodeError, KeyError, TypeError) as error:
        raise ModelFileError(f"{folder} holds no LoRA adapter: {file.name} is missing or broken.") from error
    if not isinstance(rank, int):
        raise ModelFileError(f"{file} names no rank of the adapter.")
    return rank
