"""Files that cannot be used are refused with a reason, and those that can tell about themselves."""

from pathlib import Path

import gguf
import pytest

from dragoman.engines.local.gguf_model import LlamaModel, LlamaTokenizer
from dragoman.errors import ModelFileError


@pytest.fixture(scope="module")
def model(weights: Path) -> LlamaModel:
    return LlamaModel(weights)


@pytest.fixture(scope="module")
def tokenizer(model: LlamaModel) -> LlamaTokenizer:
    return LlamaTokenizer(model)


def test_metadata(model: LlamaModel) -> None:
    assert model.trained_context == 8192
    assert model.token_bytes == 30 * 2 * 3 * 64 * 2
    assert model.rewinds
    assert list(model.templates) == ["default"]
    assert model.details["parameters"] == "134515008"


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="There is no file"):
        LlamaModel(tmp_path / "none.gguf")


def test_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="is a folder"):
        LlamaModel(tmp_path)


def test_not_a_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"PK\x03\x04 and so on")
    with pytest.raises(ModelFileError, match="not a GGUF"):
        LlamaModel(tmp_path / "model.gguf")


def test_a_file_cut_short(weights: Path, tmp_path: Path) -> None:
    with weights.open("rb") as whole:
        (tmp_path / "half.gguf").write_bytes(whole.read(20_000_000))
    with pytest.raises(ModelFileError, match="damaged or incompletely downloaded"):
        LlamaModel(tmp_path / "half.gguf")


def test_an_unknown_architecture(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "new.gguf"), "abacus")
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelFileError, match="architecture 'abacus'"):
        LlamaModel(tmp_path / "new.gguf")


def test_pieces_put_together_are_the_text(tokenizer: LlamaTokenizer) -> None:
    for text in ("Hello, world!", " naïve café \n\n\t", "数 🦙\u200d x", "", "a" * 500):
        assert b"".join(tokenizer.pieces[i] for i in tokenizer.encode(text)) == text.encode()


def test_text_never_becomes_a_control_token(tokenizer: LlamaTokenizer) -> None:
    control = set(tokenizer.special_ids.values())
    for text in tokenizer.special_ids:
        assert not control & set(tokenizer.encode(f"a{text}b"))


def test_vocabulary(tokenizer: LlamaTokenizer) -> None:
    assert len(tokenizer.pieces) == 49152
    assert tokenizer.special_ids["<|im_start|>"] == 1
    assert tokenizer.pieces[1] == b"<|im_start|>"
    assert tokenizer.eos_id == 2
    assert {0, 2} <= tokenizer.end_ids
    assert tokenizer.add_bos is False
    assert tokenizer.infill is None
