"""Engines and the protocol they share."""
