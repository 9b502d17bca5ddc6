"""What can be set about the embedded engine."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypeAlias

from msgspec import Struct, field

RunnerName: TypeAlias = Literal["auto", "llamacpp", "openvino"]
KvCache: TypeAlias = Literal["auto", "int8", "bf16"]


class LocalOptions(Struct, frozen=True, kw_only=True):
    """Everything has a default that is worked out from the model and the machine."""

    runner: RunnerName = "auto"
    """What computes. `auto` is the one that was faster when both were tried with this file on this CPU."""
    readers: int | None = None
    """Answers that are expected at a time, for which `auto` decides; by default `slots`, or else one."""
    name: str | None = None
    """The model's public name; by default the name of the file."""
    context: int | None = None
    """Tokens one sequence may hold, prompt and answer together."""
    slots: int | None = None
    """Sequences that are computed at the same time."""
    threads: int | None = None
    """Compute threads; by default one per physical core this process may use."""
    batch: int = 512
    """Most tokens in one engine step, so also the most one step can stall."""
    chunk: int = 128
    """Most prompt tokens in one engine step while other sequences are being decoded."""
    kv_memory: int | None = None
    """Bytes for keys and values; by default a quarter of the free memory, 2 GiB at most."""
    kv_cache: KvCache = "auto"
    """Keys and values in `int8`, half the memory, or `bf16`; `auto` is 16 bits where the CPU can."""
    deterministic: bool = False
    """Whether an answer may not depend on others beside it: then llama.cpp keeps keys and values in int8."""
    guesses: int = 7
    """Most tokens that are guessed ahead in one step, from what was said before; 0 for none."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """LoRA adapters: public name to GGUF file."""
    flash_attention: bool = True
    """Fused attention where the architecture can do it: faster on every machine measured."""

    @property
    def adapter_files(self) -> list[Path]:
        return [Path(file).expanduser() for file in self.adapters.values()]
