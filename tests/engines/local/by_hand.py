"""A prompt with a picture or a sound in it, answered by llama.cpp's own helper and nothing of ours."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, c_bool, c_char_p, c_int32, c_size_t, c_uint32, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dragoman.engines.local import binding
from dragoman.engines.local.binding import InputPart, InputText, ProjectorParams
from dragoman.engines.local.gguf_model import LlamaModel

HANDLE = ctypes.CDLL(str(binding.library_path()))
ROWS = 48
"""At most in one batch: from 64 on attention goes another way, which rounds otherwise."""


def call(name: str, result: Any, *given: tuple[Any, Any]) -> Any:
    function = HANDLE[name]
    function.restype, function.argtypes = result, [kind for kind, _ in given]
    return function(*(value for _, value in given))


class ByHand:
    def __init__(self, model: Path, projector: Path) -> None:
        self.model = LlamaModel(model)
        self.library = self.model.library
        params = call("mtmd_context_params_default", ProjectorParams)
        params.use_gpu, params.print_timings, params.n_threads = False, False, 1
        self.sight = call(
            "mtmd_init_from_file",
            c_void_p,
            (c_char_p, str(projector).encode()),
            (c_void_p, self.model.pointer),
            (ProjectorParams, params),
        )
        self.vocabulary = self.library.vocab_n_tokens(self.library.model_get_vocab(self.model.pointer))

    def close(self) -> None:
        call("mtmd_free", None, (c_void_p, self.sight))

    def answer(self, parts: list[str | NDArray[Any]], count: int) -> tuple[list[int], NDArray[np.float32]]:
        """The likeliest ids, and the logits of each. A part is a text, pixels or samples."""
        params = self.library.context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = 2048, ROWS, ROWS, 1
        params.n_threads = params.n_threads_batch = 1
        context = self.library.init_from_model(self.model.pointer, params)
        past = c_int32(0)
        with self._chunks(parts) as chunks:
            code = call(
                "mtmd_helper_eval_chunks",
                c_int32,
                (c_void_p, self.sight),
                (c_void_p, context),
                (c_void_p, chunks),
                (c_int32, 0),
                (c_int32, 0),
                (c_int32, ROWS),
                (c_bool, True),
                (POINTER(c_int32), ctypes.byref(past)),
            )
        assert code == 0
        ids: list[int] = []
        rows = [self._logits(context)]
        while len(ids) < count:
            ids.append(int(rows[-1].argmax()))
            if len(ids) < count:
                self._say(context, ids[-1], past.value + len(ids) - 1)
                rows.append(self._logits(context))
        self.library.free(context)
        return ids, np.array(rows)

    def _logits(self, context: int) -> NDArray[np.float32]:
        address = call("llama_get_logits_ith", c_void_p, (c_void_p, context), (c_int32, -1))
        flat = (ctypes.c_float * self.vocabulary).from_address(address)
        return np.array(flat, np.float32)

    def _say(self, context: int, token: int, position: int) -> None:
        tokens, indices, slots = (np.array([value], np.int32) for value in (token, position, 0))
        counts, outputs = np.ones(1, np.int32), np.ones(1, np.int8)
        pointers = np.array([slots.ctypes.data], np.uint64)
        batch = binding.Batch(
            n_tokens=1,
            token=tokens.ctypes.data,
            pos=indices.ctypes.data,
            n_seq_id=counts.ctypes.data,
            seq_id=pointers.ctypes.data,
            logits=outputs.ctypes.data,
        )
        assert self.library.decode(context, batch) == 0

    @contextmanager
    def _chunks(self, parts: list[str | NDArray[Any]]) -> Iterator[int]:
        input_parts = [self._part(part) for part in parts]
        array = (POINTER(InputPart) * len(input_parts))(*(ctypes.pointer(part) for part in input_parts))
        chunks = call("mtmd_input_chunks_init", c_void_p)
        code = call(
            "mtmd_tokenize_from_parts",
            c_int32,
            (c_void_p, self.sight),
            (c_void_p, chunks),
            (c_void_p, array),
            (c_size_t, len(input_parts)),
            (c_bool, False),
        )
        assert code == 0
        yield chunks
        call("mtmd_input_chunks_free", None, (c_void_p, chunks))
        for part in input_parts:
            if part.bitmap:
                call("mtmd_bitmap_free", None, (c_void_p, part.bitmap))

    def _part(self, part: str | NDArray[Any]) -> InputPart:
        if isinstance(part, str):
            text = part.encode()
            return InputPart(text=ctypes.pointer(InputText(text, len(text), False, True)))
        if part.dtype == np.float32:
            size = (c_size_t, part.size), (c_void_p, part.ctypes.data)
            return InputPart(bitmap=call("mtmd_bitmap_init_from_audio", c_void_p, *size))
        height, width, _ = part.shape
        measures = (c_uint32, width), (c_uint32, height), (c_void_p, part.ctypes.data)
        return InputPart(bitmap=call("mtmd_bitmap_init", c_void_p, *measures))
