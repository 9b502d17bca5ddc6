"""vLLM as an engine. It is imported when an engine is opened, not before."""

from dragoman.engines.vllm.engine import VllmAsyncLLMEngine, VllmEngine, open_vllm
from dragoman.engines.vllm.options import VllmOptions

__all__ = ["VllmAsyncLLMEngine", "VllmEngine", "VllmOptions", "open_vllm"]
