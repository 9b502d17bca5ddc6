"""What can be set about a model that `transformers` runs."""

from msgspec import Struct


class TransformersOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything has a default that is worked out from the model and the machine."""

    name: str | None = None
    """The model's public name; by default the name of its folder."""
    context: int | None = None
    """Tokens one sequence may hold, prompt and answer together."""
    slots: int | None = None
    """Sequences in one step."""
    threads: int | None = None
    """Compute threads on a CPU; by default one per physical core this process may use."""
    device: str | None = None
    """`cuda`, `cuda:1`, `cpu`, ...; by default a GPU if there is one."""
    dtype: str | None = None
    """`bfloat16`, `float32`, ...; by default the checkpoint's on a GPU, and float32 on a CPU."""
    batch: int = 512
    """Most tokens in one step on a CPU, so also the most one step can stall."""
    page: int = 32
    """Tokens in one page of key-value memory; whole pages of equal prefixes are shared."""
    kv_memory: int | None = None
    """Bytes of key-value memory on a CPU; by default a quarter of what is free, 2 GiB at most."""
