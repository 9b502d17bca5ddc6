"""llama.cpp's C API: the symbols that xllamacpp's extension module exports, declared by hand.

The layout of C structs changes between builds, and a wrong one corrupts memory silently. Therefore the build
is pinned, and on load the size and the known defaults of the parameter structs are compared with these
declarations.
"""

import ctypes
import logging
import os
import platform
from collections import deque
from collections.abc import Callable, Sequence
from ctypes import (
    POINTER,
    Structure,
    c_bool,
    c_char_p,
    c_float,
    c_int,
    c_int32,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

from msgspec import Struct

from dragoman.errors import BindingError

# The library's log. It goes to the logger `dragoman.llamacpp` at DEBUG, so it is hidden by default; the last
# warnings and errors are kept to explain a failure.


_WARN, _ERROR = 3, 4
_log = logging.getLogger("dragoman.llamacpp")

Callback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


def callback(errors: deque[str]) -> Any:
    """Create a C callback that appends warnings and errors to `errors`; the caller keeps it alive."""

    def receive(level: int, text: bytes | None, _user: Any) -> None:
        line = (text or b"").decode(errors="replace").rstrip()
        if line and level in (_WARN, _ERROR):
            errors.append(line)
        if line:
            _log.debug("%s", line)

    return Callback(receive)


# The declarations used here: structs, functions, and defaults that reveal the layout. For xllamacpp
# 2026.10.11549; `check_layout` compares them with the installed build.


class ModelParams(Structure):
    _fields_ = (
        ("devices", c_void_p),
        ("tensor_buft_overrides", c_void_p),
        ("n_gpu_layers", c_int32),
        ("split_mode", c_int),
        ("load_mode", c_int),
        ("lazy_mode", c_int),
        ("main_gpu", c_int32),
        ("tensor_split", c_void_p),
        ("progress_callback", c_void_p),
        ("progress_callback_user_data", c_void_p),
        ("kv_overrides", c_void_p),
        ("vocab_only", c_bool),
        ("check_tensors", c_bool),
        ("use_extra_bufts", c_bool),
        ("no_host", c_bool),
        ("no_alloc", c_bool),
        ("load_mtp", c_bool),
    )


class ContextParams(Structure):
    _fields_ = (
        ("n_ctx", c_uint32),
        ("n_batch", c_uint32),
        ("n_ubatch", c_uint32),
        ("n_seq_max", c_uint32),
        ("n_rs_seq", c_uint32),
        ("n_outputs_max", c_uint32),
        ("n_outputs_max_per_seq", c_uint32),
        ("n_threads", c_int32),
        ("n_threads_batch", c_int32),
        ("ctx_type", c_int),
        ("rope_scaling_type", c_int),
        ("pooling_type", c_int),
        ("attention_type", c_int),
        ("flash_attn_type", c_int),
        ("rope_freq_base", c_float),
        ("rope_freq_scale", c_float),
        ("yarn_ext_factor", c_float),
        ("yarn_attn_factor", c_float),
        ("yarn_beta_fast", c_float),
        ("yarn_beta_slow", c_float),
        ("yarn_orig_ctx", c_uint32),
        ("defrag_thold", c_float),
        ("cb_eval", c_void_p),
        ("cb_eval_user_data", c_void_p),
        ("type_k", c_int),
        ("type_v", c_int),
        ("abort_callback", c_void_p),
        ("abort_callback_data", c_void_p),
        ("reserved", c_void_p),
        ("embeddings", c_bool),
        ("offload_kqv", c_bool),
        ("no_perf", c_bool),
        ("op_offload", c_bool),
        ("swa_full", c_bool),
        ("kv_unified", c_bool),
        ("samplers", c_void_p),
        ("n_samplers", c_size_t),
        ("ctx_other", c_void_p),
    )


class ProjectorParams(Structure):
    """Parameters of mtmd, the library's part for images and audio."""

    _fields_ = (
        ("use_gpu", c_bool),
        ("device", c_void_p),
        ("print_timings", c_bool),
        ("n_threads", c_int),
        ("image_marker", c_char_p),
        ("media_marker", c_char_p),
        ("flash_attn_type", c_int),
        ("warmup", c_bool),
        ("image_min_tokens", c_int),
        ("image_max_tokens", c_int),
        ("cb_eval", c_void_p),
        ("cb_eval_user_data", c_void_p),
        ("batch_max_tokens", c_int32),
        ("progress_callback", c_void_p),
        ("progress_callback_user_data", c_void_p),
    )


class InputText(Structure):
    _fields_ = (
        ("text", c_char_p),
        ("text_len", c_size_t),
        ("add_special", c_bool),
        ("parse_special", c_bool),
    )


class InputPart(Structure):
    """Either a text or a bitmap, one of which is set."""

    _fields_ = (("text", POINTER(InputText)), ("bitmap", c_void_p))


class Batch(Structure):
    _fields_ = (
        ("n_tokens", c_int32),
        ("token", c_void_p),
        ("embd", c_void_p),
        ("pos", c_void_p),
        ("n_seq_id", c_void_p),
        ("seq_id", c_void_p),
        ("logits", c_void_p),
    )


_TOKEN, _PTR = c_int32, c_void_p
Signature = tuple[Any, ...]

# These calls release the GIL.
SLOW: dict[str, Signature] = {
    "backend_init": (None,),
    "model_load_from_file": (_PTR, c_char_p, ModelParams),
    "model_free": (None, _PTR),
    "init_from_model": (_PTR, _PTR, ContextParams),
    "free": (None, _PTR),
    "decode": (c_int32, _PTR, Batch),
    "synchronize": (None, _PTR),
    "adapter_lora_init": (_PTR, _PTR, c_char_p),
    "adapter_lora_free": (None, _PTR),
    "state_seq_get_size": (c_size_t, _PTR, c_int32),
    "state_seq_get_data": (c_size_t, _PTR, _PTR, c_size_t, c_int32),
    "state_seq_set_data": (c_size_t, _PTR, _PTR, c_size_t, c_int32),
    "tokenize": (c_int32, _PTR, c_char_p, c_int32, POINTER(c_int32), c_int32, c_bool, c_bool),
}
# These calls take microseconds and keep the GIL. Releasing it would hand it to the event loop's thread, which
# may hold it for milliseconds while the cores wait.
QUICK: dict[str, Signature] = {
    "model_default_params": (ModelParams,),
    "context_default_params": (ContextParams,),
    "model_get_vocab": (_PTR, _PTR),
    "model_meta_val_str": (c_int32, _PTR, c_char_p, c_char_p, c_size_t),
    "model_meta_key_by_index": (c_int32, _PTR, c_int32, c_char_p, c_size_t),
    "model_meta_count": (c_int32, _PTR),
    "model_desc": (c_int32, _PTR, c_char_p, c_size_t),
    "model_n_ctx_train": (c_int32, _PTR),
    "model_n_embd": (c_int32, _PTR),
    "model_n_embd_inp": (c_int32, _PTR),
    "model_n_head": (c_int32, _PTR),
    "model_n_head_kv": (c_int32, _PTR),
    "model_n_layer": (c_int32, _PTR),
    "model_n_params": (c_uint64, _PTR),
    "model_size": (c_uint64, _PTR),
    "model_has_encoder": (c_bool, _PTR),
    "model_is_recurrent": (c_bool, _PTR),
    "model_is_hybrid": (c_bool, _PTR),
    "vocab_n_tokens": (c_int32, _PTR),
    "vocab_is_eog": (c_bool, _PTR, _TOKEN),
    "vocab_get_attr": (c_int, _PTR, _TOKEN),
    "vocab_bos": (_TOKEN, _PTR),
    "vocab_eos": (_TOKEN, _PTR),
    "vocab_fim_pre": (_TOKEN, _PTR),
    "vocab_fim_suf": (_TOKEN, _PTR),
    "vocab_fim_mid": (_TOKEN, _PTR),
    "vocab_get_add_bos": (c_bool, _PTR),
    "token_to_piece": (c_int32, _PTR, _TOKEN, c_char_p, c_int32, c_int32, c_bool),
    "n_ctx_seq": (c_uint32, _PTR),
    "get_logits": (_PTR, _PTR),
    "get_embeddings": (_PTR, _PTR),
    "get_memory": (_PTR, _PTR),
    "memory_clear": (None, _PTR, c_bool),
    "memory_seq_rm": (c_bool, _PTR, c_int32, c_int32, c_int32),
    "memory_seq_pos_max": (c_int32, _PTR, c_int32),
    "memory_seq_cp": (None, _PTR, c_int32, c_int32, c_int32, c_int32),
    "set_adapters_lora": (c_int32, _PTR, POINTER(c_void_p), c_size_t, POINTER(c_float)),
    "set_causal_attn": (None, _PTR, c_bool),
    "set_abort_callback": (None, _PTR, c_void_p, c_void_p),
    "log_set": (None, Callback, c_void_p),
    "supports_gpu_offload": (c_bool,),
}
# Functions of ggml, by their full names.
DEVICES: dict[str, Signature] = {
    "ggml_backend_dev_count": (c_size_t,),
    "ggml_backend_dev_get": (_PTR, c_size_t),
    "ggml_backend_dev_type": (c_int, _PTR),
    "ggml_backend_dev_name": (c_char_p, _PTR),
    "ggml_backend_dev_description": (c_char_p, _PTR),
    "ggml_backend_dev_memory": (None, _PTR, POINTER(c_size_t), POINTER(c_size_t)),
}
# Functions of mtmd, by their full names, declared only if a projector is used. Most of them are slow.
MEDIA: dict[str, Signature] = {
    "mtmd_context_params_default": (ProjectorParams,),
    "mtmd_init_from_file": (_PTR, c_char_p, _PTR, ProjectorParams),
    "mtmd_free": (None, _PTR),
    "mtmd_log_set": (None, Callback, c_void_p),
    "mtmd_helper_log_set": (None, Callback, c_void_p),
    "mtmd_decode_use_mrope": (c_bool, _PTR),
    "mtmd_decode_use_non_causal": (c_bool, _PTR, _PTR),
    "mtmd_support_vision": (c_bool, _PTR),
    "mtmd_support_audio": (c_bool, _PTR),
    "mtmd_get_audio_sample_rate": (c_int, _PTR),
    "mtmd_bitmap_init": (_PTR, c_uint32, c_uint32, _PTR),
    "mtmd_bitmap_init_from_audio": (_PTR, c_size_t, _PTR),
    "mtmd_bitmap_free": (None, _PTR),
    "mtmd_input_chunks_init": (_PTR,),
    "mtmd_input_chunks_size": (c_size_t, _PTR),
    "mtmd_input_chunks_get": (_PTR, _PTR, c_size_t),
    "mtmd_input_chunks_free": (None, _PTR),
    "mtmd_input_chunk_get_type": (c_int, _PTR),
    "mtmd_input_chunk_get_tokens_text": (POINTER(c_int32), _PTR, POINTER(c_size_t)),
    "mtmd_input_chunk_get_tokens_image": (_PTR, _PTR),
    "mtmd_input_chunk_get_n_tokens": (c_size_t, _PTR),
    "mtmd_input_chunk_get_n_pos": (c_int32, _PTR),
    "mtmd_helper_image_get_decoder_pos": (None, _PTR, c_int32, _PTR),
    "mtmd_tokenize_from_parts": (c_int32, _PTR, _PTR, POINTER(POINTER(InputPart)), c_size_t, c_bool),
    "mtmd_encode_chunk": (c_int32, _PTR, _PTR),
    "mtmd_get_output_embd": (_PTR, _PTR),
}
_GPUS = (1, 2)
"""Device types of ggml: GPUs with their own memory, and those that share the CPU's."""

MODEL_DEFAULTS = {
    "n_gpu_layers": -1,
    "split_mode": 1,
    "load_mode": -1,
    "lazy_mode": 1,
    "main_gpu": 0,
    "kv_overrides": None,
    "vocab_only": False,
    "check_tensors": False,
    "use_extra_bufts": True,
    "no_host": False,
    "no_alloc": False,
    "load_mtp": False,
}
CONTEXT_DEFAULTS = {
    "n_ctx": 512,
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_seq_max": 1,
    "n_outputs_max": 0,
    "n_outputs_max_per_seq": 1,
    "n_threads": 4,
    "n_threads_batch": 4,
    "pooling_type": -1,
    "attention_type": -1,
    "flash_attn_type": -1,
    "yarn_ext_factor": -1.0,
    "defrag_thold": -1.0,
    "type_k": 1,
    "type_v": 1,
    "embeddings": False,
    "offload_kqv": True,
    "no_perf": True,
    "op_offload": True,
    "swa_full": True,
    "kv_unified": False,
    "ctx_other": None,
}
PROJECTOR_DEFAULTS = {
    "use_gpu": True,
    "device": None,
    "print_timings": True,
    "n_threads": 4,
    "image_marker": None,
    "media_marker": b"<__media__>",
    "flash_attn_type": -1,
    "warmup": True,
    "image_min_tokens": -1,
    "image_max_tokens": -1,
    "batch_max_tokens": 1024,
    "progress_callback": None,
}


# Loading and checking the library.


Layout: TypeAlias = tuple[str, type[Structure], dict[str, Any]]
LAYOUTS: Sequence[Layout] = (
    ("llama_model_default_params", ModelParams, MODEL_DEFAULTS),
    ("llama_context_default_params", ContextParams, CONTEXT_DEFAULTS),
)
MEDIA_LAYOUTS: Sequence[Layout] = (("mtmd_context_params_default", ProjectorParams, PROJECTOR_DEFAULTS),)
PINNED = "2026.10.11549"
_INSTALL = f"Install the build for this release: pip install 'xllamacpp=={PINNED}'"


class GpuDevice(Struct, frozen=True):
    """A GPU that this build of llama.cpp can use."""

    name: str
    """Such as `CUDA0`, `Vulkan0`, `Metal`."""
    description: str
    bytes: int


class Library:
    """The declared functions as attributes, without the prefix `llama_`: `library.decode(context, batch)`."""

    def __init__(self, path: Path) -> None:
        try:
            slow, quick = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
        except OSError:
            raise BindingError(f"Cannot load {path.name} of xllamacpp on this system. {_INSTALL}") from None
        # Otherwise a failed assertion starts a debugger and waits for it before it aborts.
        os.environ.setdefault("GGML_NO_BACKTRACE", "1")
        for handle, table in ((slow, SLOW), (quick, QUICK)):
            for name, (result, *arguments) in table.items():
                setattr(self, name, _declare(handle, name, result, arguments))
        for name, (result, *arguments) in DEVICES.items():
            setattr(self, name, _declare(quick, name, result, arguments, prefix=""))
        check_layout(slow, LAYOUTS)
        self._handle = slow
        self.parallel: Callable[..., None] | None = getattr(slow, "GOMP_parallel", None)
        """The function with which GNU's OpenMP runs a task on a team of threads, if the library was built
        with it.
        """
        self.errors: deque[str] = deque(maxlen=8)
        self._log = callback(self.errors)
        self.log_set(self._log, None)
        self.backend_init()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(name)

    def load_media(self) -> None:
        """Declare the functions for images and audio, and check their structs."""
        for name, (result, *arguments) in MEDIA.items():
            setattr(self, name, _declare(self._handle, name, result, arguments, prefix=""))
        check_layout(self._handle, MEDIA_LAYOUTS)
        self.mtmd_log_set(self._log, None)
        self.mtmd_helper_log_set(self._log, None)

    def gpus(self) -> list[GpuDevice]:
        items = [self.ggml_backend_dev_get(index) for index in range(self.ggml_backend_dev_count())]
        return [self._describe(device) for device in items if self.ggml_backend_dev_type(device) in _GPUS]

    def _describe(self, device: int) -> GpuDevice:
        free, total = c_size_t(), c_size_t()
        self.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
        name, text = self.ggml_backend_dev_name(device), self.ggml_backend_dev_description(device)
        return GpuDevice(name.decode(errors="replace"), text.decode(errors="replace"), total.value)


@cache
def load() -> Library:
    """Load and check the library, once per process."""
    return Library(library_path())


def library_path() -> Path:
    """Return the path of the extension module. The package itself is not imported: that would take a
    second.
    """
    spec = find_spec("xllamacpp")
    folders = spec.submodule_search_locations if spec else None
    for folder in folders or ():
        for path in (*Path(folder).glob("xllamacpp*.so"), *Path(folder).glob("xllamacpp*.pyd")):
            return path
    raise BindingError(f"The embedded engine needs xllamacpp. {_INSTALL}")


def check_layout(handle: ctypes.CDLL, layouts: Sequence[Layout]) -> None:
    """Raise BindingError if the library's structs differ from the ones declared here."""
    for function, struct, defaults in layouts:
        wrong = mismatches(handle, function, struct, defaults)
        if wrong:
            raise BindingError(
                f"The installed xllamacpp ({_installed_version()}) has a different layout of {function}: "
                f"{'; '.join(wrong)}. {_INSTALL}"
            )


def mismatches(
    handle: ctypes.CDLL, function: str, struct: type[Structure], defaults: dict[str, Any]
) -> list[str]:
    """List the differences between a struct's declaration and the struct that the library returns."""
    wrong = []
    size = _count_written(handle, function)
    # Padding at the end of a struct is never written.
    if size is not None and not ctypes.sizeof(struct) - 7 <= size <= ctypes.sizeof(struct):
        wrong.append(f"{size} bytes instead of {ctypes.sizeof(struct)}")
    result = _declare(handle, function, struct, [], prefix="")()
    for field, expected in defaults.items():
        value = getattr(result, field)
        if value != expected:
            wrong.append(f"{field} is {value} instead of {expected}")
    return wrong


def _count_written(handle: ctypes.CDLL, function: str) -> int | None:
    """Count the bytes that the library writes to return a struct; None where the calling convention hides
    it.
    """
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return None
    # On x86-64 a large struct is returned through a hidden first argument. Bytes that are equal in two
    # buffers with different fillings were written.
    call = ctypes.CFUNCTYPE(c_void_p, c_void_p)((function, handle))
    filled = []
    for fill in (0xAA, 0x55):
        buffer = (ctypes.c_ubyte * 1024)(*([fill] * 1024))
        call(ctypes.addressof(buffer))
        filled.append(bytes(buffer))
    return max(i for i in range(1024) if filled[0][i] == filled[1][i]) + 1


def _declare(
    handle: ctypes.CDLL, name: str, result: Any, arguments: list[Any], prefix: str = "llama_"
) -> Callable[..., Any]:
    try:
        function = handle[prefix + name]
    except AttributeError:
        raise BindingError(
            f"The installed xllamacpp ({_installed_version()}) has no {prefix}{name}. {_INSTALL}"
        ) from None
    function.restype = result
    function.argtypes = arguments
    return function


def _installed_version() -> str:
    try:
        return version("xllamacpp")
    except PackageNotFoundError:
        return "of unknown version"
