"""Calls of tools in the syntax of a model, and the answer around them."""
