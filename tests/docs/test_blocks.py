"""Every block of Python and of a shell in every document is run, or a comment before it says what tries it.

Python of a page is run block after block, against a model that says anything, within what it is held to. Of a
shell's lines `curl` is run as it is; of `dragoman` it is tried whether there are such a command and such
flags; and `make` and `pip` name what there is.
"""

import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dragoman
from dragoman import cli
from dragoman.engines.local import LocalEngine, LocalOptions
from tests.docs.support import DOCUMENTS, ROOT, read_blocks
from tests.support.parrot import TEMPLATE
from tests.support.tiny_gguf import write_tiny

NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]
TRIED_ELSEWHERE = {
    "docs/engines.md": "tests/docs/test_examples.py",
    "docs/existing_engines.md": "tests/docs/test_examples.py",
    "docs/embedded.md": "tests/docs/test_examples.py",
    "docs/dialects.md": "tests/docs/test_examples.py",
    "docs/settings.md": "tests/docs/test_examples.py",
    "docs/agents.md": "tests/conformance/test_agents.py",
}
"""Whose Python is run by tests of their own, which also look at what came of it."""
USUAL = re.compile(r"(?:http://)?(?:127\.0\.0\.1|localhost):8000")
QUESTION = (
    '{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions",'
    ' "body": {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}}\n'
)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("data")
    file = write_tiny(folder / "tiny.gguf", TEMPLATE, context=4096)
    engine = LocalEngine.open(file, LocalOptions(runner="llamacpp", context=4096, slots=2))
    # A dialect with calls and without reasoning, or it would think forever.
    settings: dict[str, Any] = {"dialect": "granite4", "sampling": {"max_tokens": 400, "seed": 1}}
    settings["model_alias"] = ["SmolLM2-135M-Instruct.Q4_1"]
    with dragoman.background(engine, data_dir=str(folder), **settings) as url:
        yield url


def pages_with(*languages: str) -> list[str]:
    return [
        name
        for name in NAMES
        if any(block.language in languages and not block.reason for block in read_blocks(name))
    ]


@pytest.mark.parametrize("page", [name for name in pages_with("python") if name not in TRIED_ELSEWHERE])
def test_python_runs(page: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("questions.jsonl").write_text(QUESTION)
    code = [block.code for block in read_blocks(page) if block.language == "python" and not block.reason]
    exec(compile(USUAL.sub(url, "\n".join(code)), page, "exec"), {"__name__": page})  # noqa: S102


def test_pages_that_are_tried_elsewhere_are_named_there() -> None:
    for page, tests in TRIED_ELSEWHERE.items():
        assert page in (ROOT / tests).read_text()


def commands(code: str) -> Iterator[str]:
    """Each command of a block, over as many lines as it takes. Lines behind `$` are what was answered."""
    prompt = "$ " if any(line.startswith("$ ") for line in code.splitlines()) else ""
    lines = iter(code.splitlines())
    for line in lines:
        if not line.startswith(prompt) or not line.strip():
            continue
        command = line.removeprefix(prompt)
        while not is_whole(command):
            command += "\n" + next(lines)
        yield command


def is_whole(command: str) -> bool:
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return False
    return not command.endswith("\\")


def parts(command: str) -> Iterator[list[str]]:
    """The words of each program of a pipe or a chain, without variables that are set for it."""
    words = shlex.split(command, comments=True)
    while words:
        ends = [offset for offset, word in enumerate(words) if word in ("|", "&&", "&")]
        end = ends[0] if ends else len(words)
        part, words = words[:end], words[end + 1 :]
        while part and re.fullmatch(r"[A-Z_]+=.*", part[0], re.DOTALL):
            part = part[1:]
        if part:
            yield part


def try_dragoman(words: list[str], url: str) -> None:
    cli.read([word for word in words if word not in (">", ">>")])


def try_curl(words: list[str], url: str) -> None:
    texts = ["-sS", "-o", "/dev/null", "-w", "%{http_code}"]
    asked = [USUAL.sub(url, word) for word in words]
    done = subprocess.run(["curl", *texts, *asked], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("2"), (words, done.stdout, done.stderr)


def try_make(words: list[str], url: str) -> None:
    assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words


def try_pip(words: list[str], url: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = [result for word in words for result in re.findall(r"^dragoman\[(.*)\]", word)]
    assert set(",".join(named).split(",")) - {""} <= set(extras)


def take_words(words: list[str], url: str) -> None:
    """There is nothing to try."""


TRIALS = {
    "dragoman": try_dragoman,
    "curl": try_curl,
    "make": try_make,
    "pip": try_pip,
    **dict.fromkeys(("cat", "export"), take_words),
}


@pytest.mark.parametrize("page", pages_with("bash", "console"))
def test_shell_runs(page: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for block in read_blocks(page):
        if block.language in ("bash", "console") and not block.reason:
            for command in commands(block.code):
                for program, *words in parts(command):
                    assert program in TRIALS, f"{program}: run it, or say before the block why not"
                    TRIALS[program](words, url)
