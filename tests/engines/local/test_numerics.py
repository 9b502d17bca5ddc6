"""What decides the answers has a name, and what does not decide them is not in it."""

from pathlib import Path

from dragoman.engines.local import LocalEngine
from dragoman.engines.local.hardware import numerics


def test_it_stands_for_files_and_facts(tmp_path: Path) -> None:
    file, same, other = (tmp_path / name for name in "abc")
    file.write_bytes(b"weights" * 1000)
    same.write_bytes(b"weights" * 1000)
    other.write_bytes(b"weights" * 999 + b"Weights")
    assert numerics([file], "bf16") == numerics([same], "bf16")
    assert len({numerics([file], "bf16"), numerics([file], "int8"), numerics([other], "bf16")}) == 3


def test_engines_tell_it(llamacpp_engine: LocalEngine, openvino_engine: LocalEngine) -> None:
    assert llamacpp_engine.card.numerics
    assert openvino_engine.card.numerics not in ("", llamacpp_engine.card.numerics)
