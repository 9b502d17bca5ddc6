"""The conversion cache: OpenVINO graphs of GGUF files, each converted once.

    ~/.cache/dragoman/openvino/SmolLM2-135M-Instruct.Q4_1-b179c9523d0e6a0f-7/openvino_model.xml

The name has the checksum of the source and the version of the conversion; if the source has 4-bit weights
that could be kept, also whether they were, as in `-8-four` and `-8-wide`. Hashing gigabytes at each start
would take longer than loading them, so an unchanged source is recognized by its size and time.
"""

import hashlib
import logging
import os
from functools import partial
from itertools import chain
from pathlib import Path

import msgspec
import openvino as ov
from msgspec import Struct

from dragoman.engines.default_weights import cache_folder, show_progress, work_folder
from dragoman.engines.local.openvino.architectures import RECIPE, OpenVinoUnsupported, shape_of
from dragoman.engines.local.openvino.graph import build
from dragoman.engines.local.openvino.tensors import GraphWeights
from dragoman.engines.local.os_memory import read_pages_given_back
from dragoman.errors import ModelFileError

FILE = "openvino_model.xml"
_SOURCE = "source.json"
_log = logging.getLogger("dragoman.engine")


class _Source(Struct, frozen=True):
    path: str
    size: int
    modified: int


def ensure_converted(path: Path, *, wide: bool = False) -> Path:
    """Return the graph of a GGUF file, converting it if needed; `wide` as in `GraphWeights`. Raises
    OpenVinoUnsupported if that is impossible.
    """
    folder, source = _place(path)
    if known := _find_known(folder, path, source, wide):
        return known / FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with work_folder(folder, "convert-") as work:
            begin = f"{path.stem}-{_digest(path)[:16]}-{RECIPE}"
            paths = (folder / f"{begin}{end}" for end in _ends(wide))
            target = next((target for target in paths if (target / FILE).exists()), None)
            if target is None:
                target = folder / f"{begin}{_convert(path, work, wide)}"
                _keep(work)
                work.rename(target)
                work.mkdir()
            (target / _SOURCE).write_bytes(msgspec.json.encode(source))
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ModelFileError(
            f"Cannot store the OpenVINO graph of {path.name} in {folder} ({reason}); free disk space, set "
            "DRAGOMAN_CACHE to another folder, or use the runner llamacpp."
        ) from None
    return target / FILE


def is_converted(path: Path, *, wide: bool = False) -> bool:
    folder, source = _place(path)
    return _find_known(folder, path, source, wide) is not None


def _ends(wide: bool) -> tuple[str, str]:
    """Return the possible endings of a name; it has none if `wide` makes no difference."""
    return "", "-wide" if wide else "-four"


def _place(path: Path) -> tuple[Path, _Source]:
    """Return the cache folder, and the identity of the source."""
    stat = path.stat()
    return cache_folder() / "openvino", _Source(str(path.resolve()), stat.st_size, stat.st_mtime_ns)


def _find_known(folder: Path, path: Path, source: _Source, wide: bool) -> Path | None:
    begin = f"{_literal(path.stem)}-*-{RECIPE}"
    for entry in chain.from_iterable(folder.glob(begin + end) for end in _ends(wide)):
        try:
            result = msgspec.json.decode((entry / _SOURCE).read_bytes(), type=_Source)
        except (OSError, msgspec.DecodeError):
            continue
        if result == source and (entry / FILE).exists():
            return entry
    return None


def _convert(path: Path, folder: Path, wide: bool) -> str:
    """Convert the file into the folder; return the ending of its name."""
    result = partial(show_progress, doing="converting weights", did="converted weights")
    try:
        with read_pages_given_back(path):
            tensors = GraphWeights(path, result, wide=wide)
            model = build(tensors, shape_of(tensors.metadata))
    except (LookupError, ValueError, ArithmeticError, RuntimeError) as error:
        _log.warning("Cannot convert %s for OpenVINO", path.name, exc_info=error)
        raise OpenVinoUnsupported("its tensors do not match its architecture") from error
    ov.save_model(model, folder / FILE, compress_to_fp16=False)
    return _ends(wide)[tensors.has_four_bits]


def _keep(folder: Path) -> None:
    """Flush the folder to disk before it is renamed, so that a named one is complete even after a power
    failure.
    """
    for file in folder.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _literal(text: str) -> str:
    """Escape wildcards in a name."""
    return "".join(f"[{sign}]" if sign in "*?[" else sign for sign in text)
