"""Ids of what the server makes."""

from os import urandom


def new_id(prefix: str) -> str:
    """`new_id("msg_")` gives `msg_` and 32 hexadecimal digits."""
    return prefix + urandom(16).hex()
