"""Opening of a model: from a file or folder to a runner with its tokenizer and card."""

import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from dragoman.engines.local import binding, hardware
from dragoman.engines.local.binding import GpuDevice
from dragoman.engines.local.draft_model import Drafter, open_draft
from dragoman.engines.local.gguf_model import LlamaModel, LlamaTokenizer
from dragoman.engines.local.hardware import (
    check_context,
    count_readers,
    numerics,
    read_model,
    size_for,
    widens_to_int8,
)
from dragoman.engines.local.llamacpp import (
    BATCH_INVARIANT_TYPES,
    OWN_KINDS,
    KVDtypes,
    LlamaRunner,
    kept_kinds,
)
from dragoman.engines.local.openvino.architectures import OpenVinoUnsupported, shape_of
from dragoman.engines.local.options import LocalOptions
from dragoman.engines.local.runner import AnyRunner, PagedRunner
from dragoman.engines.local.runner_choice import RunnerChoice, choose_runner
from dragoman.engines.model_files import LLAMA_CPP, in_gguf
from dragoman.engines.protocol import ModelCard, Tokenizer
from dragoman.errors import ModelFileError, SettingsError

if TYPE_CHECKING:
    from dragoman.engines.local.encoder_cache import EncoderCache
    from dragoman.engines.local.openvino.adapters import LoraAdapter

_INT8 = frozenset({"avx512_vnni", "avx_vnni", "amx_int8"})
_PRICES = {
    True: ", answers one by one for identical results (--kv-cache f16: faster, not identical)",
    False: ", identical results: slower prefill, answers in batches of at most three, or one by one",
}
_SOME = 8
"""Concurrent answers up to which identical results are the default for K-quants: they cost about a twelfth
of the rate here, but a third at 32.
"""
_INSTALL = "pip install 'dragoman[openvino]'"


class OpenedModel(Struct):
    runner: AnyRunner
    tokenizer: Tokenizer
    card: ModelCard
    options: LocalOptions
    """The options, completed by this runner's defaults."""
    drafter: Drafter | None = None
    pictures: "EncoderCache | None" = None


def open_model(path: Path, options: LocalOptions) -> OpenedModel:
    """Open a model, and its draft model if there is one. Raises ModelFileError, SettingsError or
    BindingError.
    """
    opened = _open_alone(path, options)
    if options.draft is None:
        return opened
    runner, draft = opened.runner, Path(options.draft).expanduser()
    try:
        if not isinstance(runner, PagedRunner) and not runner.can_truncate:
            raise ModelFileError(f"{path.name} has layers whose state cannot be truncated; remove `draft`.")
        opened.drafter = open_draft(draft, options, opened.tokenizer, path.name, runner.context)
    except BaseException:
        runner.close()
        raise
    fields = {"draft": draft.name, "draft_bytes": str(opened.drafter.bytes)}
    opened.card = replace(opened.card, details={**opened.card.details, **fields})
    return opened


def _open_alone(path: Path, options: LocalOptions) -> OpenedModel:
    if options.runner != "torch" and options.weights != "auto":
        message = "`weights` is only for the runner torch; remove it, or set `runner` to torch."
        raise SettingsError(message, param="weights")
    if options.mmproj is not None:
        return _open_seeing(path, options)
    if options.runner == "torch":
        return _open_torch(path, options)
    if path.is_dir():
        return _open_folder(path, options)
    gpus = _gpus_for(options)
    if options.runner == "llamacpp" or (options.runner == "auto" and gpus):
        return _open_llamacpp(path, options, f"llama.cpp, on {gpus[0].description}" if gpus else "")
    try:
        item = _try_openvino(path, options)
    except OpenVinoUnsupported as why:
        if options.runner == "openvino":
            message = f"OpenVINO cannot run {path.name}: {why}. Use the runner llamacpp."
            raise ModelFileError(message) from None
        item = f"llama.cpp; not OpenVINO, because {why}"
    return _open_llamacpp(path, options, item) if isinstance(item, str) else item


def _open_seeing(path: Path, options: LocalOptions) -> OpenedModel:
    """Open a model with a projector, which only llama.cpp supports."""
    if options.runner not in ("auto", "llamacpp"):
        message = f"The runner {options.runner} has no support for `mmproj`; use llamacpp, or `--no-mmproj`."
        raise SettingsError(message, param="mmproj")
    if path.is_dir():
        raise SettingsError(f"{path} is a folder; a projector (`mmproj`) needs a GGUF file.", param="mmproj")
    gpus = _gpus_for(options)
    on = f", on {gpus[0].description}" if gpus else ""
    return _open_llamacpp(path, options, f"llama.cpp{on}, required by the projector (--no-mmproj)")


def _gpus_for(options: LocalOptions) -> list[GpuDevice]:
    """Return the GPUs that llama.cpp is to use."""
    gpus = binding.load().gpus() if options.gpu_layers != 0 else []
    if not gpus and (options.gpu_layers or 0) > 0:
        message = f"`gpu_layers` is {options.gpu_layers}, but the installed llama.cpp finds no GPU"
        raise SettingsError(f"{message}; `dragoman doctor` shows what to install.", param="gpu_layers")
    return gpus


def _try_openvino(path: Path, options: LocalOptions) -> OpenedModel | str:
    """Open with OpenVINO, or return why the other runner was selected. Cheap checks come first."""
    check_machine(options)
    model = LlamaModel(path, vocabulary_only=True)
    if len(model.parts) > 1:
        raise OpenVinoUnsupported("its weights are split into several files")
    shape = shape_of(model.metadata)
    check_context(options.context, model.trained_context)
    from dragoman.engines.local.openvino.adapters import read_adapters

    adapters = read_adapters(options.adapters, model.metadata["general.architecture"])
    choice = (
        RunnerChoice("openvino", "") if options.runner == "openvino" else choose_runner(model, shape, options)
    )
    return choice.why if choice.runner == "llamacpp" else _open_openvino(model, options, adapters, choice.why)


def _open_llamacpp(path: Path, options: LocalOptions, why: str = "") -> OpenedModel:
    model = read_model(path, options)
    check_context(options.context, model.trained_context)
    gpus = _gpus_for(options)
    kept, evenly = _settle_ways(model, options, gpus)
    model.load_adapters(options.adapters)
    size = size_for(model, options)
    pictures = None if options.mmproj is None else _open_pictures(model, options, size.threads)
    whole = 0 if pictures is None else pictures.projector.most_whole
    runner = LlamaRunner(
        model,
        slots=size.slots,
        context=size.context,
        batch=max(options.batch, whole),
        threads=size.threads,
        flash_attention=options.flash_attention,
        kept=kept,
        batch_invariant=evenly,
        pictures=pictures,
    )
    details = {
        "runner": f"llama.cpp with {kept}{_PRICES[kept == OWN_KINDS] if evenly else ''}",
        "why": why,
        "threads": str(size.threads),
        "kv_bytes": str(kept.bytes_of(size.slots * size.context * model.token_bytes)),
    }
    kinds = (kept.keys, kept.values, evenly, options.flash_attention)
    facts = (version("xllamacpp"), *kinds, size.threads, *(gpu.description for gpu in gpus))
    files = [*model.parts, *options.adapter_files]
    if pictures is not None:
        projector = pictures.projector
        details |= {"mmproj": projector.path.name, "mmproj_bytes": str(projector.bytes)}
        files.append(projector.path)
    opened = _make_opened(model, runner, options, details, numerics(files, "llama.cpp", *facts))
    if pictures is not None:
        opened.pictures = pictures
        opened.card = replace(opened.card, modalities=pictures.projector.modalities)
    return opened


def _open_pictures(model: LlamaModel, options: LocalOptions, threads: int) -> "EncoderCache":
    from dragoman.engines.local.encoder_cache import EncoderCache
    from dragoman.engines.local.projector import Projector
    from dragoman.media.decode import MediaDecoder

    path = Path(options.mmproj or "").expanduser()
    projector = Projector(path, model, threads=threads, gpu=options.gpu_layers != 0)
    return EncoderCache(projector, MediaDecoder(options.limits))


def _settle_ways(
    model: LlamaModel, options: LocalOptions, gpus: Sequence[GpuDevice]
) -> tuple[KVDtypes, bool]:
    """Decide llama.cpp's KV cache types, and whether rows are computed evenly: if `deterministic` is set;
    for one client, who does not use batches of answers; and for a few clients, whom it costs little. Draft
    tokens are computed in batches.
    """
    fused = options.flash_attention and not gpus
    readers = count_readers(options)
    alone = readers == 1 and options.draft is None
    dense = model.rewinds and not model.mixes
    even, some = dense and model.kinds <= BATCH_INVARIANT_TYPES, dense and 1 < readers <= _SOME
    several = fused and (options.deterministic or even or some) and not (alone and model.rewinds)
    kept = kept_kinds(options.kv_cache, model.key_length, several=several)
    if options.deterministic:
        _check_even(model, kept, options, gpus)
    alone_evenly = alone and model.rewinds and options.kv_cache == "auto" and kept == OWN_KINDS
    some_evenly = some and not even and kept != OWN_KINDS
    return kept, options.deterministic or (fused and (alone_evenly or some_evenly))


def _check_even(model: LlamaModel, kept: KVDtypes, options: LocalOptions, gpus: Sequence[GpuDevice]) -> None:
    """Raise SettingsError if llama.cpp cannot be deterministic, or is not known to be."""
    if gpus:
        message = "`deterministic` is not supported by llama.cpp on a GPU; set `gpu_layers` to 0."
        raise SettingsError(message, param="deterministic")
    if not options.flash_attention:
        message = "`deterministic` needs fused attention in llama.cpp; leave `flash_attention` on."
        raise SettingsError(message, param="deterministic")
    if kept == OWN_KINDS and not model.rewinds:
        message = f"`deterministic` is not supported with {kept} and layers whose state cannot be truncated"
        raise SettingsError(f"{message}, as in {model.name}: set `kv_cache` to int8.", param="kv_cache")


def _open_openvino(
    model: LlamaModel, options: LocalOptions, adapters: Sequence["LoraAdapter"], why: str
) -> OpenedModel:
    """Open with OpenVINO; `model` has only the vocabulary loaded."""
    from dragoman.engines.local.openvino.conversion_cache import ensure_converted
    from dragoman.engines.local.openvino.runner import files_of, runner_of

    graph = ensure_converted(model.path, wide=widens_to_int8(model.path, options))
    architecture = model.metadata["general.architecture"]
    runner, details = runner_of(graph, model.trained_context, options, adapters, architecture)
    decided = numerics([*files_of(graph), *options.adapter_files], details["runner"])
    return _make_opened(model, runner, options, details | {"why": why}, decided)


def _open_folder(path: Path, options: LocalOptions) -> OpenedModel:
    """Open a model that was exported for OpenVINO, with the files of its tokenizer."""
    if options.runner == "llamacpp":
        raise ModelFileError(f"{path} is a folder; llama.cpp needs a GGUF file.")
    try:
        if options.adapters:
            raise OpenVinoUnsupported("LoRA adapters are for GGUF files")
        check_machine(options, any_cpu=True)
        from dragoman.engines.local.openvino.runner import card_and_tokenizer, folder_graph, runner_of

        graph, trained = folder_graph(path)
        runner, details = runner_of(graph, trained, options)
    except OpenVinoUnsupported as why:
        raise ModelFileError(f"OpenVINO cannot run {path}: {why}.") from None
    card, tokenizer = card_and_tokenizer(path, runner, options.name, details)
    return OpenedModel(runner, tokenizer, card, options)


def _open_torch(path: Path, options: LocalOptions) -> OpenedModel:
    """Open a folder of safetensors, or a GGUF file, with torch."""
    if not all(map(find_spec, ("torch", "safetensors", "gguf"))):
        raise ModelFileError("The runner torch is not installed: pip install 'dragoman[torch]'.")
    if options.kv_cache in ("int8", "f16"):
        message = f"The runner torch does not support a KV cache in {options.kv_cache}; remove `kv_cache`."
        raise SettingsError(message, param="kv_cache")
    if options.gpu_layers is not None:
        raise SettingsError("`gpu_layers` is only for the runner llamacpp; remove it.", param="gpu_layers")
    from dragoman.engines.local.pytorch.opening import open_gguf, open_torch, settle_torch

    options = settle_torch(options)
    if not path.is_dir():
        model = LlamaModel(path, vocabulary_only=True)
        runner, details, decided = open_gguf(model, options)
        return _make_opened(model, runner, options, details, decided)
    runner, tokenizer, card = open_torch(path, options)
    return OpenedModel(runner, tokenizer, card, options)


def check_machine(options: LocalOptions, any_cpu: bool = False) -> None:
    """Raise OpenVinoUnsupported if OpenVINO cannot run any model here, or `auto` does not select it."""
    if find_spec("openvino") is None or find_spec("gguf") is None:
        raise OpenVinoUnsupported(f"it is not installed ({_INSTALL})")
    if options.runner == "auto" and not any_cpu and not hardware.cpu_flags() & _INT8:
        raise OpenVinoUnsupported("this CPU has no int8 instructions (VNNI)")
    if options.kv_cache == "bf16":
        _check_bfloat16(options.runner == "openvino" or any_cpu)


def _check_bfloat16(no_other: bool) -> None:
    """Raise if the CPU has no bfloat16. `no_other`: no other runner could be used instead."""
    from dragoman.engines.local.openvino.compiled_graph import has_bfloat16

    if has_bfloat16():
        return
    if no_other:
        message = "`kv_cache` is bf16, which this CPU does not support in OpenVINO; set int8 or auto."
        raise SettingsError(message, param="kv_cache")
    raise OpenVinoUnsupported("this CPU does not support bfloat16, which `kv_cache` is set to")


def _make_opened(
    model: LlamaModel, runner: AnyRunner, options: LocalOptions, details: Mapping[str, str], decided: str
) -> OpenedModel:
    tokenizer = LlamaTokenizer(model)
    card = ModelCard(
        name=options.name or model.name,
        max_model_len=runner.context,
        templates=model.templates,
        special_tokens=tokenizer.texts(model.named_ids),
        adapters=runner.adapters,
        combines_adapters=True,
        constrains=True,
        has_samplers=True,
        recommended_sampling={**LLAMA_CPP, **in_gguf(model.metadata)},
        created=int(time.time()),
        dimensions=model.width,
        slots=runner.slots,
        preempts_background=True,
        max_concurrent_embeds=1,
        numerics=decided,
        details={**model.details, "slots": str(runner.slots), **details},
    )
    return OpenedModel(runner, tokenizer, card, options)
