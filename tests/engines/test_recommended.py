"""How a model wants to be sampled."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from dragoman.engines.model_files import in_folder, in_gguf


def test_a_gguf_file_says_it_in_its_metadata() -> None:
    fields = {
        "general.sampling.temp": "0.600000",
        "general.sampling.top_k": "20",
        "general.sampling.penalty_repeat": "1.05",
    }
    assert in_gguf(fields) == {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05}


@pytest.mark.parametrize("value", ["warm", "-1", "nan", "1e9"])
def test_what_no_request_could_ask_for_is_left_out(value: str) -> None:
    assert in_gguf({"general.sampling.temp": value}) == {}


def test_a_folder_says_it_in_its_generation_config(tmp_path: Path) -> None:
    config: dict[str, Any] = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "eos_token_id": 2}
    (tmp_path / "generation_config.json").write_bytes(msgspec.json.encode(config))
    assert in_folder(tmp_path) == {"temperature": 0.7, "top_p": 0.8}


@pytest.mark.parametrize("text", [None, "", "[]", "{"])
def test_a_folder_without_one_says_nothing(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "generation_config.json").write_text(text)
    assert in_folder(tmp_path) == {}
