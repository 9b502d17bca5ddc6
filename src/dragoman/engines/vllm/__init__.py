"""vLLM as an engine. It is imported when an engine is opened, not before."""

from dragoman.engines.vllm.engine import VllmEngine, VllmGenerating, open_vllm
from dragoman.engines.vllm.options import VllmOptions

__all__ = ["VllmEngine", "VllmGenerating", "VllmOptions", "open_vllm"]
