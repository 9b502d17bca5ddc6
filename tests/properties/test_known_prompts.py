"""A prompt that is recognized is the one that would have been made of the whole conversation.

Conversations grow as agents' and people's do; now and then one is edited, cut, or asked with other tools.
"""

from collections.abc import Iterable, Iterator
from functools import cache, partial
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from dragoman.engines.protocol import ModelCard
from dragoman.errors import BadRequest, TemplateError
from dragoman.prompt import PromptBuilder
from dragoman.prompt.abridged import LEAST_MESSAGES
from dragoman.prompt.prompt_cache import PromptCache
from dragoman.types import Conversation, Message, ToolCall
from tests.prompt.support import SHARED, TEMPLATES, ByteTokenizer, clock
from tests.support.laws import examples, tried
from tests.support.seams import at_once

SOURCES = {
    path.stem: path.read_text()
    for path in (*sorted(TEMPLATES.rglob("*.jinja")), *sorted((SHARED / "templates").glob("*.jinja")))
}
OWN = {
    # They look at what is far away, each in another way.
    "counting_from_the_end": (
        "{% for m in messages %}<|im_start|>{{ loop.revindex }}{{ m.content }}{% endfor %}<|im_end|>"
    ),
    "from_the_end": (
        "{% for m in messages %}<|im_start|>{{ m.content if loop.revindex < 9 else '-' }}{% endfor %}<|end|>"
    ),
    "threshold": (
        "{% if messages | length > 90 %}long{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}<|im_end|>"
    ),
    "kept_in_a_name": (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
        "<|im_start|>{{ m.content }}{{ '!' if ns.n > 90 }}{% endfor %}<|im_end|>"
    ),
    "last_first": "{{ messages[-1].content }}{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}",
    "all_at_the_end": (
        "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}<|end|>"
        "{% for m in messages %}{{ m.role[0] }}{% endfor %}"
    ),
}
NUMBERED = {
    "messages": "{% for m in messages %}<|im_start|>{{ loop.index }}{{ m.content }}{% endfor %}<|im_end|>",
    "calls": (
        "{% set ns = namespace(n=0) %}{% for m in messages %}<|im_start|>{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ m.content }}{{ ns.n }}{% set ns.n = ns.n + 1 %}{% endfor %}"
        "{% endfor %}<|im_end|>"
    ),
    "calls_apart": (
        "{% set ns = namespace(n=0) %}{% for m in messages %}<|im_start|>{{ m.content }}"
        "{% for c in m.tool_calls or [] %}:{{ ns.n }}{% set ns.n = ns.n + 1 %}{% endfor %}"
        "{% endfor %}<|im_end|>"
    ),
    "both": (
        "{% set ns = namespace(n=0) %}{% for m in messages %}<|im_start|>{{ m.content }}|{{ loop.index0 }}"
        "{% for c in m.tool_calls or [] %}:{{ ns.n }}{% set ns.n = ns.n + 1 %}{% endfor %}"
        "{% endfor %}<|im_end|>"
    ),
}
"""They number what a conversation has; what stands beside the numbers may be digits."""
TOOLS = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Looks.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer", "description": "One."}}},
        },
    }
    for name in ("f0", "f1")
)
TEXTS = (
    "so",
    " and? ",
    "a\n",
    "1 < 2",
    "<|im_end|>",
    "<think>no</think>yes",
    "ünd \ufdd0",
    "",
    "[INST]",
    "w",
    "so 7",
    "3",
)


class WholeTokenizer(ByteTokenizer):
    """What a text is encoded to depends on all of it: its ids are never those of its parts."""

    def encode(self, text: str) -> list[int]:
        return [*super().encode(text), len(text) % 256]


def prompter_of(source: str) -> PromptBuilder:
    card = ModelCard(name="m", max_model_len=1 << 20, templates={"default": source})
    return PromptBuilder(card, WholeTokenizer(), clock=clock)


def round_of_calls(random: Random, *, thinks: bool) -> Iterator[Message]:
    ids = [f"{random.randrange(10**9):09d}" for _ in range(random.choice((1, 1, 1, 2)))]
    calls = tuple(ToolCall(id=id_, name="f0", arguments=f'{{"a": {len(id_)}}}') for id_ in ids)
    text = random.choice((None, "", "so", "now then"))
    yield Message(role="assistant", content=text, reasoning="hm" if thinks else None, tool_calls=calls)
    for id_ in ids:
        yield Message(role="tool", content=f"{random.choice(TEXTS)} {id_}", tool_call_id=id_)


def talk(random: Random, length: int) -> list[Message]:
    """As agents' and people's are: mostly of one kind from the beginning to the end."""
    messages: list[Message] = []
    if random.random() < 0.8:
        messages.append(Message(role=random.choice(("system", "developer")), content="Be brief."))
    thinks, rounds = random.random() < 0.5, random.choice(((30,), (0,), (0, 1, 3), (6, 12)))
    while len(messages) < length:
        messages.append(Message(role="user", content=random.choice(TEXTS) + f" u{len(messages)}"))
        for _ in range(random.choice(rounds)):
            messages += round_of_calls(random, thinks=thinks and random.random() < 0.9)
        messages.append(
            Message(role="assistant", content=f"done {len(messages)}", reasoning="hm" if thinks else None)
        )
    return messages


def changed(random: Random, messages: list[Message]) -> list[Message]:
    """Something happens to it that is no growth."""
    offset = random.randrange(len(messages))
    way = random.randrange(4)
    if way == 0:
        return messages[: offset + 1]
    if way == 1:
        edited = replace(messages[offset], content=random.choice(TEXTS) + "!")
        return [*messages[:offset], edited, *messages[offset + 1 :]]
    if way == 2:
        return [*messages[:offset], Message(role="system", content="And now."), *messages[offset:]]
    return messages


def requests(random: Random, length: int) -> Iterator[Conversation]:
    messages, tools = talk(random, length), TOOLS[:1]
    kwargs: dict[str, Any] = {}
    for count in range(8, len(messages) + 1):
        if random.random() < 0.03:
            messages = changed(random, messages[:count]) + messages[count:]
            tools = random.choice((tools, TOOLS, ()))
            kwargs = random.choice((kwargs, {"enable_thinking": False}))
        asked = tuple(messages[:count])
        if asked and asked[-1].role != "assistant":
            yield Conversation(messages=asked, tools=tools, template_kwargs=kwargs)


def outcome(make: Any) -> Any:
    try:
        return make()
    except (TemplateError, BadRequest) as error:
        return type(error), error.message


def check(prompter: PromptBuilder, known: PromptCache, owner: str, asked: Iterable[Conversation]) -> int:
    """How many of them were put together."""
    short = 0
    for conversation in asked:
        whole = outcome(partial(prompter.render, conversation))
        assert outcome(partial(recognized, prompter, known, owner, conversation)) == whole
        prompt = known.find(conversation, owner)
        short += prompt is not None and prompt.short is not None
    return short


def recognized(prompter: PromptBuilder, known: PromptCache, owner: str, conversation: Conversation) -> Any:
    return prompter.render(conversation, None, prompter.find_or_render(conversation, known, owner))


@cache
def of_template(name: str) -> tuple[PromptBuilder, PromptCache]:
    """Templates are tried once."""
    return prompter_of({**SOURCES, **OWN, **NUMBERED}[name]), PromptCache(least_chars=0, try_by=at_once)


@pytest.mark.thorough
@given(st.sampled_from(sorted({**SOURCES, **OWN, **NUMBERED})), st.integers(0, 2**32))
@examples(25)
def test_a_recognized_prompt_is_the_whole_one(name: str, seed: int) -> None:
    tried(check(*of_template(name), str(seed), requests(Random(seed), 40)) > 0)


def agents_loop(first: int, rounds: int) -> list[Conversation]:
    """Each turn of it from one on."""
    messages = [Message(role="user", content="go")]
    for number in range(rounds):
        call = ToolCall(id=f"{number:09d}", name="f0", arguments="{}")
        messages.append(Message(role="assistant", content="so", tool_calls=(call,)))
        messages.append(Message(role="tool", content="r" * number, tool_call_id=call.id))
    return [Conversation(messages=tuple(messages[: 1 + 2 * n]), tools=TOOLS) for n in range(first, rounds)]


@pytest.mark.parametrize("name", OWN)
def test_templates_that_look_far_are_rendered_as_a_whole(name: str) -> None:
    assert not check(*of_template(name), "", agents_loop(40, 48))


@pytest.mark.parametrize("name", ["messages", "calls_apart", "kimi_k2"])
def test_numbers_go_on_where_messages_were_left_out(name: str) -> None:
    asked = agents_loop(10, 20)
    assert check(*of_template(name), "", asked) == len(asked) - 1


def test_a_call_after_much_talk_has_its_number() -> None:
    """Nothing in the talk shows that calls are numbered."""
    *_, loop = agents_loop(5, 7)
    words = ({"role": "assistant", "content": "so"}, {"role": "user", "content": "and?"})
    messages = [*loop.messages, *(Message(**one) for _ in range(8) for one in words)]  # type: ignore[arg-type]
    call = ToolCall(id="987654321", name="f0", arguments="{}")
    result = Message(role="tool", content="r", tool_call_id=call.id)
    calling = [*messages, Message(role="assistant", content="so", tool_calls=(call,)), result]
    growing = [messages[:-4], messages[:-2], messages, calling]
    asked = [Conversation(messages=tuple(each), tools=TOOLS) for each in growing]
    assert check(*of_template("calls_apart"), "talk", asked)


def test_a_turn_of_a_loop_is_not_rendered_as_a_whole() -> None:
    asked = agents_loop(10, 20)
    assert check(*of_template("chatml"), "", asked) == len(asked) - 1


def long_one(word: str) -> Conversation:
    return Conversation(messages=tuple(Message(role="user", content=word) for _ in range(LEAST_MESSAGES)))


def test_what_one_owner_said_is_not_known_for_another() -> None:
    known, asked = PromptCache(least_chars=0, try_by=at_once), long_one("hi")
    prompter_of(SOURCES["chatml"]).find_or_render(asked, known, "one")
    assert known.find(asked, "one") is not None
    assert known.find(asked, "other") is None


def test_what_is_kept_is_bounded() -> None:
    known, prompter = (
        PromptCache(most_chars=16000, least_chars=0, try_by=at_once),
        prompter_of(SOURCES["chatml"]),
    )
    asked = [long_one(f"{number}") for number in range(100)]
    for number, conversation in enumerate(asked):
        prompter.find_or_render(conversation, known, "much" if number else "little")
    conversations = [conversation for conversation in asked if known.find(conversation, "much")]
    assert conversations == asked[-len(conversations) :]
    assert 0 < len(conversations) < 20
    assert known.find(asked[0], "little") is not None
