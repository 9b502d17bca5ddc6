"""Headers of GGUF files that cannot be true are refused before the native library sees them."""

from pathlib import Path

import pytest

from dragoman.engines.local.gguf_model import LlamaModel, LlamaTokenizer, read_header
from dragoman.errors import ModelFileError
from tests.support.tiny_gguf import numbers, write_tiny

TENSORS, VALUES, FIRST_KEY, FIRST_KIND = 8, 16, 24, 24 + 8 + len("general.architecture")


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "tiny.gguf")


def changed(path: Path, at: int, number: int, size: int = 8) -> Path:
    data = bytearray(path.read_bytes())
    data[at : at + size] = number.to_bytes(size, "little")
    path.write_bytes(data)
    return path


def test_a_good_file_passes(tiny: Path) -> None:
    read_header(tiny)
    assert LlamaTokenizer(LlamaModel(tiny)).encode("ab")


def test_the_default_model_passes(weights: Path) -> None:
    read_header(weights)


@pytest.mark.parametrize("number", [2**16, 2**32, 2**63, 2**64 - 1])
@pytest.mark.parametrize("at", [TENSORS, VALUES, FIRST_KEY])
def test_counts_and_lengths_that_lead_outside(tiny: Path, at: int, number: int) -> None:
    with pytest.raises(ModelFileError, match="damaged"):
        read_header(changed(tiny, at, number))


def test_a_kind_of_value_that_there_is_not(tiny: Path) -> None:
    with pytest.raises(ModelFileError, match="unknown type"):
        read_header(changed(tiny, FIRST_KIND, 13, 4))


def tensor_places(path: Path) -> list[tuple[int, int]]:
    """Of the last tensor: its name's length, its name, dimensions, sizes, kind and offset."""
    return numbers(path)[-1]


@pytest.mark.parametrize(
    ("part", "number", "words"),
    [
        (0, 64, "name"),
        (2, 5, "four dimensions"),
        (3, 0, "an impossible size"),
        (3, 2**63, "an impossible size"),
        (-1, 2**40, "an impossible offset"),
        (-1, 1, "an impossible offset"),
    ],
)
def test_tensors_that_cannot_be(tiny: Path, part: int, number: int, words: str) -> None:
    at, size = tensor_places(tiny)[part]
    with pytest.raises(ModelFileError, match=words):
        read_header(changed(tiny, at, number, size))


def test_a_file_that_is_cut_anywhere_in_its_header(tiny: Path) -> None:
    whole = tiny.read_bytes()
    end = sum(tensor_places(tiny)[-1])
    for length in range(4, end, 97):
        tiny.write_bytes(whole[:length])
        with pytest.raises(ModelFileError, match="incompletely downloaded"):
            read_header(tiny)


def test_other_versions_are_left_to_the_library(tiny: Path) -> None:
    read_header(changed(tiny, 4, 1, 4))
    with pytest.raises(ModelFileError):
        LlamaModel(tiny)
