"""Nobody is told that a model is served."""

import subprocess
import sys

import pytest

pytest.importorskip("openvino")

SCRIPT = """
import sys
told, outside = [], ("socket.", "subprocess.", "os.fork")
sys.addaudithook(lambda name, _: told.append(name) if name.startswith(outside) else None)
import dragoman.engines.local.openvino.runner
assert "openvino" in sys.modules
print(told, sorted(name for name in sys.modules if name.startswith("openvino_telemetry.")))
"""


def test_openvino_is_imported_without_its_telemetry() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] []"
