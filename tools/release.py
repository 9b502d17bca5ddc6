"""Builds, checks and tags a version: `make release`, or `python -m tools.release --no-tag` without the tag.

The version is that of src/dragoman/_version.py. Nothing is done where the tree is not what would be released.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
DIST = ROOT / "dist"


def obstacles(version: str, changed: str, tags: str, changelog: str) -> Iterator[str]:
    """Why this version cannot be released yet."""
    if changed:
        yield f"these files are not committed:\n{changed}"
    if f"v{version}" in tags.split():
        yield f"the tag v{version} is there: what is released next has another version in _version.py"
    if not re.search(rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$", changelog, re.MULTILINE):
        yield f"CHANGELOG.md has no section `## {version} (YYYY-MM-DD)`"


def main() -> None:
    version = _version()
    changed, tags = _output("git", "status", "--porcelain"), _output("git", "tag", "--list")
    texts = list(obstacles(version, changed, tags, (ROOT / "CHANGELOG.md").read_text()))
    if texts:
        sys.exit("Nothing was released:\n" + "\n".join(f"- {obstacle}" for obstacle in texts))
    built = _build()
    _check(built, version)
    if "--no-tag" in sys.argv:
        sys.stdout.write(f"{version} is good; it was not tagged\n")
        return
    _run("git", "tag", "--annotate", f"v{version}", "--message", f"dragoman {version}")
    sys.stdout.write(f"v{version} is tagged. Push the tag, and upload dist/\n")


def _version() -> str:
    match = re.search(r'"(.+)"', (ROOT / "src" / "dragoman" / "_version.py").read_text())
    assert match is not None
    return match[1]


def _build() -> list[str]:
    shutil.rmtree(DIST, ignore_errors=True)
    _run(sys.executable, "-m", "build", "--outdir", str(DIST))
    return sorted(map(str, DIST.iterdir()))


def _check(built: list[str], version: str) -> None:
    """The archives are well formed, and the wheel works where nothing else is."""
    _run(sys.executable, "-m", "twine", "check", "--strict", *built)
    [wheel] = [file for file in built if file.endswith(".whl")]
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder) / "bin" / "python")
        _run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel)
        text = _output(str(Path(folder) / "bin" / "dragoman"), "--version", cwd=Path(folder))
    if version not in text.split():
        sys.exit(f"The wheel says that it is {text!r}, not {version}")


def _run(*command: str) -> None:
    subprocess.run(command, cwd=ROOT, check=True)


def _output(*command: str, cwd: Path = ROOT) -> str:
    return subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
