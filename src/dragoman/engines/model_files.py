"""Metadata in a model's files: its tokenizer, its templates, and its recommended sampling."""

import os
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field

from dragoman.errors import ModelFileError

# A tokenizer's definition, from a loaded object or from the files of a folder.


class TokenizerSource(Struct, kw_only=True):
    """The parts of a tokenizer. `definition` is the content of tokenizer.json."""

    definition: dict[str, Any]
    named: dict[str, str] = field(default_factory=dict)
    """Texts of tokens by the names that templates use, such as `eos_token`."""
    templates: dict[str, str] = field(default_factory=dict)
    end_ids: frozenset[int] = frozenset()
    """Ids at which generation ends, according to the model's files."""
    add_bos: bool | None = None
    """Whether a text begins with BOS; None if the files do not state it."""
    longest: int | None = None
    """Maximum tokens that the tokenizer states for the model; many state none."""


def source_of(tokenizer: Any) -> TokenizerSource:
    """Read a `transformers` tokenizer, a `tokenizers.Tokenizer`, or the path of a folder or
    tokenizer.json.
    """
    if isinstance(tokenizer, str | Path):
        return _from_path(Path(tokenizer).expanduser())
    if hasattr(tokenizer, "to_str"):
        return TokenizerSource(definition=msgspec.json.decode(tokenizer.to_str()))
    return _from_transformers(tokenizer)


def _from_transformers(tokenizer: Any) -> TokenizerSource:
    backend = getattr(tokenizer, "backend_tokenizer", None) or _convert(tokenizer)
    known = getattr(tokenizer, "special_tokens_map", {})
    templates = getattr(tokenizer, "chat_template", None)
    folder = Path(getattr(tokenizer, "name_or_path", "") or ".")
    return TokenizerSource(
        definition=msgspec.json.decode(backend.to_str()),
        named={name: str(text) for name, text in known.items() if not isinstance(text, list | tuple)},
        templates=_templates(templates),
        end_ids=_end_ids(folder) if str(folder) != "." else frozenset(),
        longest=_sensible(getattr(tokenizer, "model_max_length", None)),
    )


def _convert(tokenizer: Any) -> Any:
    """Convert a tokenizer written in Python, which has no table; transformers can convert most of them."""
    from transformers.convert_slow_tokenizer import convert_slow_tokenizer

    try:
        return convert_slow_tokenizer(tokenizer)
    except Exception as error:
        kind = type(tokenizer).__name__
        raise ModelFileError(
            f"The tokenizer {kind} has no fast version; save it as tokenizer.json and pass that folder."
        ) from error


def _from_path(path: Path) -> TokenizerSource:
    folder, file = (path, path / "tokenizer.json") if path.is_dir() else (path.parent, path)
    config = _read(folder / "tokenizer_config.json")
    return TokenizerSource(
        definition=_require(file),
        named=_find_named(_read(folder / "special_tokens_map.json")) | _find_named(config),
        templates=_templates(config.get("chat_template")) | _template_files(folder),
        end_ids=_end_ids(folder),
        add_bos=config.get("add_bos_token"),
        longest=_sensible(config.get("model_max_length")),
    )


def _require(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise ModelFileError(f"{file} does not exist; a folder with tokenizer.json is needed.")
    definition = _read(file)
    if not isinstance(definition.get("model"), dict):
        raise ModelFileError(f"{file} is not a valid tokenizer definition.")
    return definition


def _read(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if the file does not exist."""
    try:
        result = msgspec.json.decode(file.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ModelFileError(f"{file} cannot be read: {error.strerror}.") from error
    except msgspec.DecodeError as error:
        raise ModelFileError(f"{file} is not valid JSON.") from error
    if not isinstance(result, dict):
        raise ModelFileError(f"{file} does not hold a JSON object.")
    return result


def _find_named(config: Mapping[str, Any]) -> dict[str, str]:
    """Return `eos_token` and the like, whose values are texts or objects with a text."""
    extra = config.get("extra_special_tokens")
    entries = {**(extra if isinstance(extra, dict) else {}), **config}
    mapping = {}
    for name, value in entries.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            mapping[name] = text
    return mapping


def _templates(value: Any) -> dict[str, str]:
    """Return templates by name: the value may be one template, a dict of several, or a list."""
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, dict):
        return {str(name): text for name, text in value.items() if isinstance(text, str)}
    if isinstance(value, list):
        return {each["name"]: each["template"] for each in value if {"name", "template"} <= each.keys()}
    return {}


def _template_files(folder: Path) -> dict[str, str]:
    """Read templates from their own files, which override the older ones in the configuration."""
    older = _templates(_read(folder / "chat_template.json").get("chat_template"))
    files = {"default": folder / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    return older | {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()}


def _end_ids(folder: Path) -> frozenset[int]:
    numbers: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        value = _read(folder / name).get("eos_token_id")
        numbers.update(value if isinstance(value, list) else [value] if isinstance(value, int) else [])
    return frozenset(numbers)


def vocabulary_in(folder: Path) -> int | None:
    """Return the number of logits of the model in a folder, if its files state it."""
    size = _read(folder / "config.json").get("vocab_size")
    return size if isinstance(size, int) else None


def _sensible(length: Any) -> int | None:
    """Return a plausible length, else None: transformers writes "no limit" as a number with thirty digits."""
    return length if isinstance(length, int) and 0 < length < 1 << 40 else None


# The recommended sampling of a model, where its authors give one.
#
# The names are those of `Sampling`. Values that are not numbers, or beyond what a request may ask for, are
# ignored: a file with a strange value can still be served.


LLAMA_CPP: Mapping[str, float] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
"""Defaults of llama.cpp's server."""
_GGUF = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
_RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_k": (0, 2**31 - 1),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "typical_p": (0, 1),
    "repetition_penalty": (1e-3, 10),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
}


def in_gguf(metadata: Mapping[str, str]) -> dict[str, float]:
    """Read the sampling defaults in a GGUF file's metadata.

    >>> in_gguf({"general.sampling.temp": "0.6", "general.name": "a"})
    {'temperature': 0.6}
    """
    return sensible({name: _number(metadata.get(key)) for key, name in _GGUF.items()})


def in_folder(folder: Path) -> dict[str, float]:
    """Read the sampling defaults in generation_config.json."""
    try:
        config = msgspec.json.decode((folder / "generation_config.json").read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError):
        return {}
    return sensible(config)


def sensible(config: Mapping[str, Any]) -> dict[str, float]:
    """Select the valid sampling defaults from a configuration."""
    fields: dict[str, float] = {}
    for name, (least, most) in _RANGES.items():
        value = config.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most:
            fields[name] = int(value) if name == "top_k" else float(value)
    return fields


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


# Identification of a file without reading gigabytes: by its size and by samples spread over it.


_SAMPLES, _SAMPLE = 64, 1 << 14


def digest_samples(path: Path) -> bytes:
    """Digest a file, or all files of a folder."""
    result = blake2b(digest_size=16)
    if path.is_dir():
        for file in sorted(file for file in path.rglob("*") if file.is_file()):
            result.update(str(file.relative_to(path)).encode() + digest_samples(file))
        return result.digest()
    with path.open("rb") as data:
        size = os.fstat(data.fileno()).st_size
        result.update(str(size).encode())
        for number in range(_SAMPLES):
            data.seek(max(0, size - _SAMPLE) * number // (_SAMPLES - 1))
            result.update(data.read(_SAMPLE))
    return result.digest()
