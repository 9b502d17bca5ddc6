"""A GGUF file, opened: its weights, its metadata, its adapters."""

import ctypes
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from dragoman.engines.local import binding
from dragoman.engines.local.gguf import check_header
from dragoman.errors import ModelFileError

_MAGIC = b"GGUF"
_TEMPLATE = "tokenizer.chat_template"
_NAMED = {
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
    "sep_token": "tokenizer.ggml.seperator_token_id",
    "cls_token": "tokenizer.ggml.cls_token_id",
    "mask_token": "tokenizer.ggml.mask_token_id",
}
_TRUNCATED = ("file bounds", "corrupted or incomplete", "failed to read", "reached end")


class Model:
    """Weights on loan from the native library."""

    def __init__(self, path: Path, *, vocabulary_only: bool = False) -> None:
        self.path = path
        check_file(path)
        self.library = binding.load()
        self.library.errors.clear()
        params = self.library.model_default_params()
        params.vocab_only = vocabulary_only
        self.pointer = self.library.model_load_from_file(str(path).encode(), params)
        if not self.pointer:
            raise ModelFileError(why_not_loaded(path, list(self.library.errors)))
        # Freed with the last one who uses it; not at exit, where a context may still be at work.
        weakref.finalize(self, self.library.model_free, self.pointer).atexit = False
        self.metadata = self._metadata()
        self.adapters: dict[str, int] = {}
        if self.library.model_has_encoder(self.pointer):
            raise ModelFileError(f"{path.name} is an encoder model; the embedded engine runs decoders only.")

    def load_adapters(self, files: Mapping[str, str]) -> None:
        for name, file in files.items():
            path = Path(file).expanduser()
            check_file(path)
            pointer = self.library.adapter_lora_init(self.pointer, str(path).encode())
            if not pointer:
                raise ModelFileError(f"Adapter {name!r}: {why_not_loaded(path, list(self.library.errors))}")
            self.adapters[name] = pointer

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def trained_context(self) -> int:
        return self._measure("context_length", 0)

    @property
    def width(self) -> int:
        """Numbers in a hidden state."""
        return self._measure("embedding_length", 0)

    @property
    def rewinds(self) -> bool:
        """Whether the memory of a sequence can be cut back; the state of recurrent layers cannot."""
        return not (
            self.library.model_is_recurrent(self.pointer) or self.library.model_is_hybrid(self.pointer)
        )

    @property
    def token_bytes(self) -> int:
        """Bytes of key-value memory per token, at two bytes a number."""
        heads = max(1, self.library.model_n_head(self.pointer))
        kv_heads = max(1, self.library.model_n_head_kv(self.pointer))
        default = self.library.model_n_embd(self.pointer) // heads
        key = self._measure("attention.key_length", default)
        value = self._measure("attention.value_length", default)
        layers: int = self.library.model_n_layer(self.pointer)
        return layers * int(kv_heads) * (key + value) * 2

    @property
    def templates(self) -> dict[str, str]:
        """The chat templates in the file; the unnamed one is called "default"."""
        found = {}
        for key, text in self.metadata.items():
            if key == _TEMPLATE:
                found["default"] = text
            elif key.startswith(_TEMPLATE + "."):
                found[key.removeprefix(_TEMPLATE + ".")] = text
        return found

    @property
    def named_ids(self) -> dict[str, int]:
        """The tokens that chat templates know by name, as far as the file has them."""
        values = {
            name: _text(partial(self.library.model_meta_val_str, self.pointer, key.encode()))
            for name, key in _NAMED.items()
        }
        return {name: int(value) for name, value in values.items() if value.isdigit()}

    @property
    def details(self) -> dict[str, str]:
        buffer = ctypes.create_string_buffer(256)
        self.library.model_desc(self.pointer, buffer, len(buffer))
        return {
            "name": self.metadata.get("general.name", self.path.stem),
            "architecture": self.metadata.get("general.architecture", "unknown"),
            "description": buffer.value.decode(errors="replace"),
            "parameters": str(self.library.model_n_params(self.pointer)),
            "bytes": str(self.library.model_size(self.pointer)),
            "trained_context": str(self.trained_context),
        }

    def _measure(self, key: str, default: int) -> int:
        """A number of the file's architecture. The metadata is there even without the weights."""
        architecture = self.metadata.get("general.architecture", "")
        return int(self.metadata.get(f"{architecture}.{key}", default))

    def _metadata(self) -> dict[str, str]:
        """The metadata as text, but for the vocabulary, which has functions of its own."""
        library, model = self.library, self.pointer
        found = {}
        for index in range(library.model_meta_count(model)):
            key = _text(partial(library.model_meta_key_by_index, model, index))
            if not key.startswith("tokenizer.ggml."):
                found[key] = _text(partial(library.model_meta_val_str, model, key.encode()))
        return found


def _text(fill: Callable[[ctypes.Array[ctypes.c_char], int], int]) -> str:
    """The text that a C function writes; it answers how long the text is, whether or not it fitted."""
    buffer = ctypes.create_string_buffer(256)
    length = fill(buffer, len(buffer))
    if length >= len(buffer):
        buffer = ctypes.create_string_buffer(length + 1)
        fill(buffer, len(buffer))
    return buffer.value.decode(errors="replace")


def check_file(path: Path) -> None:
    """Say what is wrong with a file before the native library meets it."""
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except FileNotFoundError:
        raise ModelFileError(f"There is no file {path}.") from None
    except IsADirectoryError:
        raise ModelFileError(f"{path} is a folder; a GGUF file is needed.") from None
    except OSError:
        raise ModelFileError(f"{path} cannot be read; are its permissions right?") from None
    if magic != _MAGIC:
        raise ModelFileError(f"{path} is not a GGUF file.")
    check_header(path)


def why_not_loaded(path: Path, lines: list[str]) -> str:
    """Put the native library's last words into a sentence."""
    text = "\n".join(lines)
    if "unknown model architecture" in text:
        architecture = text.split("unknown model architecture:")[-1].split("\n")[0].strip()
        return f"{path.name} has the architecture {architecture}, which this build of llama.cpp cannot run."
    if any(sign in text for sign in _TRUNCATED):
        return f"{path.name} is damaged or was not downloaded to its end."
    last = lines[-1].split(": ", 1)[-1] if lines else "the native library gave no reason"
    return f"{path.name} cannot be loaded: {last}"
