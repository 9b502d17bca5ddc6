"""The documents, and the code in them."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
DOCUMENTS = [*sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("*.md"))]
_BLOCK = re.compile(r"^```(?P<language>\w+)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(document: str, language: str) -> list[str]:
    """The code blocks of a document that are in this language."""
    found = _BLOCK.finditer((ROOT / document).read_text())
    return [block["code"] for block in found if block["language"] == language]
