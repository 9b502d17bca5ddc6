"""Law 4: the next prompt goes on from the very ids that were sampled."""

import json
import random
from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.dialects.registry import get_dialect
from dragoman.engines.protocol import ModelCard
from dragoman.engines.scripted import END_ID, ByteTokenizer
from dragoman.prompt import PromptBuilder
from dragoman.prompt.prompt_cache import HashedText
from dragoman.turns.plan import Planner, TurnCache
from dragoman.turns.spec import ParseOptions, TurnSpec
from dragoman.types import Conversation, Message, Sampling, ToolCall, TurnRecord
from tests.support.parrot import TEMPLATE

KEEPS = TEMPLATE.replace("{{ message.content or '' }}", "{{ (message.content or '') | trim }}")
DROPS = KEEPS.replace(
    "{% if message.reasoning_content %}", "{% if message.reasoning_content and loop.last %}"
)
WORDS = ("hel", "lo", "hello", ' {"', '"name"', "<tool", "_call>", "think", "\n\n")
START_ID = END_ID - 1
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def planner(template: str = KEEPS) -> Planner:
    tokenizer = ByteTokenizer(WORDS)
    card = ModelCard(name="m", max_model_len=1 << 16, templates={"default": template})
    dialect = get_dialect("hermes")
    return Planner(card, tokenizer, PromptBuilder(card, tokenizer, dialect=dialect), dialect)


def asked(plans: Planner, *messages: Message) -> tuple[bytes, tuple[int, ...]]:
    """What the prompt is remembered by, and its ids."""
    spec = TurnSpec(
        model=None,
        prompts=(Conversation(messages=messages, tools=(TOOL,)),),
        sampling=Sampling(max_tokens=8),
        parsing=ParseOptions(),
    )
    plan = plans.plan(spec)
    return plan.keys[0](), plan.jobs[0].prompt


def sampled(text: str, seed: int, *, end: bool = True) -> list[int]:
    """Ids of a text as a model might have sampled them: not those that a tokenizer would give."""
    chance, ids, left = random.Random(seed), [], text
    while left:
        fits = [number for number, word in enumerate(WORDS) if left.startswith(word)]
        if fits and chance.random() < 0.8:
            number = chance.choice(fits)
            ids.append(256 + 3 + number)
            left = left[len(WORDS[number]) :]
        else:
            ids += left[0].encode()
            left = left[1:]
    return [*ids, END_ID] if end else ids


USER = Message(role="user", content="hello <|im_start|> hello")
RESULT = Message(role="tool", content="hello", tool_call_id="c")
words = st.text("helo \n", max_size=12)


def turn_after(
    plans: Planner, wrote: str, answer: Message, *more: Message, seed: int = 1
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What was sampled, and the prompt of the next turn."""
    key, prompt = asked(plans, USER)
    turn = TurnRecord(prompt=prompt, ids=tuple(sampled(wrote, seed)), prompt_key=key)
    plans.turn_cache.add(turn)
    return turn.all_ids, asked(plans, USER, answer, *more)[1]


@given(text=words, reasoning=st.text("helo ", min_size=1, max_size=8), value=words, seed=st.integers(0, 9))
def test_a_prompt_goes_on_from_what_was_sampled(text: str, reasoning: str, value: str, seed: int) -> None:
    arguments = json.dumps({"a": value}, separators=(",", ":"))
    wrote = f"<think>\n{reasoning.strip() or 'o'}\n</think>\n{text.strip()}\n<tool_call>\n"
    wrote += f'{{"name":"f","arguments":{arguments}}}\n</tool_call>'
    call = ToolCall(id="c", name="f", arguments=arguments)
    answer = Message(
        role="assistant", content=text.strip(), reasoning=reasoning.strip() or "o", tool_calls=(call,)
    )
    kept, prompt = turn_after(planner(), wrote, answer, RESULT, seed=seed)
    assert prompt[: len(kept)] == kept


def test_only_what_is_new_is_tokenized() -> None:
    plans = planner()
    kept, prompt = turn_after(plans, "hello", Message(role="assistant", content="hello"), USER)
    new = prompt[len(kept) :]
    assert bytes(id_ for id_ in new if id_ < 256) == b"\nuser\nhello <|im_start|> hello\nassistant\n"
    assert new.count(START_ID) == 2, "the user's own marker is no control token"


@pytest.mark.parametrize(
    ("template", "answer", "kept_ids"),
    [
        (DROPS, Message(role="assistant", content="hello", reasoning="hel"), True),
        (KEEPS, Message(role="assistant", content="hello"), True),
        (KEEPS, Message(role="assistant", content="something else", reasoning="hel"), False),
    ],
    ids=["a template that drops reasoning", "a client that drops it", "an answer that was changed"],
)
def test_what_was_changed_is_not_falsified(template: str, answer: Message, kept_ids: bool) -> None:
    """Of what was dropped the rest keeps its ids; what was changed is not the model's."""
    plans = planner(template)
    kept, prompt = turn_after(plans, "<think>\nhel\n</think>\nhello", answer, USER)
    fresh = asked(planner(template), USER, answer, USER)[1]
    assert prompt[: len(kept)] != kept
    assert plans.prompter.decode(prompt) == plans.prompter.decode(fresh)
    assert (prompt != fresh) == kept_ids


def test_of_several_answers_the_one_that_was_taken_is_kept() -> None:
    plans = planner()
    key, prompt = asked(plans, USER)
    for seed, wrote in enumerate(("hello", "lo hello", "hel")):
        plans.turn_cache.add(TurnRecord(prompt=prompt, ids=tuple(sampled(wrote, seed)), prompt_key=key))
    going_on = asked(plans, USER, Message(role="assistant", content="lo hello"), USER)[1]
    expected = (*prompt, *sampled("lo hello", 1))
    assert going_on[: len(expected)] == expected


def test_another_salt_knows_nothing() -> None:
    trails = TurnCache()
    trails.add(TurnRecord(prompt=(1,), ids=(2,), prompt_key=trails.key("p", "a")))
    assert (len(trails.find(trails.key("p", "a"))), len(trails.find(trails.key("p", "b")))) == (1, 0)


def test_another_model_knows_nothing() -> None:
    keys = {
        TurnCache(name, pieces).key("p")
        for name in ("one", "other")
        for pieces in ([b"a"], [b"b"], [b"a", b"b"])
    }
    assert len(keys) == 6


def test_of_answers_that_say_the_same_that_which_is_meant_is_kept() -> None:
    trails = TurnCache()
    for source in ("a", "b", "c"):
        trails.add(TurnRecord(prompt=(1,), ids=(2,), prompt_key=b"k", source=source))
    assert trails.prefer(b"k", "b") and not trails.prefer(b"k", "d")
    assert [turn.source for turn in trails.find(b"k")] == ["b", "c", "a"]


def test_a_prompt_that_was_cut_is_not_gone_on_from() -> None:
    conversation = Conversation(messages=(USER,))
    spec = TurnSpec(model=None, prompts=(conversation,), sampling=Sampling(max_tokens=8), truncate_prompt=4)
    assert [key() for key in planner().plan(spec).keys] == [b""]


@given(
    texts=st.lists(st.tuples(st.integers(0, 400), st.text("ab\ud800é", max_size=400)), min_size=1, max_size=5)
)
def test_a_text_that_goes_on_has_the_digest_that_it_has_alone(texts: list[tuple[int, str]]) -> None:
    hashed: HashedText | None = None
    text = ""
    for cut, more in texts:
        text = text[: max(0, len(text) - cut)] + more
        hashed = HashedText.of(text, blake2b(b"salt"), hashed)
        assert hashed.digest() == blake2b(b"salt" + text.encode("utf-8", "surrogatepass")).digest()


def test_memory_is_bounded() -> None:
    trails = TurnCache(most_ids=100)
    for number in range(50):
        trails.add(TurnRecord(prompt=(1,) * 5, ids=(2,) * 5, prompt_key=b"%d" % number))
    assert (len(trails), len(trails.find(b"49")), len(trails.find(b"0"))) == (10, 1, 0)


def test_ids_that_are_kept_are_shared() -> None:
    """Else a number in a tuple takes five times its place there, and the bound would be none."""
    trails = TurnCache(pieces=[b"x"] * 5000)
    for name in ("a", "b"):
        trails.add(TurnRecord(prompt_key=name.encode(), prompt=(int("4001"),), ids=(int("4002"), 9999)))
    [first], [second] = trails.find(b"a"), trails.find(b"b")
    assert first.prompt[0] is second.prompt[0]
    assert first.ids[0] is second.ids[0]
    assert (first.prompt, first.ids) == ((4001,), (4002, 9999))


def test_a_prompt_that_was_planned_is_not_gone_through_again() -> None:
    trails = TurnCache(pieces=[b"x"] * 5000)
    prompt = trails.share((4001, 4002))
    trails.add(TurnRecord(prompt_key=b"a", prompt=prompt, ids=(1,)), planned=True)
    assert trails.find(b"a")[0].prompt is prompt


def test_one_owners_flood_does_not_drive_out_what_another_has() -> None:
    trails = TurnCache(most_ids=100)
    mine = TurnRecord(prompt=(1,) * 20, ids=(2,) * 20, prompt_key=b"mine")
    trails.add(mine, "drop")
    for number in range(50):
        trails.add(TurnRecord(prompt=(1,) * 5, ids=(2,) * 5, prompt_key=b"%d" % number), "flood")
    assert trails.find(b"mine") == [mine]
    assert (trails.find(b"0"), len(trails)) == ((), 7)
