"""The shape of the code: rooms import one way, files and functions stay small."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "dragoman"
ROOMS = [
    "cli",
    "http",
    "api",
    "turns",
    "store",
    "prompt",
    "engines",
    "constrain",
    "dialects",
    "mcp",
    "client",
]
"""Data goes this way; a room imports from rooms to its right, never back."""
FILES = sorted(SOURCE.rglob("*.py"))


def name(file: Path) -> str:
    return str(file.relative_to(SOURCE))


def imported_rooms(tree: ast.AST) -> set[str]:
    modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    parts = [module.split(".") for module in modules if module.startswith("dragoman.")]
    return {part[1] for part in parts} & set(ROOMS)


@pytest.mark.parametrize("file", FILES, ids=name)
def test_rooms_import_one_way(file: Path) -> None:
    room = file.relative_to(SOURCE).parts[0]
    if room not in ROOMS:
        return
    back = {
        other
        for other in imported_rooms(ast.parse(file.read_text()))
        if ROOMS.index(other) < ROOMS.index(room)
    }
    assert not back


@pytest.mark.parametrize("file", FILES, ids=name)
def test_files_stay_small(file: Path) -> None:
    assert len(file.read_text().splitlines()) <= 500


@pytest.mark.parametrize("file", FILES, ids=name)
def test_functions_stay_small(file: Path) -> None:
    functions = [
        n
        for n in ast.walk(ast.parse(file.read_text()))
        if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    long = {
        f.name: f.end_lineno - f.lineno for f in functions if f.end_lineno and f.end_lineno - f.lineno > 50
    }
    assert not long


def test_templates_are_compiled_in_one_place() -> None:
    """A second, unguarded environment is how others were broken into (CVE-2026-5760)."""
    users = {
        name(file)
        for file in FILES
        if "import jinja2" in file.read_text() or "from jinja2" in file.read_text()
    }
    assert {str(Path(user).parent) for user in users} <= {"prompt"}


def test_nothing_evaluates_or_unpickles() -> None:
    bad = {"eval", "exec", "pickle", "marshal", "dill"}
    for file in FILES:
        tree = ast.parse(file.read_text())
        called = {
            n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
        }
        imported = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
        assert not bad & (called | imported), file
