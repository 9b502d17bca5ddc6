"""A fault: something that a client met with and a person would not accept."""

from typing import Literal, TypeAlias

Kind: TypeAlias = Literal[
    "5xx",
    "4xx",
    "error in a stream",
    "broken",
    "unfinished",
    "stuck",
    "differs",
    "unready",
    "growth",
    "log",
    "server",
]


class Fault(Exception):
    def __init__(self, kind: Kind, text: str, reply: bytes = b"", retry_after: bool = False) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind: Kind = kind
        self.text = text
        self.reply = reply
        self.is_retryable = retry_after
        """The server has said when to try again."""
