"""Dialect declarations: a module per family or group of similar families, each with a tuple `DIALECTS`."""
