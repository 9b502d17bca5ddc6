"""What a check has found."""

from typing import Literal, TypeAlias

from msgspec import Struct

Verdict: TypeAlias = Literal["ok", "warning", "failed"]


class Finding(Struct, frozen=True):
    name: str
    verdict: Verdict
    text: str
    advice: str = ""
