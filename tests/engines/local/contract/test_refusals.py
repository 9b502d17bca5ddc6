"""Jobs that cannot be run are refused before anything is queued for them."""

import asyncio
from typing import Any

import pytest

from dragoman.errors import BadRequest, ContextOverflow
from tests.engines.local.contract.subject import Subject

NOT_AN_ID = 1 << 20


@pytest.mark.parametrize(
    ("prompt", "kinds", "param"),
    [
        ([], {}, "prompt"),
        ([NOT_AN_ID], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([1], {"n": 0}, "n"),
        ([1], {"adapters": (("none", 1.0),)}, "model"),
        ([1], {"allowed_token_ids": ()}, "allowed_token_ids"),
        ([1], {"allowed_token_ids": (NOT_AN_ID,)}, "allowed_token_ids"),
        ([1], {"logit_bias": {NOT_AN_ID: 1.0}}, "logit_bias"),
        ([1], {"stop_token_ids": frozenset({NOT_AN_ID})}, "stop_token_ids"),
        ([1], {"bad_words": ((1, NOT_AN_ID),)}, "bad_words"),
    ],
)
def test_what_is_wrong_is_named(
    subject: Subject, prompt: list[int], kinds: dict[str, Any], param: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        subject.run(prompt, **kinds)
    assert caught.value.param == param


def test_the_last_id_of_the_vocabulary_is_one(subject: Subject) -> None:
    last = subject.runner.vocabulary - 1
    assert subject.run([last], 1)[0].finish is not None
    with pytest.raises(BadRequest):
        subject.run([last + 1], 1)


def test_a_prompt_must_leave_room_for_an_answer(subject: Subject) -> None:
    with pytest.raises(ContextOverflow):
        subject.run([1] * subject.runner.context)


def test_embeddings(subject: Subject) -> None:
    for prompt, error in (([], BadRequest), ([NOT_AN_ID], BadRequest), ([1] * 1000, ContextOverflow)):
        with pytest.raises(error):
            asyncio.run(subject.engine.embed([[1], prompt]))
