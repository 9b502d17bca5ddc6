"""The shape of the code: rooms import one way, files and functions stay small, names mean one thing."""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "dragoman"
FILES, FILE_LINES, FUNCTION_LINES = 400, 700, 50
ROOMS = [
    "ray",
    "cli",
    "http",
    "models",
    "responses",
    "batches",
    "api",
    "turns",
    "store",
    "prompt",
    "engines",
    "client",
    "constrain",
    "dialects",
    "mcp",
    "routing",
    "media",
    "hub",
]
"""Data goes this way; a room imports from rooms to its right, never back."""


@cache
def sources() -> list[tuple[str, str, ast.Module]]:
    """Name, text and syntax of every file. A test goes through all and names each that breaks its rule."""
    files = sorted(SOURCE.rglob("*.py"))
    return [(str(f.relative_to(SOURCE)), f.read_text(), ast.parse(f.read_text())) for f in files]


def imported_rooms(tree: ast.AST) -> set[str]:
    modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    parts = [module.split(".") for module in modules if module.startswith("dragoman.")]
    return {part[1] for part in parts} & set(ROOMS)


def test_rooms_import_one_way() -> None:
    back = [
        f"{file} imports from {other}"
        for file, _, tree in sources()
        for other in sorted(imported_rooms(tree))
        if (room := file.split("/")[0]) in ROOMS and ROOMS.index(other) < ROOMS.index(room)
    ]
    assert not back, "\n".join(back)


def test_rooms_below_the_apis_name_no_field() -> None:
    """They say which part of a request is wrong; what that is called, each API says for itself."""
    below = ROOMS[ROOMS.index("api") + 1 :]
    calls = [
        (file, node)
        for file, _, tree in sources()
        if file.split("/")[0] in below
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") != "SettingsError"
    ]
    named = [
        f"{file} names {word.value.value!r}"
        for file, call in calls
        for word in call.keywords
        if word.arg == "param" and isinstance(word.value, ast.Constant) and word.value.value
    ]
    named += [
        f"{file} names {call.args[2].value!r}"
        for file, call in calls
        if getattr(call.func, "id", "") == "check_count" and isinstance(call.args[2], ast.Constant)
    ]
    assert not named, "\n".join(named)


def test_files_stay_small() -> None:
    lines = {file: len(text.splitlines()) for file, text, _ in sources()}
    long = [f"{file} has {count} lines" for file, count in lines.items() if count > FILE_LINES]
    assert not long, "\n".join(long)


def test_files_stay_few() -> None:
    """One idea a file, not one function a file."""
    assert len(sources()) <= FILES


def test_requests_walk_through_few_files() -> None:
    walked = subprocess.run(
        [sys.executable, "-m", "tools.walks", "--files"],
        cwd=SOURCE.parent.parent,
        capture_output=True,
        text=True,
    )
    assert walked.returncode == 0, walked.stdout + walked.stderr


def test_a_class_has_a_name_of_its_own() -> None:
    """In private classes too: whoever looks for a name finds one thing."""
    files = defaultdict(list)
    for file, _, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                files[node.name].append(file)
    twice = [f"{name} is in {' and '.join(texts)}" for name, texts in files.items() if len(texts) > 1]
    assert not twice, "\n".join(twice)


def test_files_that_are_named_are_there() -> None:
    """In comments and docstrings, which nothing else would notice when a file moves."""
    root = SOURCE.parent.parent
    there = [str(path) for folder in ("src", "tests", "tools") for path in (root / folder).rglob("*.py")]
    named = {
        (file, name) for file, text, _ in sources() for name in re.findall(r"(?<![\w/.])[\w/]+\.py\b", text)
    }
    gone = [f"{file} names {name}" for file, name in named if not any(f.endswith(f"/{name}") for f in there)]
    assert not gone, "\n".join(gone)


EXTERNAL = {
    *(
        "MADV_COLLAPSE",
        "LLAMA_LOAD_MODE_NONE",
        "sem_t",
        "PlaceholderRange",
        "destructiveHint",
        "content_part",
    ),
    *("call_8f2", "call_tool", "namespace__name", "label__name", "on_", "py", "stack_t", "InferRequest"),
}
"""Names of other projects, and examples, that stand in backticks."""
SPAN, CODE = re.compile(r"`([^`\n]+)`"), re.compile(r"([A-Za-z_][\w.]*)(\(.*\))?")
STEP = re.compile(r"^    (_[a-z]\w*)  +\w", re.MULTILINE)


def defined_names() -> set[str]:
    """Every name in any code of the repository, and names of files."""
    names: set[str] = set()
    for folder in ("src", "tests", "tools", "bench", "examples"):
        for path in (SOURCE.parent.parent / folder).rglob("*.py"):
            names.add(path.stem)
            for node in ast.walk(ast.parse(path.read_text())):
                for field in ("id", "attr", "name", "arg", "asname", "module"):
                    if isinstance(name := getattr(node, field, None), str):
                        names |= {name, *name.split(".")}
                if (
                    isinstance(node, ast.Constant)
                    and isinstance(node.value, str)
                    and node.value.isidentifier()
                ):
                    names.add(node.value)
    return names


def described_names(tree: ast.Module) -> Iterator[str]:
    """Functions, classes and methods in backticks and diagrams of docstrings."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            continue
        text = node.value.value if isinstance(node.value.value, str) else ""
        for match in map(CODE.fullmatch, SPAN.findall(text)):
            if match and (match[2] or re.search(r"[a-z][A-Z]|_", match[1])):
                yield from match[1].split(".")
        yield from STEP.findall(text)


def test_names_in_docstrings_are_there() -> None:
    """Functions and classes that a docstring names, which nothing else would notice when they are renamed."""
    there = defined_names() | EXTERNAL
    gone = [
        f"{file} names {name}"
        for file, _, tree in sources()
        for name in described_names(tree)
        if name and name not in there
    ]
    assert not gone, "\n".join(gone)


def test_functions_stay_small() -> None:
    long = [
        f"{node.name} in {file} has {lines} lines"
        for file, _, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or node.lineno) - node.lineno) > FUNCTION_LINES
    ]
    assert not long, "\n".join(long)


def test_templates_are_compiled_in_one_place() -> None:
    """A second, unguarded environment is how others were broken into (CVE-2026-5760)."""
    users = {file for file, text, _ in sources() if "import jinja2" in text or "from jinja2" in text}
    assert {str(Path(user).parent) for user in users} <= {"prompt"}


def test_nothing_evaluates_or_unpickles() -> None:
    bad = {"eval", "exec", "pickle", "marshal", "dill"}
    for file, _, tree in sources():
        called = {
            n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
        }
        imported = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
        assert not bad & (called | imported), file
