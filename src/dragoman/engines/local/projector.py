"""The projector: the second GGUF file of a model that takes images or audio, through llama.cpp's mtmd.

An image is represented in a prompt by chunks: ids that the model expects around it (`<|vision_start|>`), and
rows that are vectors instead of ids, which the projector computes from the image. Some models get an image as
several tiles, each a chunk of its own, with ids between them.

In most models rows count as ids do. Those with positions of several dimensions (M-RoPE, as in Qwen-VL) give
all rows of an image one point in time, and a height and a width in it; the text after it continues from
there, so an image with 1,000 rows may take no more than 40 positions.
"""

import ctypes
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from dragoman.engines.local.binding import InputPart, InputText, Library
from dragoman.engines.local.gguf_model import LlamaModel, check_file, why_not_loaded
from dragoman.engines.sampling import Ids
from dragoman.errors import BadRequest, BindingError, EngineFailed, ModelFileError
from dragoman.media import MediaKind

_TEXT, _IMAGE = 0, 1
_DIMENSIONS = 4
_LARGE = ((4096, 4096), (8192, 1024), (1024, 8192))
"""Image sizes that give as many rows as any image can."""


class IdleOpenMPTeam:
    """An idle second OpenMP team: `with team:` while something else computes on these cores, which makes
    steps suffer less.

    Threads of GNU's OpenMP wait for each other at hundreds of barriers in a step, and spin for that. If
    another process takes a core, the system may put two of them on the remaining one, where each keeps the
    other from reaching the barrier: 20 ms become 600. They sleep instead of spinning while OpenMP has more
    threads than there are cores. So a second team exists meanwhile, which does nothing.
    """

    def __init__(self, library: Library, threads: int) -> None:
        self._parallel = library.parallel if threads > 1 else None
        self._lock = threading.Lock()
        self._inside = 0
        self._over = threading.Event()

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside == 1 and self._parallel is not None:
                self._over = threading.Event()
                stand = partial(self._stand_by, self._parallel, self._over)
                threading.Thread(target=stand, name="dragoman-see", daemon=True).start()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._over.set()

    @staticmethod
    def _stand_by(parallel: Callable[..., None], over: threading.Event) -> None:
        # Its function is `free(NULL)`, which does nothing; the team exists until this thread ends.
        parallel(ctypes.CDLL(None).free, None, 2, 0)
        over.wait()


class MediaChunk(Struct, frozen=True):
    """A chunk of what represents an image or audio in a prompt, in order."""

    ids: tuple[int, ...]
    """The ids of a chunk of ids; empty for rows."""
    rows: int
    moves: int
    """Positions that it takes."""
    whole: bool = False
    """Whether its rows attend to each other, so that they have to be computed in one batch."""

    @property
    def is_shown(self) -> bool:
        """Whether it has the media's rows, not ids around them."""
        return not self.ids


class EncodedChunk(Struct, frozen=True):
    """The rows of one chunk, and their positions."""

    rows: NDArray[np.float32]
    first: Ids | None = None
    """With several dimensions: the positions of each row in all of them, in the library's order, if the
    chunk begins at 0.
    """
    moved: Ids | None = None
    """Increase of each of these positions if the chunk begins at 1."""

    def positions(self, begin: int, start: int, end: int) -> Ids | None:
        """Return the positions of the rows from `start` to `end`, if the chunk begins at `begin`."""
        if self.first is None or self.moved is None:
            return None
        array: Ids = self.first[:, start:end] + begin * self.moved[:, start:end]
        return array


class DecodedMedia(Struct, frozen=True):
    """An image as RGB, or audio as samples at the projector's rate; without data it can only be measured."""

    kind: MediaKind
    width: int = 0
    """For audio, the number of samples."""
    height: int = 0
    data: bytes | memoryview | None = None
    """One byte per color; 32-bit floats for audio."""

    @property
    def bytes(self) -> int:
        return len(self.data or b"")


class Projector:
    """The projector's model. `measure` is for any thread, `encode` for one thread at a time."""

    def __init__(self, path: Path, model: LlamaModel, *, threads: int, gpu: bool) -> None:
        check_file(path)
        self._model = model
        self._library = library = model.library
        library.load_media()
        library.errors.clear()
        params = library.mtmd_context_params_default()
        params.use_gpu, params.print_timings, params.warmup, params.n_threads = gpu, False, False, threads
        self._pointer = library.mtmd_init_from_file(str(path).encode(), model.pointer, params)
        if not self._pointer:
            raise ModelFileError(
                f"{why_not_loaded(path, list(library.errors)).rstrip('.')}. Check that it belongs to "
                f"{model.path.name}, or use `--no-mmproj`."
            )
        self._free = weakref.finalize(self, library.mtmd_free, self._pointer)
        self._free.atexit = False
        self._check_text()
        self.team = IdleOpenMPTeam(library, threads)
        self.path = path
        self.bytes = path.stat().st_size
        self.width = int(library.model_n_embd_inp(model.pointer))
        self.has_dimensions: bool = library.mtmd_decode_use_mrope(self._pointer)
        """Whether positions have several dimensions."""
        self.rate = int(library.mtmd_get_audio_sample_rate(self._pointer))
        """Sample rate of audio."""
        senses: tuple[tuple[MediaKind, bool], ...] = (
            ("image", library.mtmd_support_vision(self._pointer)),
            ("audio", library.mtmd_support_audio(self._pointer)),
        )
        self.modalities: frozenset[MediaKind] = frozenset(kind for kind, has in senses if has)
        self.most_whole = self._measure_whole()

    def close(self) -> None:
        self._free()

    def measure(self, decoded: DecodedMedia) -> list[MediaChunk]:
        """Return the chunks that represent a medium in a prompt. Raises BadRequest if the model cannot
        take it.
        """
        empty = DecodedMedia(decoded.kind, decoded.width, decoded.height)
        with self._tokenized(empty) as chunks:
            return [self._describe(chunk) for chunk in chunks]

    def encode(self, decoded: DecodedMedia) -> list[EncodedChunk]:
        """Encode all chunks that have rows. Slow, and cannot be interrupted."""
        library = self._library
        encoded_chunks = []
        with self._tokenized(decoded) as chunks:
            for chunk in chunks:
                kind = library.mtmd_input_chunk_get_type(chunk)
                if kind == _TEXT:
                    continue
                if library.mtmd_encode_chunk(self._pointer, chunk):
                    raise EngineFailed("The model failed to encode this image or audio.")
                encoded_chunks.append(self._take(chunk, kind == _IMAGE))
        return encoded_chunks

    def _take(self, chunk: int, is_image: bool) -> EncodedChunk:
        count = int(self._library.mtmd_input_chunk_get_n_tokens(chunk))
        address = self._library.mtmd_get_output_embd(self._pointer)
        flat = (ctypes.c_float * (count * self.width)).from_address(address)
        rows = np.ctypeslib.as_array(flat).reshape(count, self.width).copy()
        if not self.has_dimensions:
            return EncodedChunk(rows)
        first, second = (self._positions(chunk, count, is_image, begin) for begin in (0, 1))
        return EncodedChunk(rows, first, second - first)

    def _positions(self, chunk: int, count: int, is_image: bool, begin: int) -> Ids:
        if not is_image:
            return np.tile(np.arange(begin, begin + count, dtype=np.int32), (_DIMENSIONS, 1))
        # The helper writes time, x, y and a fourth number of each row. Batches take time, y, x of all rows.
        array: Ids = np.zeros((count, _DIMENSIONS), np.int32)
        tokens = self._library.mtmd_input_chunk_get_tokens_image(chunk)
        self._library.mtmd_helper_image_get_decoder_pos(tokens, begin, array.ctypes.data)
        return np.ascontiguousarray(array[:, (0, 2, 1, 3)].T)

    def _describe(self, chunk: int) -> MediaChunk:
        library = self._library
        moves = int(library.mtmd_input_chunk_get_n_pos(chunk))
        if library.mtmd_input_chunk_get_type(chunk) == _TEXT:
            ids = self._ids(chunk)
            return MediaChunk(ids, len(ids), moves)
        rows = int(library.mtmd_input_chunk_get_n_tokens(chunk))
        return MediaChunk((), rows, moves, library.mtmd_decode_use_non_causal(self._pointer, chunk))

    def _ids(self, chunk: int) -> tuple[int, ...]:
        count = ctypes.c_size_t()
        result = self._library.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(count))
        return tuple(result[: count.value])

    @contextmanager
    def _tokenized(self, shown: DecodedMedia | bytes) -> Iterator[Sequence[int]]:
        """Yield the library's chunks of a medium; or of a text, to check the layout of its struct."""
        library = self._library
        bitmap = None if isinstance(shown, bytes) else self._bitmap(shown)
        part = InputPart(bitmap=bitmap)
        if isinstance(shown, bytes):
            part.text = ctypes.pointer(InputText(shown, len(shown), False, False))
        chunks = library.mtmd_input_chunks_init()
        try:
            parts = (ctypes.POINTER(InputPart) * 1)(ctypes.pointer(part))
            if library.mtmd_tokenize_from_parts(self._pointer, chunks, parts, 1, False):
                raise BadRequest("The model cannot take this image or audio.", code="unsupported_content")
            count = library.mtmd_input_chunks_size(chunks)
            yield [library.mtmd_input_chunks_get(chunks, number) for number in range(count)]
        finally:
            library.mtmd_input_chunks_free(chunks)
            if bitmap is not None:
                library.mtmd_bitmap_free(bitmap)

    def _bitmap(self, shown: DecodedMedia) -> int:
        data = shown.data if shown.data is None else np.frombuffer(shown.data, np.uint8).ctypes.data
        if shown.kind == "audio":
            result = self._library.mtmd_bitmap_init_from_audio(shown.width, data)
        else:
            result = self._library.mtmd_bitmap_init(shown.width, shown.height, data)
        return int(result)

    def _check_text(self) -> None:
        """Check the layout of the struct for texts by tokenizing one: no function returns the struct
        itself.
        """
        text = b"a b\0c"
        room = (ctypes.c_int32 * 64)()
        vocab = self._library.model_get_vocab(self._model.pointer)
        count = self._library.tokenize(vocab, text, len(text), room, len(room), False, False)
        with self._tokenized(text) as chunks:
            if [id_ for chunk in chunks for id_ in self._ids(chunk)] != room[:count]:
                raise BindingError(
                    "The installed xllamacpp has a different layout of mtmd's struct for texts."
                )

    def _measure_whole(self) -> int:
        """Return the rows of the largest chunk that has to be computed in one batch."""
        if "image" not in self.modalities or not self._library.mtmd_decode_use_non_causal(
            self._pointer, None
        ):
            return 0
        sizes = (self.measure(DecodedMedia("image", width, height)) for width, height in _LARGE)
        return max(part.rows for parts in sizes for part in parts if part.whole)
