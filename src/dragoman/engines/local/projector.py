"""A projector: the second GGUF file of a model that sees or hears, over llama.cpp's mtmd.

A picture stands in a prompt as parts: ids that the model wants around it (`<|vision_start|>`), and rows that
are no ids but vectors, which the projector makes of the picture. Some models get a picture as several tiles,
each a part of its own, with ids between them.

Most models count rows as they count ids. Those with positions of several dimensions (M-RoPE, as Qwen-VL has
them) give all rows of a picture one point in time, and a height and a width in it; what comes behind goes on
from there, so a picture with 1,000 rows may take no more than 40 positions.
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

from dragoman.engines.choosing import Ids
from dragoman.engines.local.binding import InputPart, InputText, Library
from dragoman.engines.local.model import Model, check_file, why_not_loaded
from dragoman.errors import BadRequest, BindingError, EngineFailed, ModelFileError
from dragoman.media import MediaKind

_TEXT, _IMAGE = 0, 1
_DIMENSIONS = 4
_LARGE = ((4096, 4096), (8192, 1024), (1024, 8192))
"""Pictures that have as many rows as any has."""


class SecondTeam:
    """`with team:` where something else is computed on these cores: steps bear it better then.

    Threads of GNU's OpenMP wait for each other at hundreds of places of a step, and stay awake for that. If
    another process takes a core, the system may put two of them on the other one, where each keeps the other
    from what it waits for: 20 ms become 600. They go to sleep instead while OpenMP has more threads than
    there are cores. So a second team is there meanwhile, which does nothing.
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
        # Of nothing there is nothing to free; the team stays until this thread ends.
        parallel(ctypes.CDLL(None).free, None, 2, 0)
        over.wait()


class PicturePart(Struct, frozen=True):
    """Of what stands in a prompt for a picture or a sound, in order."""

    ids: tuple[int, ...]
    """Of ids; empty for rows."""
    rows: int
    moves: int
    """Positions that it takes."""
    whole: bool = False
    """Whether its rows see each other, so that they have to be computed in one piece."""

    @property
    def is_shown(self) -> bool:
        """Whether these are rows of the picture, and not ids around them."""
        return not self.ids


class EncodedPart(Struct, frozen=True):
    """The rows of one part, and where they are."""

    rows: NDArray[np.float32]
    first: Ids | None = None
    """With several dimensions: the positions of each row in all of them, in the order of the library, where
    the part is at 0."""
    moved: Ids | None = None
    """By how much each of these is further on where the part is at 1."""

    def positions(self, begin: int, start: int, end: int) -> Ids | None:
        """Of the rows from `start` to `end`, where the part is at `begin`."""
        if self.first is None or self.moved is None:
            return None
        found: Ids = self.first[:, start:end] + begin * self.moved[:, start:end]
        return found


class Decoded(Struct, frozen=True):
    """A picture as RGB, or a sound as numbers at the projector's rate; without data it is only measured."""

    kind: MediaKind
    width: int = 0
    """Of a sound: how many numbers."""
    height: int = 0
    data: bytes | memoryview | None = None
    """One byte for each colour; of a sound 32-bit floats."""

    @property
    def bytes(self) -> int:
        return len(self.data or b"")


class Projector:
    """`measure` is for any thread, `encode` for one at a time."""

    def __init__(self, path: Path, model: Model, *, threads: int, gpu: bool) -> None:
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
                f"{why_not_loaded(path, list(library.errors)).rstrip('.')}. Is it the projector of "
                f"{model.path.name}? `--no-mmproj` does without."
            )
        self._free = weakref.finalize(self, library.mtmd_free, self._pointer)
        self._free.atexit = False
        self._check_text()
        self.team = SecondTeam(library, threads)
        self.path = path
        self.bytes = path.stat().st_size
        self.width = int(library.model_n_embd_inp(model.pointer))
        self.has_dimensions: bool = library.mtmd_decode_use_mrope(self._pointer)
        """Whether positions have several."""
        self.rate = int(library.mtmd_get_audio_sample_rate(self._pointer))
        """Of sounds, in numbers a second."""
        senses: tuple[tuple[MediaKind, bool], ...] = (
            ("image", library.mtmd_support_vision(self._pointer)),
            ("audio", library.mtmd_support_audio(self._pointer)),
        )
        self.modalities: frozenset[MediaKind] = frozenset(kind for kind, has in senses if has)
        self.most_whole = self._measure_whole()

    def close(self) -> None:
        self._free()

    def measure(self, decoded: Decoded) -> list[PicturePart]:
        """What stands in a prompt for it. Raises BadRequest for what the model cannot take."""
        empty = Decoded(decoded.kind, decoded.width, decoded.height)
        with self._tokenized(empty) as chunks:
            return [self._describe(chunk) for chunk in chunks]

    def encode(self, decoded: Decoded) -> list[EncodedPart]:
        """The rows of all parts that have some. It takes long, and cannot be broken off."""
        library = self._library
        found = []
        with self._tokenized(decoded) as chunks:
            for chunk in chunks:
                kind = library.mtmd_input_chunk_get_type(chunk)
                if kind == _TEXT:
                    continue
                if library.mtmd_encode_chunk(self._pointer, chunk):
                    raise EngineFailed("The model could not look at this picture or hear this sound.")
                found.append(self._take(chunk, kind == _IMAGE))
        return found

    def _take(self, chunk: int, is_image: bool) -> EncodedPart:
        count = int(self._library.mtmd_input_chunk_get_n_tokens(chunk))
        address = self._library.mtmd_get_output_embd(self._pointer)
        flat = (ctypes.c_float * (count * self.width)).from_address(address)
        rows = np.ctypeslib.as_array(flat).reshape(count, self.width).copy()
        if not self.has_dimensions:
            return EncodedPart(rows)
        first, second = (self._positions(chunk, count, is_image, begin) for begin in (0, 1))
        return EncodedPart(rows, first, second - first)

    def _positions(self, chunk: int, count: int, is_image: bool, begin: int) -> Ids:
        if not is_image:
            return np.tile(np.arange(begin, begin + count, dtype=np.int32), (_DIMENSIONS, 1))
        # The helper writes time, x, y and one more of each row. Batches want time, y, x of all.
        found: Ids = np.zeros((count, _DIMENSIONS), np.int32)
        tokens = self._library.mtmd_input_chunk_get_tokens_image(chunk)
        self._library.mtmd_helper_image_get_decoder_pos(tokens, begin, found.ctypes.data)
        return np.ascontiguousarray(found[:, (0, 2, 1, 3)].T)

    def _describe(self, chunk: int) -> PicturePart:
        library = self._library
        moves = int(library.mtmd_input_chunk_get_n_pos(chunk))
        if library.mtmd_input_chunk_get_type(chunk) == _TEXT:
            ids = self._ids(chunk)
            return PicturePart(ids, len(ids), moves)
        rows = int(library.mtmd_input_chunk_get_n_tokens(chunk))
        return PicturePart((), rows, moves, library.mtmd_decode_use_non_causal(self._pointer, chunk))

    def _ids(self, chunk: int) -> tuple[int, ...]:
        count = ctypes.c_size_t()
        found = self._library.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(count))
        return tuple(found[: count.value])

    @contextmanager
    def _tokenized(self, shown: Decoded | bytes) -> Iterator[Sequence[int]]:
        """The library's chunks of a picture or sound; of a text, to see whether its struct is as declared."""
        library = self._library
        bitmap = None if isinstance(shown, bytes) else self._bitmap(shown)
        part = InputPart(bitmap=bitmap)
        if isinstance(shown, bytes):
            part.text = ctypes.pointer(InputText(shown, len(shown), False, False))
        chunks = library.mtmd_input_chunks_init()
        try:
            parts = (ctypes.POINTER(InputPart) * 1)(ctypes.pointer(part))
            if library.mtmd_tokenize_from_parts(self._pointer, chunks, parts, 1, False):
                raise BadRequest("The model cannot take this picture or sound.", code="unsupported_content")
            count = library.mtmd_input_chunks_size(chunks)
            yield [library.mtmd_input_chunks_get(chunks, number) for number in range(count)]
        finally:
            library.mtmd_input_chunks_free(chunks)
            if bitmap is not None:
                library.mtmd_bitmap_free(bitmap)

    def _bitmap(self, shown: Decoded) -> int:
        data = shown.data if shown.data is None else np.frombuffer(shown.data, np.uint8).ctypes.data
        if shown.kind == "audio":
            made = self._library.mtmd_bitmap_init_from_audio(shown.width, data)
        else:
            made = self._library.mtmd_bitmap_init(shown.width, shown.height, data)
        return int(made)

    def _check_text(self) -> None:
        """No function returns the struct of a text, so it is tried whether it is as declared."""
        text = b"a b\0c"
        room = (ctypes.c_int32 * 64)()
        vocab = self._library.model_get_vocab(self._model.pointer)
        count = self._library.tokenize(vocab, text, len(text), room, len(room), False, False)
        with self._tokenized(text) as chunks:
            if [id_ for chunk in chunks for id_ in self._ids(chunk)] != room[:count]:
                raise BindingError("The installed xllamacpp has another struct for texts than is declared.")

    def _measure_whole(self) -> int:
        """Rows of the largest part that has to be computed in one piece."""
        if "image" not in self.modalities or not self._library.mtmd_decode_use_non_causal(
            self._pointer, None
        ):
            return 0
        sizes = (self.measure(Decoded("image", width, height)) for width, height in _LARGE)
        return max(part.rows for parts in sizes for part in parts if part.whole)
