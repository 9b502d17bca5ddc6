"""Whoever comes from another server is told of flags and fields that there are."""

import re
from pathlib import Path

import pytest

from dragoman.cli import COMMANDS, build
from tests.docs.support import ROOT

PAGES = sorted((ROOT / "docs" / "migrate").glob("*.md"))


def rows(page: Path) -> list[list[str]]:
    """The cells of every row of every table."""
    lines = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_flags_are_ours(page: Path) -> None:
    commands = build()[1]
    known = {flag for parser in commands.values() for flag in parser._option_string_actions}
    texts = {flag for row in rows(page) for code in re.findall(r"`([^`]*)`", row[1]) for flag in _flags(code)}
    assert texts and texts <= known, texts - known


def _flags(code: str) -> list[str]:
    return re.findall(r"(?<!\S)--?[a-z][a-z-]+", code)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_are_ours(page: Path) -> None:
    items = {name for row in rows(page) for name in re.findall(r"`dragoman ([a-z-]+)", row[1])}
    assert items <= set(COMMANDS)


def served() -> set[str]:
    """The paths of the generated table of routes."""
    return set(re.findall(r"^\| `[A-Z]+ (\S+)` \|", (ROOT / "docs/api.md").read_text(), re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_routes_are_ours(page: Path) -> None:
    items = {route for row in rows(page) for route in re.findall(r"`(?:GET |POST )?(/[a-z][\w/-]*)`", row[1])}
    items -= {"/set"}  # A command of a talk.
    assert items <= served(), items - served()


def test_what_is_the_same_is_there() -> None:
    for page in PAGES:
        for row in rows(page):
            if row[1] == "the same" or row[1].startswith("the same;"):
                routes = re.findall(r"(?:^|[ `])(/[a-z][\w/-]*)`", row[0])
                assert set(routes) <= served(), (page.name, set(routes) - served())
