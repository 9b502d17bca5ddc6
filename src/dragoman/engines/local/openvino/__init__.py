"""The runner over OpenVINO: weights of four or eight bits, keys and values in pages, one graph."""

import os
import sys

# `import openvino` tells a web service of it where this package can be imported, and does without where not.
# Whoever serves a model at home did not ask for that.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]

# Its library for products keeps what it has prepared, for every number of rows that it has seen. It reads
# this when it is first used; `compiled` bounds what OpenVINO itself keeps of the same.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "512")
