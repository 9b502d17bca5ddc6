"""Law 4 with every template: a prompt goes on from the sampled ids wherever the template keeps their text.

Four turns (two calls, two texts), a vocabulary in which no encoder would choose the ids that are sampled, and
three kinds of clients. What the template keeps is told by its text alone, which nothing here has made.
"""

from collections import Counter
from pathlib import Path

import pytest

from dragoman.errors import TemplateError
from tests.prompt.support import SHARED, TEMPLATES
from tests.support.seams import CLIENTS, WRITES, Model, Row, Writes, held

OWN = sorted(TEMPLATES.rglob("*.jinja"))
PUBLISHED = sorted((SHARED / "templates").glob("*.jinja"))
REFUSES = ("google-gemma-2-2b-it", "llama-cpp-deepseek-r1")
"""They take no calls, or no text beside them."""
AS_THE_TEMPLATE, AS_THE_DIALECT = WRITES


def table(path: Path, writes: Writes, history: str = "template") -> dict[str, list[Row]]:
    model = Model(path.read_text())
    try:
        return {client: list(held(model, client, writes, history)) for client in CLIENTS}  # type: ignore[arg-type]
    except TemplateError:
        if path.stem in REFUSES:
            pytest.skip("the template has no place for this conversation")
        raise


@pytest.mark.parametrize("path", [*OWN, *PUBLISHED], ids=lambda path: path.stem)
def test_ids_are_kept_wherever_the_template_keeps_the_text(path: Path) -> None:
    for client, rows in table(path, AS_THE_TEMPLATE).items():
        lost = [number for number, row in enumerate(rows) if row.text_kept and not row.goes_on]
        assert lost == [], client


@pytest.mark.parametrize("path", [*OWN, *PUBLISHED], ids=lambda path: path.stem)
def test_what_was_sampled_is_gone_on_from_whatever_the_template_makes_of_it(path: Path) -> None:
    for writes in WRITES:
        for client, rows in table(path, writes, "sampled").items():
            assert [(row.whole, row.rest_fits) for row in rows] == [(True, True)] * 3, (writes, client)


@pytest.mark.parametrize("path", [*OWN, *PUBLISHED], ids=lambda path: path.stem)
def test_words_keep_their_ids_where_what_is_before_them_was_changed(path: Path) -> None:
    for client, rows in table(path, AS_THE_TEMPLATE).items():
        assert all(row.words_kept for row in rows), client


def test_the_table_is_not_empty() -> None:
    """What is kept by our own templates, of three turns each."""
    kept = Counter[str]()
    for path in OWN:
        for client, rows in table(path, AS_THE_TEMPLATE).items():
            kept[client] += sum(row.goes_on for row in rows)
    print(kept, len(OWN))
    assert kept["has no reasoning"] > 2 * len(OWN)
    assert kept["sends it back"] > 2 * len(OWN)
