"""Engines with `generate_request`, as tokenspeed's AsyncLLM and SGLang's Engine have it."""

from dragoman.engines.asyncllm.engine import AsyncLLMEngine

__all__ = ["AsyncLLMEngine"]
