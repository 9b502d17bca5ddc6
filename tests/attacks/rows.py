"""What went wrong elsewhere, and what shows that it does not here: `rows.toml`, read."""

import ast
from functools import cache
from pathlib import Path

import msgspec
from msgspec import Struct

from tests.torture.parts import BY_NAME, PAGE

FILE = Path(__file__).parent / "rows.toml"
TESTS = FILE.parent.parent
ATTACKS, PROMISES = 146, 25


class Row(Struct, frozen=True, forbid_unknown_fields=True):
    number: int
    what: str
    known_as: str = ""
    """The names under which it was published."""
    shown_by: tuple[str, ...] = ()
    """Tests as `attacks/test_rows.py::test_no_row_is_missing`, parts of `make torture` as `torture/cuts`."""
    why_not: str = ""
    """Why it, or some of it, cannot happen here."""


class Rows(Struct, frozen=True, forbid_unknown_fields=True):
    attack: tuple[Row, ...]
    promise: tuple[Row, ...]


def read() -> Rows:
    return msgspec.toml.decode(FILE.read_bytes(), type=Rows)


def exists(shown_by: str) -> bool:
    file, _, name = shown_by.partition("::")
    if not name:
        return file.removeprefix("torture/") in {*PAGE, *BY_NAME}
    return name in _tests(TESTS / file)


@cache
def _tests(file: Path) -> set[str]:
    if not file.exists():
        return set()
    tree = ast.parse(file.read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {node.name for node in functions if node.name.startswith("test_")}
