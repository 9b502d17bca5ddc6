"""A compiled graph as a runner, and folders that were exported for OpenVINO."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import openvino as ov

from dragoman.engines.hf_tokenizer import HfTokenizer, card_of
from dragoman.engines.local import machine
from dragoman.engines.local.numerics import numerics
from dragoman.engines.local.openvino.adapters import Adapter
from dragoman.engines.local.openvino.compiled import best_kv_cache, compile_graph
from dragoman.engines.local.openvino.converted import FILE
from dragoman.engines.local.openvino.runner import OpenVinoRunner
from dragoman.engines.local.options import LocalOptions
from dragoman.engines.local.sizing import pages_for
from dragoman.engines.protocol import ModelCard
from dragoman.engines.recommended import LLAMA_CPP, in_folder
from dragoman.errors import ModelFileError

_CONTEXT = 2048


def runner_of(
    graph: Path, trained: int, options: LocalOptions, adapters: Sequence[Adapter] = ()
) -> tuple[OpenVinoRunner, dict[str, str]]:
    """The runner, and what there is to say about it."""
    threads = options.threads or machine.cores()
    kept = best_kv_cache() if options.kv_cache == "auto" else options.kv_cache
    compiled = compile_graph(graph, threads=threads, kv_cache=kept, adapters=adapters)
    slots, context, pages = pages_for(compiled.page, compiled.page_bytes, trained, options)
    runner = OpenVinoRunner(compiled, slots=slots, context=context, pages=pages, batch=options.batch)
    version = ov.__version__.split("-")[0]
    return runner, {
        "runner": f"OpenVINO {version}, {kept} keys and values",
        "threads": str(threads),
        "kv_bytes": str(runner.all_pages * compiled.page_bytes),
    }


def folder_graph(folder: Path) -> tuple[Path, int]:
    """The graph in a folder, and how many tokens the model was trained for."""
    graph = folder / FILE
    if not graph.is_file():
        raise ModelFileError(f"{folder} is a folder without {FILE}; a GGUF file or such a folder is needed.")
    try:
        config: dict[str, Any] = msgspec.json.decode((folder / "config.json").read_bytes(), type=dict)
    except (OSError, msgspec.DecodeError):
        config = {}
    return graph, int(config.get("max_position_embeddings") or _CONTEXT)


def files_of(graph: Path) -> list[Path]:
    """A graph, and its weights."""
    return [graph, graph.with_suffix(".bin")]


def card_and_tokenizer(
    folder: Path, runner: OpenVinoRunner, name: str | None, details: Mapping[str, str]
) -> tuple[ModelCard, HfTokenizer]:
    tokenizer = HfTokenizer(folder, size=runner.vocabulary)
    card = card_of(
        tokenizer,
        name=name or folder.name,
        max_model_len=runner.context,
        slots=runner.slots,
        constrains=True,
        has_samplers=True,
        sampling={**LLAMA_CPP, **in_folder(folder)},
        created=int(time.time()),
        details={"name": folder.name, "slots": str(runner.slots), **details},
    )
    card.numerics = numerics(files_of(folder / FILE), details["runner"])
    return card, tokenizer
