from pathlib import Path

from tests.docs.test_examples import run


def test_the_example_of_the_document_runs(tmp_path: Path) -> None:
    run(tmp_path, "docs/store.md")
