"""What the source must not have in it anywhere: each is how another server was broken into."""

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parent.parent.parent / "src" / "dragoman"
TREES = {str(file.relative_to(SOURCE)): ast.parse(file.read_text()) for file in sorted(SOURCE.rglob("*.py"))}
RUNS_CODE = {"eval", "exec", "compile", "__import__", "literal_eval", "execfile"}
UNPICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "yaml"}
LOADS = {"torch.load", "numpy.load", "np.load", "joblib.load", "os.system", "os.popen", "tempfile.mktemp"}


def called(tree: ast.AST) -> Iterator[str]:
    """The names of all that is called, as far as they are written down: `torch.load`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def users(module: str) -> set[str]:
    """The files that import a module, or a part of it."""
    return {
        name for name, tree in TREES.items() if any(each.split(".")[0] == module for each in imported(tree))
    }


def test_nothing_is_run_that_was_read() -> None:
    for name, tree in TREES.items():
        calls = set(called(tree))
        assert not calls & (RUNS_CODE | LOADS), name
        assert not {call for call in calls if call.endswith(".literal_eval")}, name


def test_nothing_is_unpickled() -> None:
    assert not set().union(*map(users, UNPICKLES))


def test_no_shell_is_asked() -> None:
    for name, tree in TREES.items():
        keywords = [node for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg == "shell"]
        assert not keywords, name


def test_sql_is_never_put_together_from_texts_of_clients() -> None:
    """A statement is a constant, or is made of the names of our own constants."""
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith((".execute", ".executemany")):
                statement = node.args[0] if node.args else None
                assert not isinstance(statement, ast.BinOp), (name, ast.unparse(node))
                pieces = statement.values if isinstance(statement, ast.JoinedStr) else []
                put_in = [ast.unparse(one.value) for one in pieces if isinstance(one, ast.FormattedValue)]
                assert all(map(str.isupper, put_in)), (name, put_in)


def test_templates_are_made_in_one_place() -> None:
    assert {Path(user).parent.name for user in users("jinja2")} == {"prompt"}
    written = [name for name, tree in TREES.items() if "SandboxedEnvironment" in ast.unparse(tree)]
    assert written == ["prompt/template.py"]


def test_only_what_is_meant_to_go_out_can_go_out() -> None:
    """The client, MCP, engines and commands ask elsewhere; of what reads a request, one file does."""
    asks = users("httpx") - {"media/fetch.py"}
    assert {Path(user).parts[0] for user in asks} <= {"client", "mcp", "engines", "cli"}
    assert users("requests") == users("aiohttp") == set()
