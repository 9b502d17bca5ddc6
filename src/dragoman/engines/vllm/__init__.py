"""vLLM under dragoman. It is imported when an engine is opened, not before."""

from dragoman.engines.vllm.engine import VllmEngine
from dragoman.engines.vllm.generating import VllmGenerating
from dragoman.engines.vllm.opening import open_vllm
from dragoman.engines.vllm.options import VllmOptions

__all__ = ["VllmEngine", "VllmGenerating", "VllmOptions", "open_vllm"]
