"""Random conversations with tools over vLLM, and the ids of every turn."""

from tests.torture.trajectories import over_vllm as run

__all__ = ["run"]
