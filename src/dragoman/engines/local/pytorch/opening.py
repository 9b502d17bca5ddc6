"""Opening of a safetensors folder or GGUF file with the runner torch; a folder also has its tokenizer and
card.
"""

import math
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec.structs import replace

from dragoman.engines.hf_tokenizer import HfTokenizer, card_of
from dragoman.engines.local.gguf_model import LlamaModel
from dragoman.engines.local.hardware import check_context, numerics
from dragoman.engines.local.options import LocalOptions
from dragoman.engines.local.pytorch.architectures import DecoderConfig, decoder_of
from dragoman.engines.local.pytorch.gguf_file import GgufFile
from dragoman.engines.local.pytorch.quantized import KINDS
from dragoman.engines.local.pytorch.runner import PAGE, TorchRunner
from dragoman.engines.local.pytorch.weights import ModelWeights, files_of, read_tensors
from dragoman.engines.model_files import LLAMA_CPP, in_folder
from dragoman.engines.protocol import ModelCard
from dragoman.errors import ModelFileError, SettingsError

_SLOTS, _BATCH, _CHUNK = 256, 8192, 2048
_SHARE = 0.85
"""Fraction of a GPU's free memory for the KV cache, if `kv_memory` is unset."""
_ON_CPU = 256 << 20
_HAS_FP8 = (8, 9)


def settle_torch(options: LocalOptions) -> LocalOptions:
    """Replace defaults with step sizes that suit a GPU."""
    usual = LocalOptions()
    batch = _BATCH if options.batch == usual.batch else options.batch
    chunk = _CHUNK if options.chunk == usual.chunk else options.chunk
    # A GPU prefills this many rows within a few milliseconds, whatever was measured so far.
    pause = math.inf if torch.cuda.is_available() and options.pause == usual.pause else options.pause
    return replace(options, batch=batch, chunk=min(batch, chunk), pause=pause)


def open_torch(path: Path, options: LocalOptions) -> tuple[TorchRunner, HfTokenizer, ModelCard]:
    """Open a folder of safetensors. Raises ModelFileError or SettingsError."""
    shape = decoder_of(_config(path))
    check_context(options.context, shape.context)
    tokenizer = HfTokenizer(path, size=shape.vocabulary)
    weights = _empty(shape, options)
    weights.load(read_tensors(path), path)
    runner, details = _runner_of(weights, options)
    card = card_of(
        tokenizer,
        name=options.name or path.name,
        max_model_len=runner.context,
        slots=runner.slots,
        adapters=runner.adapters,
        constrains=True,
        has_samplers=True,
        sampling={**LLAMA_CPP, **in_folder(path)},
        created=int(time.time()),
        details={"name": path.name, "slots": str(runner.slots), **details},
    )
    card.combines_adapters = True
    card.numerics = numerics([*files_of(path), *_adapter_files(options)], details["runner"])
    return runner, tokenizer, card


def open_gguf(model: LlamaModel, options: LocalOptions) -> tuple[TorchRunner, dict[str, str], str]:
    """Open a GGUF file whose vocabulary is loaded; returns the runner, its details, and a digest of all
    that decides its answers.
    """
    file = GgufFile(model.parts, model.metadata)
    shape = file.decoder()
    check_context(options.context, shape.context)
    weights = _empty(shape, options)
    weights.load(file.tensors(shape, weights.embedding), model.path)
    runner, details = _runner_of(weights, options)
    return runner, details, numerics([*model.parts, *_adapter_files(options)], details["runner"])


def _empty(shape: DecoderConfig, options: LocalOptions) -> ModelWeights:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    _check_head(shape, device)
    if options.threads and device.type == "cpu":
        torch.set_num_threads(options.threads)
    # bfloat16 on a GPU, whatever the file has; float32 on a CPU, which serves for comparisons.
    wide = device.type == "cpu" and options.weights != "bf16"
    if options.weights == "fp8" and device.type == "cuda" and torch.cuda.get_device_capability() < _HAS_FP8:
        raise SettingsError("This GPU does not support fp8; set `weights` to int8.", param="weights")
    return ModelWeights(shape, device, torch.float32 if wide else torch.bfloat16, KINDS.get(options.weights))


def _check_head(shape: DecoderConfig, device: torch.device) -> None:
    """Check the size of heads: kernels have tiles whose sides are powers of two, at least 16."""
    if device.type == "cuda" and (shape.head < 16 or shape.head & (shape.head - 1)):
        raise ModelFileError(
            f"The runner torch does not support heads of {shape.head} numbers on a GPU, only 16, 32, 64, 128"
            " or 256; use --engine transformers."
        )


def _runner_of(weights: ModelWeights, options: LocalOptions) -> tuple[TorchRunner, dict[str, str]]:
    """Create the runner and its details."""
    slots, context, pages = _sizes(weights.shape, weights, options)
    runner = TorchRunner(
        weights,
        slots=slots,
        context=context,
        pages=pages,
        batch=options.batch,
        deterministic=options.deterministic,
    )
    for name, folder in options.adapters.items():
        runner.read_adapter(name, Path(folder).expanduser())()
    where = torch.cuda.get_device_name() if weights.embedding.is_cuda else "this CPU, which is slow"
    kind = str(weights.embedding.dtype).removeprefix("torch.")
    if options.weights in KINDS:
        kind += f" with weights in {options.weights}"
    price = ", products in blocks of rows, to be deterministic" if options.deterministic else ""
    return runner, {
        "runner": f"PyTorch {torch.__version__}, {kind}, on {where}{price}",
        "kv_bytes": str(pages * _page_bytes(weights.shape, weights)),
    }


def _adapter_files(options: LocalOptions) -> list[Path]:
    return [file / "adapter_model.safetensors" for file in options.adapter_files]


def is_known(path: Path) -> bool:
    """Whether it is a folder of a supported family, or such a GGUF file that fits on the GPU."""
    try:
        card = torch.device("cuda")
        if path.is_dir():
            _check_head(decoder_of(_config(path)), card)
            return True
        model = LlamaModel(path, vocabulary_only=True)
        file = GgufFile(model.parts, model.metadata)
        _check_head(file.decoder(), card)
    except ModelFileError:
        return False
    room: int = torch.cuda.mem_get_info()[0]
    return 2 * file.numbers < _SHARE * room


def _config(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode((path / "config.json").read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError):
        raise ModelFileError(f"{path} has no readable config.json.") from None


def _page_bytes(shape: DecoderConfig, weights: ModelWeights) -> int:
    size: int = weights.embedding.element_size()
    return 2 * shape.layers * PAGE * shape.kv_heads * shape.head * size


def _sizes(shape: DecoderConfig, weights: ModelWeights, options: LocalOptions) -> tuple[int, int, int]:
    """Return slots, context and pages."""
    context = options.context or shape.context
    free = _ON_CPU
    if weights.embedding.is_cuda:
        free = int(torch.cuda.mem_get_info()[0] * _SHARE)
    each, page = -(-context // PAGE), _page_bytes(shape, weights)
    slots = options.slots or _SLOTS
    pages = min((options.kv_memory or free) // page, slots * each)
    if pages < each:
        raise SettingsError(
            f"A context of {context} tokens needs {each * page / 1e9:.1f} GB for the KV cache, and"
            f" {pages * page / 1e9:.1f} GB are free; set a shorter `context`.",
            param="context",
        )
    return slots, context, pages
