"""The documents, and the code in them."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
DOCUMENTS = [*sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("*.md"))]
_BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^>]+) -->\n)?```(?P<language>\w+)\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


class Block(NamedTuple):
    language: str
    code: str
    reason: str | None
    """Why it is not run by the tests of documents, as a comment before it says: what else tries it."""


def read_blocks(document: str) -> list[Block]:
    matches = _BLOCK.finditer((ROOT / document).read_text())
    return [Block(one["language"], one["code"], one["reason"]) for one in matches]


def blocks(document: str, language: str) -> list[str]:
    """The code blocks of a document that are in this language."""
    return [block.code for block in read_blocks(document) if block.language == language]
