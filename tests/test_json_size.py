"""How much JSON there is, counted before it is decoded."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman import json_size
from dragoman.errors import BadRequest
from dragoman.json_size import check_json_size, strip_strings, values
from dragoman.limits import Limits

PLAIN = st.none() | st.booleans() | st.integers(0, 9) | st.text(st.sampled_from('a"\\[{,:}]é'))
VALUES = st.recursive(PLAIN, lambda each: st.lists(each) | st.dictionaries(st.text(), each))


def entries(value: object) -> int:
    """The values of a value, itself included; an empty list counts as if it had one."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return 1 + max(1, sum(map(entries, value)))
    return 1


@given(VALUES, st.integers(1, 5), st.booleans())
def test_strings_do_not_count_wherever_the_text_is_cut(value: object, piece: int, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_size, "CHUNK_BYTES", piece)
        cut = strip_strings(text)
    assert cut == strip_strings(text)
    assert b'"' not in cut and b"a" not in cut.replace(b"false", b"")
    assert values(text) == entries(value) - 1


@pytest.mark.parametrize(
    ("text", "what"),
    [("[1,1,1,1]", "values"), ("[[[", "lists"), ('{"a":1,"b":2}', "members")],
)
def test_too_much_is_named(text: str, what: str) -> None:
    limits = Limits(json_values=3, json_lists=2, json_names=1)
    with pytest.raises(BadRequest, match=f"of the body has more than . {what}"):
        check_json_size(strip_strings(text.encode()), limits, "the body")
