"""GGUF files: the checked header, then weights, metadata, adapters and vocabulary."""

import ctypes
import math
import mmap
import struct
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from dragoman.engines.lifecycle import report_progress
from dragoman.engines.local import binding
from dragoman.errors import ModelFileError
from dragoman.hub.names import SPLIT

# The header is parsed here before the native library does: nothing in it may point outside the file. The
# library trusts much of what it reads, and impossible counts and lengths are how parsers get exploited. Only
# what is impossible is refused here: whether a model can be run is for the library to decide.


_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of the value types except strings and arrays."""
_UINT32, _TEXT, _LIST = 4, 8, 9
_READ_VERSIONS = (2, 3)
_MOST_DIMENSIONS = 4
_LONGEST_NAME = 63
_SMALLEST_TENSOR = 8 + 4 + 8 + 4 + 8
_SMALLEST_VALUE = 8 + 4 + 1


class _InvalidHeader(Exception):
    """The reason, as the end of a sentence about the file."""


class GgufTensor(Struct, frozen=True):
    """A tensor of the file, as described in the header."""

    name: str
    shape: tuple[int, ...]
    """Dimensions; rows come last."""
    kind: int
    start: int
    """Offset of its data in the file."""


def read_header(path: Path) -> list[GgufTensor]:
    """Read the tensors of a non-empty file. Raises ModelFileError if its header is impossible."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return _Header(data, len(data)).check()
        except _InvalidHeader as wrong:
            message = f"{path.name} is damaged or incompletely downloaded: {wrong}."
            raise ModelFileError(message) from None


class _Header:
    def __init__(self, data: mmap.mmap, size: int) -> None:
        self._data = data
        self._size = size
        self._at = 4
        self._alignment = 32

    def check(self) -> list[GgufTensor]:
        version = self._number("<I")
        if version not in _READ_VERSIONS:
            # Older versions have shorter lengths, and the library refuses them by name.
            return []
        tensors, values = self._number("<Q"), self._number("<Q")
        self._fits(values, _SMALLEST_VALUE, "metadata")
        for _ in range(values):
            self._value()
        self._fits(tensors, _SMALLEST_TENSOR, "tensors")
        gguf_tensors = [self._tensor() for _ in range(tensors)]
        begin = -(-self._at // self._alignment) * self._alignment
        if any(each.start % self._alignment or begin + each.start > self._size for each in gguf_tensors):
            raise _InvalidHeader("a tensor has an impossible offset")
        return [replace(each, start=begin + each.start) for each in gguf_tensors]

    def _value(self) -> None:
        key = self._text()
        kind = self._number("<I")
        if key == b"general.alignment" and kind == _UINT32:
            self._alignment = self._number("<I")
            if self._alignment == 0 or self._alignment & (self._alignment - 1):
                raise _InvalidHeader("its alignment is not a power of two")
        elif kind == _TEXT:
            self._skip_texts(1)
        elif kind == _LIST:
            self._list()
        else:
            self._skip(self._size_of(kind))

    def _list(self) -> None:
        kind, count = self._number("<I"), self._number("<Q")
        if kind == _TEXT:
            self._fits(count, 8, "texts in a list")
            self._skip_texts(count)
        else:
            self._skip(self._size_of(kind) * count)

    def _tensor(self) -> GgufTensor:
        """Read a tensor's description; its offset is relative to the end of the header."""
        name = self._text()
        if len(name) > _LONGEST_NAME:
            raise _InvalidHeader("the name of a tensor is too long")
        dimensions = self._number("<I")
        if dimensions > _MOST_DIMENSIONS:
            raise _InvalidHeader("a tensor has more than four dimensions")
        shape = tuple(self._number("<Q") for _ in range(dimensions))
        if not 0 < math.prod(shape) < 2**63:
            raise _InvalidHeader("a tensor has an impossible size")
        kind = self._number("<I")
        return GgufTensor(name.decode(errors="replace"), shape, kind, self._number("<Q"))

    def _size_of(self, kind: int) -> int:
        if kind not in _SIZES:
            raise _InvalidHeader("a metadata value has an unknown type")
        return _SIZES[kind]

    def _fits(self, count: int, least: int, what: str) -> None:
        """Check that `count` items can fit in the rest of the file, before a loop over them."""
        if count > (self._size - self._at) // least:
            raise _InvalidHeader(f"it is too short for its number of {what}")

    def _number(self, form: str) -> int:
        at = self._at
        self._skip(struct.calcsize(form))
        number: int = struct.unpack_from(form, self._data, at)[0]
        return number

    def _text(self) -> bytes:
        length = self._number("<Q")
        at = self._at
        self._skip(length)
        return self._data[at : at + min(length, 256)]

    def _skip_texts(self, count: int) -> None:
        # A vocabulary has hundreds of thousands of strings, hence no call for each.
        at, size, data, unpack = self._at, self._size - 8, self._data, struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at > size:
                raise _InvalidHeader("it ends within its header")
            at += 8 + unpack(data, at)[0]
        self._at = at
        self._skip(0)

    def _skip(self, length: int) -> None:
        self._at += length
        if self._at > self._size:
            raise _InvalidHeader("it ends within its header")


# The opened file.


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


_Progress = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_float, ctypes.c_void_p)


def _told_progress() -> "ctypes._FuncPointer | None":
    """Create the progress callback for the library, if progress is wanted; its result True continues the
    load.
    """
    report = report_progress.get()

    def tell(done: float, _: object) -> bool:
        if report is not None:
            report(done)
        return True

    return None if report is None else _Progress(tell)


_IN_MEMORY = 0
"""`LLAMA_LOAD_MODE_NONE`: read, not mapped."""


class LlamaModel:
    """A model loaded by the native library."""

    def __init__(
        self,
        path: Path,
        *,
        vocabulary_only: bool = False,
        gpu_layers: int | None = None,
        mapped: bool = True,
    ) -> None:
        """`mapped`: weights used as they are in the file stay in the system's file cache, which can evict
        them. Weights that the library reorders then exist twice, and there are no large pages.
        """
        self.path = path
        self.parts = list_parts(path)
        self.kinds = {tensor.kind for part in self.parts for tensor in check_file(part)}
        """Types of the weights, in the library's numbering."""
        self.library = binding.load()
        self.library.errors.clear()
        params = self.library.model_default_params()
        params.vocab_only = vocabulary_only
        if not mapped:
            params.load_mode = _IN_MEMORY
        if gpu_layers is not None:
            params.n_gpu_layers = gpu_layers
        value = None if vocabulary_only else _told_progress()
        params.progress_callback = value and ctypes.cast(value, ctypes.c_void_p)
        self.pointer = self.library.model_load_from_file(str(path).encode(), params)
        if not self.pointer:
            raise ModelFileError(why_not_loaded(path, list(self.library.errors)))
        # Freed with the last reference; not at exit, when a context may still be computing.
        weakref.finalize(self, self.library.model_free, self.pointer).atexit = False
        self.metadata = self._metadata()
        self.adapters: dict[str, int] = {}
        if self.library.model_has_encoder(self.pointer):
            raise ModelFileError(
                f"{path.name} is an encoder model; the embedded engine runs only decoder models."
            )

    def load_adapters(self, files: Mapping[str, str]) -> None:
        for name, file in files.items():
            self.adapters[name] = self.read_adapter(name, Path(file).expanduser())

    def read_adapter(self, name: str, path: Path) -> int:
        """Load an adapter; return the library's pointer, for `adapters`."""
        check_file(path)
        pointer: int | None = self.library.adapter_lora_init(self.pointer, str(path).encode())
        if not pointer:
            raise ModelFileError(f"Adapter {name!r}: {why_not_loaded(path, list(self.library.errors))}")
        return pointer

    @property
    def name(self) -> str:
        return SPLIT.sub("", self.path.name).removesuffix(self.path.suffix)

    @property
    def trained_context(self) -> int:
        return self._measure("context_length", 0)

    @property
    def width(self) -> int:
        """Length of a hidden state."""
        return self._measure("embedding_length", 0)

    @property
    def mixes(self) -> bool:
        """Whether it is a mixture of experts."""
        return int(self.metadata.get(f"{self.metadata['general.architecture']}.expert_count", 0)) > 0

    @property
    def rewinds(self) -> bool:
        """Whether a sequence's KV cache can be truncated; the state of recurrent layers cannot."""
        return not (
            self.library.model_is_recurrent(self.pointer) or self.library.model_is_hybrid(self.pointer)
        )

    @property
    def token_bytes(self) -> int:
        """Bytes of KV cache per token, at two bytes per number."""
        kv_heads = max(1, self.library.model_n_head_kv(self.pointer))
        value = self._measure("attention.value_length", self._usual_head)
        layers: int = self.library.model_n_layer(self.pointer)
        return layers * int(kv_heads) * (self.key_length + value) * 2

    @property
    def key_length(self) -> int:
        """Length of a key of one head."""
        return self._measure("attention.key_length", self._usual_head)

    @property
    def _usual_head(self) -> int:
        return int(self.library.model_n_embd(self.pointer)) // max(
            1, int(self.library.model_n_head(self.pointer))
        )

    @property
    def templates(self) -> dict[str, str]:
        """Chat templates in the file; the unnamed one is called "default"."""
        fields = {}
        for key, text in self.metadata.items():
            if key == _TEMPLATE:
                fields["default"] = text
            elif key.startswith(_TEMPLATE + "."):
                fields[key.removeprefix(_TEMPLATE + ".")] = text
        return fields

    @property
    def named_ids(self) -> dict[str, int]:
        """Ids of the tokens that chat templates know by name, as far as the file has them."""
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
        """Return a number of the file's architecture; the largest if layers differ.

        The metadata is read even without the weights, so the library has not checked it yet.
        """
        text = self.metadata.get(f"{self.metadata.get('general.architecture', '')}.{key}", str(default))
        try:
            return max(int(number) for number in text.strip("[]").split(","))
        except ValueError:
            raise ModelFileError(f"{self.path.name} is damaged: its {key} is not an integer.") from None

    def _metadata(self) -> dict[str, str]:
        """Read the metadata as text, except the vocabulary, which has its own functions."""
        library, model = self.library, self.pointer
        fields = {}
        for index in range(library.model_meta_count(model)):
            key = _text(partial(library.model_meta_key_by_index, model, index))
            if not key.startswith("tokenizer.ggml."):
                fields[key] = _text(partial(library.model_meta_val_str, model, key.encode()))
        return fields


def _text(fill: Callable[[ctypes.Array[ctypes.c_char], int], int]) -> str:
    """Return the text that a C function writes; the function returns its full length, whether or not it
    fitted.
    """
    buffer = ctypes.create_string_buffer(256)
    length = fill(buffer, len(buffer))
    if length >= len(buffer):
        buffer = ctypes.create_string_buffer(length + 1)
        fill(buffer, len(buffer))
    return buffer.value.decode(errors="replace")


def list_parts(path: Path) -> list[Path]:
    """List all files of a split model, given the first; the library opens the others itself."""
    match = SPLIT.search(path.name)
    if match is None:
        return [path]
    if int(match[1]) != 1:
        raise ModelFileError(f"{path.name} is one part of a model; pass the first, {_part(path, 1).name}.")
    return [_part(path, number) for number in range(1, int(match[2]) + 1)]


def _part(path: Path, number: int) -> Path:
    return path.with_name(SPLIT.sub(lambda match: f"-{number:05}-of-{match[2]}", path.name))


def check_file(path: Path) -> list[GgufTensor]:
    """Check a file before the native library opens it; return its tensors."""
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except FileNotFoundError:
        raise ModelFileError(f"There is no file {path}.") from None
    except IsADirectoryError:
        raise ModelFileError(f"{path} is a folder; a GGUF file is needed.") from None
    except OSError:
        raise ModelFileError(f"{path} cannot be read; check its permissions.") from None
    if magic != _MAGIC:
        raise ModelFileError(f"{path} is not a GGUF file.")
    return read_header(path)


def why_not_loaded(path: Path, lines: list[str]) -> str:
    """Convert the native library's last messages to a sentence."""
    text = "\n".join(lines)
    if "unknown model architecture" in text:
        architecture = text.split("unknown model architecture:")[-1].split("\n")[0].strip()
        return f"{path.name} has the architecture {architecture}, which this llama.cpp does not support."
    if any(sign in text for sign in _TRUNCATED):
        return f"{path.name} is damaged or incompletely downloaded."
    last = lines[-1].split(": ", 1)[-1] if lines else "the native library gave no reason"
    return f"{path.name} cannot be loaded: {last}"


# The vocabulary as a Tokenizer.


_UNKNOWN, _CONTROL = 1 << 0, 1 << 3
PIECE = 64 * 1024


class LlamaTokenizer:
    """Tokenizer over the model's vocabulary."""

    def __init__(self, model: LlamaModel) -> None:
        # Also keeps the model alive, which the vocabulary is part of.
        self._model = model
        library = self._library = model.library
        vocab = self._vocab = library.model_get_vocab(model.pointer)
        size = library.vocab_n_tokens(vocab)
        self.pieces: list[bytes] = [self._piece(token) for token in range(size)]
        self.special_ids: dict[str, int] = {
            self.pieces[token].decode(errors="replace"): token
            for token in range(size)
            if library.vocab_get_attr(vocab, token) & (_UNKNOWN | _CONTROL)
        }
        self.bos_id = _present(library.vocab_bos(vocab))
        self.eos_id = _present(library.vocab_eos(vocab))
        self.end_ids = frozenset(token for token in range(size) if library.vocab_is_eog(vocab, token))
        self.add_bos: bool = library.vocab_get_add_bos(vocab)
        self.infill = self._infill()

    def encode(self, text: str) -> list[int]:
        """Encode `text` as plain text: "<|im_end|>" gives the ids of its characters."""
        data = text.encode()
        # A text has at most as many tokens as bytes, except that some tokenizers add a space in front.
        room = len(data) + 8
        ids = (ctypes.c_int32 * room)()
        count = self._library.tokenize(self._vocab, data, len(data), ids, room, False, False)
        if count < 0:
            room = -count
            ids = (ctypes.c_int32 * room)()
            count = self._library.tokenize(self._vocab, data, len(data), ids, room, False, False)
        numbers: list[int] = []
        for at in range(0, count, PIECE):
            # In chunks: one long call would hold the GIL.
            numbers += ids[at : min(at + PIECE, count)]
        return numbers

    def texts(self, ids: Mapping[str, int]) -> dict[str, str]:
        """Return named tokens as text: `{"pad_token": 2}` gives `{"pad_token": "<|im_end|>"}`."""
        return {
            name: self.pieces[token].decode(errors="replace")
            for name, token in ids.items()
            if token < len(self.pieces)
        }

    def _piece(self, token: int) -> bytes:
        buffer = ctypes.create_string_buffer(64)
        length = self._library.token_to_piece(self._vocab, token, buffer, len(buffer), 0, True)
        if length < 0:
            buffer = ctypes.create_string_buffer(-length)
            length = self._library.token_to_piece(self._vocab, token, buffer, len(buffer), 0, True)
        return buffer.raw[:length]

    def _infill(self) -> tuple[int, int, int] | None:
        library, vocab = self._library, self._vocab
        prefix = _present(library.vocab_fim_pre(vocab))
        suffix = _present(library.vocab_fim_suf(vocab))
        middle = _present(library.vocab_fim_mid(vocab))
        if prefix is None or suffix is None or middle is None:
            return None
        return prefix, suffix, middle


def _present(token: int) -> int | None:
    return token if token >= 0 else None
