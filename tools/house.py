"""Texts of the code drawn at random, for a person to judge: `python -m tools.house --texts 40`.

They are docstrings, comments, messages of errors, log lines and help under `src/`. A reader who knows vLLM
and httpx, but not this project, should understand them at first reading. `tools/words.py` checks what a
machine can.
"""

import argparse
import ast
import io
import random
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"
LOG_METHODS = frozenset({"debug", "info", "warning", "error", "exception", "critical"})
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Text(Struct, frozen=True):
    kind: str
    file: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line}  [{self.kind}]\n{self.text}\n"


def texts(folder: Path = SOURCE) -> list[Text]:
    """Every text of the Python files of a folder, in the order of files and lines."""
    result: list[Text] = []
    for file in sorted(folder.rglob("*.py")):
        source = file.read_text("utf-8")
        tree = ast.parse(source)
        result += sorted([*docstrings(file, tree), *comments(file, source), *messages(file, tree)], key=_line)
    return result


def _line(text: Text) -> int:
    return text.line


def docstrings(file: Path, tree: ast.Module) -> Iterator[Text]:
    """Of modules, classes and functions, and the strings below attributes and constants."""
    for node in ast.walk(tree):
        for number, child in enumerate(getattr(node, "body", []) if isinstance(node, Documented) else []):
            if not isinstance(child, ast.Expr) or not isinstance(child.value, ast.Constant):
                continue
            if isinstance(child.value.value, str):
                kind = "docstring" if number == 0 else "attribute"
                yield Text(kind, file, child.lineno, child.value.value.strip())


def comments(file: Path, source: str) -> Iterator[Text]:
    """Runs of comment lines, each as one text; comments for tools are left out."""
    lines: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or token.string.startswith(("# type:", "# noqa", "#!")):
            continue
        if lines and token.start[0] != lines[-1][0] + 1:
            yield _comment(file, lines)
            lines = []
        lines.append((token.start[0], token.string.lstrip("# ")))
    if lines:
        yield _comment(file, lines)


def _comment(file: Path, lines: list[tuple[int, str]]) -> Text:
    return Text("comment", file, lines[0][0], "\n".join(text for _, text in lines))


def messages(file: Path, tree: ast.Module) -> Iterator[Text]:
    """String arguments of exceptions that are raised and of log calls, and names called `message`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield from _strings("error", file, node.exc.args)
        elif isinstance(node, ast.Assign) and any(ast.unparse(each) == "message" for each in node.targets):
            yield from _strings("error", file, [node.value])
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in LOG_METHODS and "log" in ast.unparse(node.func.value):
                yield from _strings("log", file, node.args[:1])
            elif node.func.attr == "add_argument":
                helps = [word.value for word in node.keywords if word.arg == "help"]
                yield from _strings("help", file, helps)


def _strings(kind: str, file: Path, nodes: list[ast.expr]) -> Iterator[Text]:
    for node in nodes:
        if isinstance(node, ast.JoinedStr) or (
            isinstance(node, ast.Constant) and isinstance(node.value, str)
        ):
            yield Text(kind, file, node.lineno, ast.unparse(node))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.house", description=__doc__)
    parser.add_argument("--texts", type=int, default=40, metavar="N", help="how many to print [default: 40]")
    parser.add_argument("--seed", type=int, default=1, help="which ones [default: 1]")
    args = parser.parse_args(arguments)
    every = texts()
    drawn = random.Random(args.seed).sample(every, min(args.texts, len(every)))
    print(f"{len(drawn)} of {len(every)} texts, seed {args.seed}\n")
    print("\n".join(map(str, drawn)))


if __name__ == "__main__":
    sys.exit(main())
