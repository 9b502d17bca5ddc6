"""Texts and lists with nothing in them: refused or answered, and the engine lives."""

from typing import Any

import pytest

from tests.attacks.bodies import SOCKET, changed
from tests.attacks.frame import Frame

BLANKS: tuple[Any, ...] = ("", " ", "\n", "\t\u3000", "\x00", [], [""], [[]], [[], [1]], ["", "a"])
PLACES = [
    ("/v1/completions", "prompt"),
    ("/v1/chat/completions", "messages[0].content"),
    ("/v1/chat/completions", "messages"),
    ("/v1/responses", "input"),
    (SOCKET, "input"),
    ("/v1/embeddings", "input"),
    ("/v1/rerank", "query"),
    ("/v1/rerank", "documents"),
    ("/v1/score", "text_2"),
    ("/tokenize", "prompt"),
    ("/detokenize", "tokens"),
    ("/parse/function_call", "text"),
]


@pytest.mark.parametrize(("route", "place"), PLACES, ids=" ".join)
def test_nothing_where_something_is_expected(frame: Frame, route: str, place: str) -> None:
    for blank in BLANKS:
        assert frame.sent(route, changed(route, place, blank)).status in (200, 400)
