"""Parsers that are measured side by side, each in an interpreter of its own, which may have no dragoman."""
