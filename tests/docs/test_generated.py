"""The documents say what the code says: no stale table, no link or file name that leads nowhere."""

import re
from pathlib import Path

import pytest
from tools import docgen

from tests.docs.support import DOCUMENTS, ROOT

LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)")
FILE = re.compile(r"`((?!\S*NAME)(?:[\w.]+/)+[\w.]*)`")
"""A path in backticks; with NAME in it, it is for the reader to fill in."""


def anchors(document: Path) -> set[str]:
    """`## A *new* key!` is reached as `#a-new-key`."""
    titles = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def leads_somewhere(document: Path, link: str, anchor: str) -> bool:
    target = document.parent / link if link else document
    return target.exists() and (not anchor or anchor in anchors(target))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("document", docgen.DOCS, ids=name)
def test_tables_are_fresh(document: Path) -> None:
    text = document.read_text()
    assert docgen.rewritten(text) == text, "run `python -m tools.docgen`"


def test_every_table_is_used() -> None:
    used = {match["name"] for path in docgen.DOCS for match in docgen.TABLE.finditer(path.read_text())}
    assert used == set(docgen.TABLES)


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_links_lead_somewhere(document: Path) -> None:
    links = LINK.findall(document.read_text())
    broken = [f"{link}#{anchor}" for link, anchor in links if not leads_somewhere(document, link, anchor)]
    assert not broken


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_named_files_exist(document: Path) -> None:
    missing = [file for file in FILE.findall(document.read_text()) if not (ROOT / file).exists()]
    # What commands make is there when they were run.
    assert not [file for file in missing if not file.startswith("build/")]
