"""The declared C structs are the library's; where they are not, a person is told what to install."""

import ctypes
from pathlib import Path

import pytest

from dragoman.engines.local import binding
from dragoman.engines.local.binding import CONTEXT_DEFAULTS, ContextParams, ModelParams
from dragoman.errors import BindingError


def handle() -> ctypes.CDLL:
    return ctypes.CDLL(str(binding.library_path()))


def test_the_pinned_build_fits() -> None:
    binding.check_layout(handle(), [*binding.LAYOUTS, *binding.MEDIA_LAYOUTS])


def test_a_struct_of_another_size_is_noticed() -> None:
    class Longer(ctypes.Structure):
        _fields_ = (*ModelParams._fields_, ("more", ctypes.c_void_p))

    wrong = binding.mismatches(handle(), "llama_model_default_params", Longer, {})
    assert wrong == ["78 bytes instead of 88"]


def test_another_default_is_noticed() -> None:
    wrong = binding.mismatches(
        handle(), "llama_context_default_params", ContextParams, {"n_batch": 1, "n_ctx": 512}
    )
    assert wrong == ["n_batch is 2048 instead of 1"]


def test_the_message_names_the_version_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONTEXT_DEFAULTS, "n_seq_max", 77)
    with pytest.raises(BindingError, match=f"n_seq_max is 1 instead of 77.*xllamacpp=={binding.PINNED}"):
        binding.check_layout(handle(), binding.LAYOUTS)


def test_a_missing_function() -> None:
    with pytest.raises(BindingError, match="has no llama_juggle"):
        binding._declare(handle(), "juggle", None, [])


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "find_spec", lambda name: None)
    with pytest.raises(BindingError, match="needs xllamacpp"):
        binding.library_path()


def test_a_library_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "xllamacpp.abi3.so").write_bytes(b"no library")
    with pytest.raises(BindingError, match="Cannot load xllamacpp"):
        binding.Library(tmp_path / "xllamacpp.abi3.so")
