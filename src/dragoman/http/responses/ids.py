"""Ids of what the server makes."""

from secrets import token_hex


def new_id(prefix: str) -> str:
    """`new_id("msg_")` gives `msg_` and 32 hexadecimal digits."""
    return prefix + token_hex(16)
