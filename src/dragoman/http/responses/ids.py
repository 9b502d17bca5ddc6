"""Ids of what the server makes."""

from uuid import uuid4


def new_id(prefix: str) -> str:
    """`new_id("msg_")` gives `msg_` and 32 hexadecimal digits."""
    return prefix + uuid4().hex
