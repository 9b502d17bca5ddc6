"""What `python -m bench.gpu --check` says of the machine that is there."""

import pytest

pytest.importorskip("torch", reason="TORCH IS NOT INSTALLED: make torch")

from bench.errors import BenchError
from bench.gpu_check import APART, check


def test_a_family_is_compared(capsys: pytest.CaptureFixture[str]) -> None:
    check(["qwen3, tied"], contract=False, rounded=["llama"])
    text = capsys.readouterr().out
    assert text.count("answers the same in company") == 3
    assert "llama, fp8: apart by" in text
    assert "from llama.cpp" in text


def test_what_differs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in APART:
        monkeypatch.setitem(APART, kind, -1.0)
    with pytest.raises(BenchError, match="llama: log probabilities are apart"):
        check(["llama"], contract=False)
