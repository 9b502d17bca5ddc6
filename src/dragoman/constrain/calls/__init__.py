"""Grammars of tool calls in a model's syntax, and of the answer around them."""
