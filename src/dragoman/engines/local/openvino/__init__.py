"""The runner over OpenVINO: weights of four or eight bits, a paged KV cache, one graph."""

import os
import sys

# `import openvino` reports usage to a web service if this package can be imported, and works without it.
# Users of a local model did not ask for that.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]

# oneDNN caches the code that it has prepared for each number of rows. It reads this variable on first use;
# `compiled` limits what OpenVINO itself caches of the same.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "512")
