"""A draft guesses ahead: fewer steps, and the same answers, whatever it says."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.engines.local import LocalEngine, LocalOptions
from dragoman.engines.local.draft_model import READ_ROWS, Drafter, check_vocabulary
from dragoman.errors import ModelFileError
from dragoman.types import Job, Sampling
from tests.engines.local.paged import PagedDesk
from tests.engines.local.scripted import VOCABULARY, expected
from tests.engines.local.support import Desk, FakeRunner
from tests.support.laws import examples, tried
from tests.support.tiny_gguf import write_tiny

DESKS = {"slots": Desk, "pages": PagedDesk}


def drafter(recalls: int | None = None, **sizes: Any) -> Drafter:
    return Drafter(FakeRunner(**{"rows": READ_ROWS, "context": 256, "recalls": recalls, **sizes}), VOCABULARY)


def desk(kind: str, draft: Drafter | None, recalls: int | None = None, **sizes: Any) -> Desk:
    kinds = {"pages": 256, "pass_rows": 16} if kind == "pages" else {}
    shape = {"context": 256, "recalls": recalls, "rows": 96, "extra": 64}
    return DESKS[kind](guesses=7 if draft else 0, drafter=draft, **{**shape, **kinds, **sizes})


@pytest.mark.parametrize("kind", DESKS)
def test_a_draft_that_knows_takes_fewer_steps(kind: str) -> None:
    prompt, steps = [3, 1, 4, 1, 5], []
    for draft in (None, drafter()):
        each = desk(kind, draft)
        group = each.ask(prompt, 100)
        each.run()
        assert each.ids(group) == expected(prompt, 100)
        steps.append(len(each.runner.steps))
    assert steps[1] < steps[0] / 3


@pytest.mark.parametrize("kind", DESKS)
@given(data=st.data())
@examples(40)
def test_whatever_a_draft_says_the_answers_are_the_same(kind: str, data: st.DataObject) -> None:
    """Drafts that agree more or less, answers that come and go, and more of them than a draft has places."""
    recalls = data.draw(st.sampled_from([1, 2, None]))
    draft = drafter(data.draw(st.sampled_from([1, 2, None])), slots=data.draw(st.integers(1, 3)))
    each = desk(kind, draft, recalls)
    prompts = data.draw(
        st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=30), min_size=1, max_size=5)
    )
    groups = []
    for prompt in prompts:
        groups.append((each.ask(prompt, 24), prompt))
        for _ in range(data.draw(st.integers(0, 6))):
            each.step()
    left = {id(group): data.draw(st.booleans()) for group, _ in groups}
    for group, _ in groups:
        if left[id(group)]:
            each.cancel(group)
    each.run()
    tried(any(len(step.ids) > 1 for _, step in each.said))
    for group, prompt in groups:
        numbers = each.ids(group)
        assert numbers == expected(prompt, 24, recalls=recalls)[: len(numbers)]
        assert len(numbers) == 24 or left[id(group)]


@pytest.mark.parametrize("kind", DESKS)
def test_a_seed_draws_the_same_with_a_draft_and_without(kind: str) -> None:
    answers = []
    for draft in (None, drafter(1)):
        each = desk(kind, draft)
        group = each.ask([1, 2, 3], 60, temperature=0.6, seed=3)
        each.run()
        answers.append(each.ids(group))
    assert answers[0] == answers[1]


def test_a_long_prompt_is_read_in_pieces_before_it_guesses() -> None:
    draft = drafter(context=1024)
    each = desk("slots", draft, context=1024, rows=1024, batch=1024)
    prompt = [number % 10 for number in range(600)]
    group = each.ask(prompt, 60)
    each.run()
    assert each.ids(group) == expected(prompt, 60)
    runner: Any = draft._runner
    assert max(map(len, runner.steps)) <= READ_ROWS


def test_a_draft_that_fails_is_done_without(caplog: pytest.LogCaptureFixture) -> None:
    draft = drafter()
    runner: Any = draft._runner
    runner.failing = True
    each = desk("slots", draft)
    group = each.ask([1, 2, 3], 30)
    each.run()
    assert each.ids(group) == expected([1, 2, 3], 30)


def test_the_next_turn_finds_the_draft_where_it_was() -> None:
    draft = drafter()
    each = desk("slots", draft)
    prompt = list(range(20))
    group = each.ask(prompt, 40)
    each.run()
    runner: Any = draft._runner
    before = sum(map(len, runner.steps))
    each.ask([*prompt, *each.ids(group), 1, 2], 8)
    each.run()
    assert sum(map(len, runner.steps)) - before < 40


@pytest.mark.parametrize(
    ("draft", "target", "why"),
    [
        ([b"a", b"b"], [b"a", b"c"], "token 1 is b'b' in one and b'c' in the other"),
        ([b"a"] * 200, [b"a"] * 20, "200 tokens and 20"),
    ],
)
def test_another_vocabulary_is_refused(draft: list[bytes], target: list[bytes], why: str) -> None:
    with pytest.raises(ModelFileError, match=why):
        check_vocabulary(draft, target, "draft.gguf", "target.gguf")


def test_padding_of_a_vocabulary_does_not_matter() -> None:
    check_vocabulary([b"a", b"b", b"[PAD]"], [b"a", b"b"], "draft.gguf", "target.gguf")


def test_a_real_draft_of_a_real_model(tmp_path: Path) -> None:
    target, draft = write_tiny(tmp_path / "a.gguf"), write_tiny(tmp_path / "b.gguf", seed=2)
    answers = []
    for guessing in (None, draft, target):
        options = LocalOptions(
            runner="llamacpp", context=128, slots=2, threads=1, draft=str(guessing) if guessing else None
        )
        engine = LocalEngine.open(target, options)
        answers.append([asyncio.run(answer(engine, seed)) for seed in range(3)])
        assert engine.card.details.get("draft") == (guessing and guessing.name)
        engine.close()
    assert answers[0] == answers[1] == answers[2]


async def answer(engine: LocalEngine, seed: int) -> list[int]:
    sampling = Sampling(max_tokens=40, temperature=0.7 if seed else 0.0, seed=seed, ignore_eos=True)
    steps = engine.generate(Job(id="1", prompt=(40, 50, 60 + seed), sampling=sampling))
    return [token async for step in steps for token in step.ids]
