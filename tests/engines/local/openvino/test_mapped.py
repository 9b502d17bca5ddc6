"""What was read of a file that is mapped does not stay in memory."""

import re
from pathlib import Path

import numpy as np
import pytest

from dragoman.engines.local import os_memory
from dragoman.engines.local.openvino import conversion_cache
from dragoman.engines.local.os_memory import read_pages_given_back
from tests.engines.local.openvino.conftest import write_model

SMAPS = Path("/proc/self/smaps")
MIB = 1 << 20


def resident(file: Path) -> int:
    """Kibibytes of a mapped file that are in memory."""
    parts = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", SMAPS.read_text(), flags=re.MULTILINE)
    ours = [part for part in parts if part.partition("\n")[0].endswith(str(file))]
    return sum(int(result) for part in ours for result in re.findall(r"^Rss: +(\d+)", part, re.MULTILINE))


@pytest.mark.skipif(not SMAPS.exists(), reason="the system does not say what is in memory")
def test_pages_that_were_read_are_given_back_and_can_be_read_again(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(range(256)) * (8 * MIB // 256))
    with read_pages_given_back(file):
        numbers = np.memmap(file, np.uint8, "r")
        before = int(numbers.sum(dtype=np.int64))
    assert resident(file) == 0
    assert int(numbers.sum(dtype=np.int64)) == before
    assert resident(file) == 8 * MIB // 1024


def test_a_file_that_is_converted_does_not_stay_in_memory(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths: list[Path] = []
    monkeypatch.setattr(os_memory, "give_back", paths.append)
    # In the usual one another test may have put the same model.
    monkeypatch.setenv("DRAGOMAN_CACHE", str(tmp_path))
    model = write_model(tmp_path / "model.gguf", weights)
    conversion_cache.ensure_converted(model)
    assert model in paths
