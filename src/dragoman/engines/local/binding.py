"""llama.cpp's C API: the symbols that xllamacpp's extension module exports, declared by hand.

The layout of C structs changes between builds, and a wrong one corrupts memory in silence. So the build is
pinned, and on load the size and the known defaults of both parameter structs are compared with ours.
"""

import ctypes
import os
import platform
from collections import deque
from collections.abc import Callable
from ctypes import Structure, c_void_p
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dragoman.engines.local import native_log
from dragoman.engines.local.declarations import (
    CONTEXT_DEFAULTS,
    MODEL_DEFAULTS,
    QUICK,
    SLOW,
    ContextParams,
    ModelParams,
)
from dragoman.errors import BindingError

PINNED = "2026.10.11549"
_INSTALL = f"Install the build this release was made for: pip install 'xllamacpp=={PINNED}'"


class Library:
    """The declared functions as attributes, without their `llama_`: `library.decode(context, batch)`."""

    def __init__(self, path: Path) -> None:
        try:
            slow, quick = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
        except OSError:
            raise BindingError(f"{path.name} of xllamacpp cannot be loaded here. {_INSTALL}") from None
        # An assertion that fails would begin a debugger and wait for it before it aborts.
        os.environ.setdefault("GGML_NO_BACKTRACE", "1")
        for handle, table in ((slow, SLOW), (quick, QUICK)):
            for name, (result, *arguments) in table.items():
                setattr(self, name, _declare(handle, name, result, arguments))
        check_layout(slow)
        self.errors: deque[str] = deque(maxlen=8)
        self._log = native_log.callback(self.errors)
        self.log_set(self._log, None)
        self.backend_init()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(name)


@cache
def load() -> Library:
    """The library, loaded and checked once per process."""
    return Library(library_path())


def library_path() -> Path:
    """Where the extension module is. The package itself is not imported: it would cost a second."""
    spec = find_spec("xllamacpp")
    folders = spec.submodule_search_locations if spec else None
    for folder in folders or ():
        for path in (*Path(folder).glob("xllamacpp*.so"), *Path(folder).glob("xllamacpp*.pyd")):
            return path
    raise BindingError(f"The embedded engine needs xllamacpp, which is not installed. {_INSTALL}")


def check_layout(handle: ctypes.CDLL) -> None:
    """Raise BindingError when the structs of the library are not the ones declared here."""
    for name, struct, defaults in (
        ("model", ModelParams, MODEL_DEFAULTS),
        ("context", ContextParams, CONTEXT_DEFAULTS),
    ):
        wrong = mismatches(handle, f"llama_{name}_default_params", struct, defaults)
        if wrong:
            raise BindingError(
                f"The installed xllamacpp ({_installed()}) has other {name} parameters than this release "
                f"expects: {'; '.join(wrong)}. {_INSTALL}"
            )


def mismatches(
    handle: ctypes.CDLL, function: str, struct: type[Structure], defaults: dict[str, Any]
) -> list[str]:
    """What differs between a struct's declaration and what the library returns for it."""
    wrong = []
    size = _written(handle, function)
    # Padding at the end of a struct is never written.
    if size is not None and not ctypes.sizeof(struct) - 7 <= size <= ctypes.sizeof(struct):
        wrong.append(f"{size} bytes instead of {ctypes.sizeof(struct)}")
    found = _declare(handle, function.removeprefix("llama_"), struct, [])()
    for field, expected in defaults.items():
        value = getattr(found, field)
        if value != expected:
            wrong.append(f"{field} is {value} instead of {expected}")
    return wrong


def _written(handle: ctypes.CDLL, function: str) -> int | None:
    """How many bytes the library writes to return a struct, where the calling convention shows it."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return None
    # On x86-64 a large struct is returned through a hidden first argument. What is the same in two
    # differently filled buffers was written.
    call = ctypes.CFUNCTYPE(c_void_p, c_void_p)((function, handle))
    filled = []
    for fill in (0xAA, 0x55):
        buffer = (ctypes.c_ubyte * 1024)(*([fill] * 1024))
        call(ctypes.addressof(buffer))
        filled.append(bytes(buffer))
    return max(i for i in range(1024) if filled[0][i] == filled[1][i]) + 1


def _declare(handle: ctypes.CDLL, name: str, result: Any, arguments: list[Any]) -> Callable[..., Any]:
    try:
        function = handle[f"llama_{name}"]
    except AttributeError:
        raise BindingError(
            f"The installed xllamacpp ({_installed()}) has no llama_{name}. {_INSTALL}"
        ) from None
    function.restype = result
    function.argtypes = arguments
    return function


def _installed() -> str:
    try:
        return version("xllamacpp")
    except PackageNotFoundError:
        return "of unknown version"
