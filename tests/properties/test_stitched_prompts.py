"""A prompt that is made of the ids of the one before it says what one says that is made from nothing.

Loops of calls with every template; now and then a message is edited, and some answers are not the model's.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from copy import copy
from functools import cache
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from dragoman.errors import TemplateError
from dragoman.prompt import answer_regions
from dragoman.prompt.prompt_cache import PromptCache
from dragoman.turns.plan import TurnPlan
from dragoman.types import Message, ToolCall
from tests.prompt.support import SHARED, TEMPLATES
from tests.support.laws import examples
from tests.support.seams import WRITES, Model, at_once

SOURCES = {
    path.stem: path.read_text()
    for path in (*sorted(TEMPLATES.rglob("*.jinja")), *sorted((SHARED / "templates").glob("*.jinja")))
}
TEXTS = ("The weather in Paris is", "So", "", "und 7", "<think>Hm</think> So")


@cache
def models(name: str) -> tuple[Model, Model]:
    """One that remembers prompts, and one that does not. They have the turns in common."""
    model = Model(SOURCES[name])
    model.planner.prompt_cache = PromptCache(least_chars=0, try_by=at_once)
    other = copy(model)
    other.planner = copy(model.planner)
    other.planner.prompt_cache = PromptCache(least_chars=1 << 40, try_by=at_once)
    return model, other


def rounds(random: Random, count: int) -> Iterator[tuple[Message, Message]]:
    for number in range(count):
        call = ToolCall(
            id=f"{random.randrange(10**9):09d}", name="get_weather", arguments=f'{{"city": "Paris {number}"}}'
        )
        text = random.choice(TEXTS)
        answer = Message(role="assistant", content=text, tool_calls=(call,))
        if random.random() < 0.2:
            answer = Message(role="assistant", content=f"{text} {number}.")
            yield answer, Message(role="user", content=f"And? {number}")
        else:
            yield answer, Message(role="tool", content=f"fine {'x' * number}", tool_call_id=call.id)


def sampled(model: Model, ids: Sequence[int]) -> int:
    """How many of them no encoder would choose."""
    words = frozenset(model.vocabulary.words.values())
    return sum(id_ in words for id_ in ids)


def plan_with_fences(model: Model, messages: Sequence[Message]) -> TurnPlan:
    """No message is looked for by its words."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answer_regions, "LEAST_WORDS", 1 << 40)
        return model.plan(messages)


def check_all(name: str, seed: int) -> None:
    (model, other), random = models(name), Random(seed)
    messages = [Message(role="system", content=f"{seed}"), Message(role="user", content="Weather?")]
    for answer, following in rounds(random, 16):
        plans = [model.plan(messages), plan_with_fences(other, messages)]
        (job,), (expected,) = (plan.jobs for plan in plans)
        assert model.decode(job.prompt) == model.decode(expected.prompt)
        assert model.control(job.prompt) == model.control(expected.prompt)
        assert sampled(model, job.prompt) >= sampled(model, expected.prompt)
        assert [*map(str, plans[0].splits)] == [*map(str, plans[1].splits)]
        if random.random() < 0.9:
            writes = random.choice(WRITES)
            model.answer(plans[0], model.writes(writes, messages, answer))
        messages += [answer, following]
        if random.random() < 0.1:
            offset = random.randrange(len(messages))
            messages[offset] = replace(messages[offset], content=f"changed {len(messages)}")


@pytest.mark.thorough
@given(st.sampled_from(sorted(SOURCES)), st.integers(0, 2**32))
@examples(8)
def test_a_prompt_that_goes_on_from_another_says_the_same_and_keeps_no_less(name: str, seed: int) -> None:
    # Some templates have no place for such a conversation.
    with suppress(TemplateError):
        check_all(name, seed)
