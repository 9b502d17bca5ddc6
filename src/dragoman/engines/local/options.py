"""What can be set about the embedded engine."""

from collections.abc import Mapping

from msgspec import Struct, field


class LocalOptions(Struct, frozen=True, kw_only=True):
    """Everything has a default that is worked out from the model and the machine."""

    name: str | None = None
    """The model's public name; by default the name of the file."""
    context: int | None = None
    """Tokens one sequence may hold, prompt and answer together."""
    slots: int | None = None
    """Sequences that are held at the same time; each has memory of its own."""
    threads: int | None = None
    """Compute threads; by default one per physical core this process may use."""
    batch: int = 512
    """Most tokens in one engine step, so also the most one step can stall."""
    chunk: int = 128
    """Most prompt tokens in one engine step while other sequences are being decoded."""
    kv_memory: int | None = None
    """Bytes that all slots together may take; by default a quarter of the free memory, 2 GiB at most."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """LoRA adapters: public name to GGUF file."""
    flash_attention: bool = True
    """Fused attention where the architecture can do it: faster on every machine measured."""
