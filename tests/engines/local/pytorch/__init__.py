"""Tests of the runner over PyTorch."""
