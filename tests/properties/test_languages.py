"""Any ids, in any dialect, however they come: nothing raises, no id is lost, no special token is seen."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct

from dragoman.dialects.registry import get_dialect, list_dialects
from dragoman.engines.scripted import ByteTokenizer
from dragoman.turns.choice_reader import ChoiceReader, Detokenizer, ModelDialect
from dragoman.turns.spec import ParseOptions
from dragoman.types import Answer, Step, fold
from tests.support.flat import flat

pytestmark = pytest.mark.thorough

WORDS = ("f", "\n", " hi ", "é", '"', '{"name": "f", "arguments": {"a": "<"}}', '{"a": 1}', "f(a=1)", ":0")
SAID_OF_IT = ("name", "models", "aliases", "stems", "template_marks")
TOOL = {"function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}

readings = st.builds(
    ParseOptions,
    tools=st.just((TOOL,)),
    calls=st.booleans(),
    reasoning=st.booleans(),
    most_calls=st.sampled_from([None, 1]),
)


def markers(part: Any) -> Iterator[str]:
    """Every string of a declaration that could be a special token."""
    if isinstance(part, str):
        if len(part.strip()) > 1 and not part.strip().isalnum():
            yield part.strip()
    elif isinstance(part, tuple | frozenset):
        for each in part:
            yield from markers(each)
    elif isinstance(part, Struct):
        for name in part.__struct_fields__:
            if name not in SAID_OF_IT:
                yield from markers(getattr(part, name))


def language(name: str, *, special: bool) -> tuple[ModelDialect, range]:
    """A model that speaks a dialect and has an id for each of its markers, and these ids."""
    words = sorted(set(markers(get_dialect(name))))
    tokenizer = ByteTokenizer(words)
    ids = range(len(tokenizer.pieces) - len(words), len(tokenizer.pieces))
    if special:
        tokenizer.special_ids = {**tokenizer.special_ids, **dict(zip(words, ids, strict=True))}
    return ModelDialect(get_dialect(name), tokenizer), ids


def answer(language: ModelDialect, reading: ParseOptions, ids: list[int], burst: int, inside: bool) -> Answer:
    text = Detokenizer(language.pieces(reading), skip_special=True)
    reader = ChoiceReader(0, text, None, language.readers(reading)(inside, ()), most_calls=reading.most_calls)
    events: list[Any] = []
    for start in range(0, len(ids), burst):
        finish = "stop" if start + burst >= len(ids) else None
        if not reader.over:
            reader.read(Step(ids[start : start + burst], finish=finish), events)  # type: ignore[arg-type]
    return fold(events)


def told(answer: Answer) -> tuple[str, str, list[tuple[str, str]]]:
    return answer.text, answer.reasoning, [(call.name, call.arguments) for call in answer.calls]


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", list_dialects())
@settings(max_examples=10)
@given(st.data(), readings, st.integers(2, 50), st.booleans())
def test_any_ids(
    name: str, special: bool, data: st.DataObject, reading: ParseOptions, burst: int, inside: bool
) -> None:
    spoken, marks = language(name, special=special)
    word = st.sampled_from(WORDS).map(lambda text: list(text.encode()))
    mark = st.sampled_from(marks).map(lambda id_: [id_]) if marks else word
    ids = flat(data.draw(st.lists(word | mark, min_size=1, max_size=12)))
    one, many = (answer(spoken, reading, ids, each, inside) for each in (1, burst))
    assert told(one) == told(many)
    assert one.ids == many.ids == ids[: len(one.ids)]
    assert reading.most_calls or one.ids == ids
    assert len(one.calls) <= (reading.most_calls or 99)
    # A private character is no UTF-8, so this would raise.
    "".join([one.text, one.reasoning, *flat(told(one)[2])]).encode()
