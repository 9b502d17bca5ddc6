"""From a folder or a name to a model on its device."""

from pathlib import Path
from typing import Any

from msgspec import Struct

from dragoman.engines.local import machine
from dragoman.engines.local.sizing import divide, memory_for
from dragoman.engines.transformers.options import TransformersOptions
from dragoman.errors import ModelFileError

_WRITES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_GPU_ROWS = 128


class Loaded(Struct, kw_only=True):
    model: Any
    writes: bool
    """Whether it is a language model. An encoder only gives vectors."""
    context: int
    vocabulary: int
    rows: int
    pages: int | None
    """Pages of key-value memory; None leaves it to the library, which knows the GPU."""


def load(path: str, options: TransformersOptions) -> Loaded:
    """Raises ModelFileError where the library or the model cannot be used."""
    try:
        import torch
        from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

        import dragoman.engines.transformers.batching  # noqa: F401 (what it needs is there, or it is told now)
    except ImportError:
        message = "This engine needs newer packages: pip install 'dragoman[transformers]'."
        raise ModelFileError(message) from None
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    on_cpu = device.type == "cpu"
    if on_cpu:
        torch.set_num_threads(options.threads or machine.cores())
    folder = str(Path(path).expanduser()) if Path(path).expanduser().exists() else path
    try:
        # Said, because where nothing is said it asks whoever sits at the terminal, and would take a yes.
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        writes = any(sign in name for name in config.architectures or () for sign in _WRITES)
        kind = AutoModelForCausalLM if writes else AutoModel
        dtype = options.dtype or ("float32" if on_cpu else "auto")
        model = kind.from_pretrained(folder, dtype=dtype, trust_remote_code=False).to(device).eval()
    except (OSError, ValueError, KeyError) as error:
        raise ModelFileError(f"transformers cannot load {path}: {_first_line(error)}") from error
    return _sized(model, writes, on_cpu, options)


def _sized(model: Any, writes: bool, on_cpu: bool, options: TransformersOptions) -> Loaded:
    text = model.config.get_text_config()
    trained = int(getattr(text, "max_position_embeddings", None) or 2048)
    rows, context, pages = options.slots or _GPU_ROWS, options.context or trained, None
    if on_cpu and writes:
        tokens = memory_for(options.kv_memory) // _token_bytes(text, model.dtype.itemsize)
        rows, context = divide(tokens, trained, options.slots, options.context)
        pages = -(-rows * context // options.page)
    return Loaded(
        model=model,
        writes=writes,
        context=min(context, trained),
        vocabulary=int(text.vocab_size),
        rows=rows,
        pages=pages,
    )


def _token_bytes(text: Any, number: int) -> int:
    """Bytes of key-value memory per token."""
    heads = int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
    width = int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    return 2 * int(text.num_hidden_layers) * heads * width * number


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
