"""Runs that are too long for every change: `make torture`."""
