"""Conversations with pictures go on from what was sampled as others do, at the price of what is new."""

import gc
from collections.abc import Sequence
from sys import getrefcount
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from dragoman.media import Media
from dragoman.prompt.prompt_cache import PromptCache
from dragoman.responses.context import pack_turns, restore_turns
from dragoman.turns.plan import TurnPlan
from dragoman.turns.spec import History
from dragoman.types import Message, TurnRecord
from tests.support.seams import Model, at_once
from tests.support.sight import SHOWN, conversation, says, shown, sighted

ONE, OTHER = shown("a"), shown("b")
MEDIA = conversation([], ONE, OTHER).media
ASKS = says("user", "Weather in", ONE, "?")
TEXT = Message(role="assistant", content="The weather in Paris is fine.")
MORE = Message(role="user", content="And then?")
WROTE = "The weather in Paris is fine.<|im_end|>"


@pytest.fixture
def model() -> Model:
    return sighted("qwen_vl")


def turn(model: Model, messages: Sequence[Message], **more: Any) -> tuple[int, ...]:
    plan = model.plan(messages, **{"media": MEDIA, **more})
    return plan.jobs[0].prompt + model.answer(plan, WROTE)


def check(model: Model, plan: TurnPlan, *media: Media) -> None:
    """Whether pictures stand where their ids do, and nowhere else."""
    (job,) = plan.jobs
    assert [span.media for span in job.media] == [*media]
    for span in job.media:
        assert model.decode(job.prompt[span.start : span.start + span.count]) == SHOWN
    assert model.decode(job.prompt).count(SHOWN) == len(media)


@pytest.mark.parametrize("history", ["template", "sampled"])
@pytest.mark.parametrize(
    ("following", "media"),
    [
        ([MORE], [ONE]),
        ([says("user", OTHER, "And there?")], [ONE, OTHER]),
        ([says("user", OTHER)], [ONE, OTHER]),
        ([says("user", ONE, OTHER, "?")], [ONE, ONE, OTHER]),
        ([says("tool", OTHER)], [ONE, OTHER]),
    ],
)
def test_sampled_ids_are_kept(
    model: Model, following: list[Message], media: list[Media], history: History
) -> None:
    kept = turn(model, [ASKS])
    model.placed.clear()
    plan = model.plan([ASKS, TEXT, *following], history, media=MEDIA)
    assert plan.jobs[0].prompt[: len(kept)] == kept
    assert plan.splits == [""]
    check(model, plan, *media)


def test_another_picture_is_another_conversation(model: Model) -> None:
    turn(model, [ASKS])
    plan = model.plan([says("user", "Weather in", OTHER, "?"), TEXT, MORE], media=MEDIA)
    check(model, plan, OTHER)
    assert plan.splits == ["unknown"]


@pytest.mark.parametrize("history", ["template", "sampled"])
def test_a_picture_that_is_to_be_seen_more_closely(model: Model, history: History) -> None:
    """As it is asked for now; what was sampled is gone on from as it was."""
    turn(model, [ASKS])
    closer = replace(ONE, detail="high")
    plan = model.plan([ASKS, TEXT, MORE], history, media={closer.digest: closer})
    check(model, plan, ONE if history == "sampled" else closer)


def test_an_edited_answer_keeps_what_is_before_it(model: Model) -> None:
    turn(model, [ASKS])
    plan = model.plan([ASKS, Message(role="assistant", content="No."), MORE], media=MEDIA)
    check(model, plan, ONE)
    assert plan.splits == ["client"]


def test_an_answer_behind_what_was_rewritten_keeps_its_ids(model: Model) -> None:
    """The question before it was edited: its answer is found between what others said."""
    turn(model, [ASKS])
    messages = [ASKS, TEXT, says("user", OTHER, "And there?")]
    turn(model, messages)
    messages = [says("user", "Now: weather in", ONE, "?"), *messages[1:], TEXT, MORE]
    plan = model.plan(messages, media=MEDIA)
    check(model, plan, ONE, OTHER)


def test_a_message_is_gone_on_with(model: Model) -> None:
    begun = Message(role="assistant", content="The weather")
    more: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
    plan = model.plan([ASKS, begun], media=MEDIA, **more)
    check(model, plan, ONE)
    assert model.decode(plan.jobs[0].prompt).endswith("The weather")
    plan = model.plan([ASKS], media=MEDIA, response_prefix="The")
    check(model, plan, ONE)


def test_thoughts_and_calls_beside_pictures(model: Model) -> None:
    spoken = [ASKS, replace(TEXT, reasoning="Hm"), says("user", OTHER), TEXT, MORE]
    check(model, model.plan(spoken, media=MEDIA), ONE, OTHER)


def test_stored_turns_keep_their_pictures(model: Model) -> None:
    """A server was started again."""
    messages, stored = [ASKS], list[bytes]()
    for number, following in enumerate((says("user", OTHER), MORE)):
        plan = model.plan(messages, media=MEDIA)
        ids = model.answer(plan, WROTE)
        facts = plan.log_fields(0)
        record = TurnRecord(
            prompt=plan.jobs[0].prompt, ids=ids, prompt_key=plan.keys[0](), source=str(number), **facts
        )
        stored.append(pack_turns([record]))
        kept = record.all_ids
        messages += [TEXT, following]
    assert all(b"a" * 8 not in each for each in stored)
    model.forget()
    restore_turns(model.planner.turn_cache, stored)
    plan = model.plan(messages, media=MEDIA)
    assert plan.jobs[0].prompt[: len(kept)] == kept
    check(model, plan, ONE, OTHER)


def test_a_turn_whose_picture_is_gone_is_not_gone_on_from(model: Model) -> None:
    turn(model, [ASKS])
    (traced,) = model.planner.turn_cache.find(model.plan([ASKS], media=MEDIA).keys[0]())
    lost = replace(traced, media=tuple(replace(span, media=shown("lost")) for span in traced.media))
    model.forget()
    model.planner.turn_cache.add(lost)
    check(model, model.plan([ASKS, TEXT, MORE], "sampled", media=MEDIA), ONE)


# What a long conversation costs

WORDS = "word " * 400


def talk(rounds: int, picture: int = 5) -> list[Message]:
    """Some questions show something."""
    messages = list[Message]()
    for number in range(rounds):
        shows = not number % picture
        asked = says("user", f"{number} {WORDS}", ONE if number % 2 else OTHER) if shows else None
        messages += [asked or Message(role="user", content=f"{number} {WORDS}"), TEXT]
    return messages


@pytest.mark.parametrize("name", ["qwen_vl", "llava", "phi_vision", "gemma4", "minicpm_v"])
def test_a_prompt_that_is_known_is_what_it_would_be(name: str) -> None:
    model, fresh = sighted(name), sighted(name)
    messages = talk(34)
    for count in range(21, len(messages), 4):
        now = messages[:count]
        known, plain = (each.plan(now, media=MEDIA).jobs[0] for each in (model, fresh))
        assert (known.prompt, known.media) == (plain.prompt, plain.media)
        fresh = sighted(name)


def test_what_is_known_is_neither_rendered_nor_kept_with_its_data(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bytes(4 * 1024 * 1024)
    heavy = replace(ONE, data=data)
    media = {heavy.digest: heavy, OTHER.digest: OTHER}
    messages = talk(40)
    model.planner.prompt_cache = PromptCache(try_by=at_once)
    model.plan(messages[:61], media=media)
    lengths = list[int]()
    write = model.planner.prompter._write

    def seen(asked: Any, careful: Any) -> Any:
        lengths.append(len(asked.messages))
        return write(asked, careful)

    monkeypatch.setattr(model.planner.prompter, "_write", seen)
    for count in range(63, 79, 2):
        model.plan(messages[:count], media=media)
    assert max(lengths[-8:]) < 40, "of a short conversation"
    del media, heavy
    gc.collect()
    assert getrefcount(data) == 2, "here, and as an argument"


said = st.lists(st.sampled_from(["a", " b", "<image>", "<|image_pad|>", ONE, OTHER]), min_size=1, max_size=4)
answers = st.sampled_from([TEXT, Message(role="assistant", content="No.")])
PLAYED = {name: sighted(name) for name in ("qwen_vl", "llava", "minicpm_v", "kimi_vl")}


@settings(max_examples=25, deadline=None)
@given(
    talk=st.lists(st.tuples(said, answers), min_size=1, max_size=5),
    name=st.sampled_from(sorted(PLAYED)),
    history=st.sampled_from(["template", "sampled"]),
)
def test_pictures_stand_where_they_are_shown(
    talk: list[tuple[list[Any], Message]], name: str, history: History
) -> None:
    """Whatever was sampled, kept and edited."""
    model = PLAYED[name]
    model.forget()
    messages, media = list[Message](), list[Media]()
    for parts, message in talk:
        messages.append(says("user", *parts))
        media += [part for part in parts if isinstance(part, Media)]
        plan = model.plan(messages, history, media=MEDIA)
        if name != "llava":
            check(model, plan, *media)
        else:
            assert [span.media.digest for span in plan.jobs[0].media] == [each.digest for each in media]
        model.answer(plan, WROTE)
        messages.append(message)
