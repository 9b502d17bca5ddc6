"""Engines and the engine protocol."""
