"""Law 4 with every template: a prompt goes on from the sampled ids wherever the template keeps their text.

Four turns (two calls, two texts), a vocabulary in which no encoder would choose the ids that are sampled, and
three kinds of clients. What the template keeps is told by its text alone, which nothing here has made.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from dragoman.prompt.encode import chain_messages, digest_frame
from dragoman.responses.context import pack_turns, restore_turns
from dragoman.turns.spec import History, TurnSpec
from dragoman.types import Conversation, Message, Sampling, TurnRecord
from tests.prompt.support import SHARED, TEMPLATES
from tests.support.seams import CLIENTS, WRITES, Model, Row, Writes, answers, following, held

OWN = sorted(TEMPLATES.rglob("*.jinja"))
PUBLISHED = sorted((SHARED / "templates").glob("*.jinja"))
AS_THE_TEMPLATE, AS_THE_DIALECT = WRITES


def table(path: Path, writes: Writes, history: str = "template") -> dict[str, list[Row]]:
    model = Model(path.read_text())
    return {client: list(held(model, client, writes, history)) for client in CLIENTS}  # type: ignore[arg-type]


@pytest.mark.parametrize("path", [*OWN, *PUBLISHED], ids=lambda path: path.stem)
def test_ids_are_kept_wherever_the_template_keeps_the_text(path: Path) -> None:
    for client, rows in table(path, AS_THE_TEMPLATE).items():
        lost = [number for number, row in enumerate(rows) if row.text_kept and not row.goes_on]
        assert lost == [], client
        assert all(row.words_kept for row in rows), f"what was before them was changed: {client}"


@pytest.mark.parametrize("path", [*OWN, *PUBLISHED], ids=lambda path: path.stem)
def test_what_was_sampled_is_gone_on_from_whatever_the_template_makes_of_it(path: Path) -> None:
    for writes in WRITES:
        for client, rows in table(path, writes, "sampled").items():
            assert [(row.whole, row.rest_fits) for row in rows] == [(True, True)] * 3, (writes, client)


def test_the_table_is_not_empty() -> None:
    """What is kept by our own templates, of three turns each."""
    kept = Counter[str]()
    for path in OWN:
        for client, rows in table(path, AS_THE_TEMPLATE).items():
            kept[client] += sum(row.goes_on for row in rows)
    assert kept["has no reasoning"] > 2 * len(OWN)
    assert kept["sends it back"] > 2 * len(OWN)


# What else may happen in a conversation, with a template that writes the last message in a way of its own.


USER, MORE = Message(role="user", content="Weather in Paris?"), Message(role="user", content="And then?")
PARIS, LONDON = (answer.tool_calls[0] for answer in answers("has no reasoning")[:2])
CALLING = Message(role="assistant", tool_calls=(PARIS,))
TEXT = Message(role="assistant", content="The weather in Paris is fine.")


@pytest.fixture
def model() -> Model:
    return Model((TEMPLATES / "history" / "after_last_question.jinja").read_text())


def turn(
    model: Model, messages: Sequence[Message], answer: Message, end: str = "<|im_end|>", **more: Any
) -> tuple[int, ...]:
    """Has the model answer; the ids of its prompt and its answer."""
    plan = model.plan(messages, **more)
    written = model.writes(AS_THE_TEMPLATE, messages, answer)
    return plan.jobs[0].prompt + model.answer(plan, written.removesuffix("<|im_end|>") + end)


def goes_on(model: Model, kept: Sequence[int], messages: Sequence[Message], **more: Any) -> bool:
    """Whether the prompt goes on from these ids, and says what the template writes."""
    prompt = model.plan(messages, **more).jobs[0].prompt
    return prompt[: len(kept)] == kept and model.decode(prompt) == model.text(messages, **more)


OPENS_ONLY = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}{% for c in m.tool_calls or [] %}\n"
    '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}{# <|user|><|tool|> #}"
)
"""No message has an end: the next one is opened."""


@pytest.mark.parametrize("result", ["ok", "It is raining.", 'It "is" raining.', "get_weather: Paris", ""])
def test_an_answer_without_an_end_is_kept_up_to_what_opens_the_next(result: str) -> None:
    model = Model(OPENS_ONLY)
    plan, message = model.plan([USER]), Message(role="assistant", content="So", tool_calls=(PARIS,))
    # With other spaces than the template's.
    wrote = 'So<tool_call>{"name":"get_weather","arguments":{"city":"Paris"}}</tool_call>'
    kept = plan.jobs[0].prompt + model.answer(plan, wrote)
    prompt = (
        model.plan([USER, message, Message(role="tool", content=result, tool_call_id=PARIS.id)])
        .jobs[0]
        .prompt
    )
    assert prompt[: len(kept)] == kept
    assert model.decode(prompt[len(kept) :]) == f"<|tool|>{result}<|assistant|>"


def test_parallel_calls_keep_their_ids(model: Model) -> None:
    both = replace(CALLING, tool_calls=(PARIS, LONDON))
    results = [Message(role="tool", content="12 °C", tool_call_id=call.id) for call in both.tool_calls]
    assert goes_on(model, turn(model, [USER], both), [USER, both, *results])


def test_ids_are_kept_up_to_what_was_edited(model: Model) -> None:
    first = turn(model, [USER], TEXT)
    turn(model, [USER, TEXT, MORE], TEXT)
    other = replace(MORE, content="Something else?")
    assert goes_on(model, first, [USER, TEXT, other, TEXT, MORE])
    assert model.plan([USER, TEXT, other, TEXT, MORE]).splits == ["client"]


def test_a_message_of_the_developer_changes_nothing_before_it(model: Model) -> None:
    message = Message(role="system", content="Be brief.")
    assert goes_on(model, turn(model, [USER], TEXT), [USER, TEXT, message, MORE])


def test_an_answer_that_was_cut_short_is_gone_on_with(model: Model) -> None:
    cut = replace(TEXT, content="The weather in Paris")
    kept = turn(model, [USER], cut, end="")
    more: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
    plan = model.plan([USER, cut], **more)
    assert plan.jobs[0].prompt == kept
    whole = plan.jobs[0].prompt + model.answer(plan, " is fine.<|im_end|>")
    assert goes_on(model, whole, [USER, TEXT, MORE])


@pytest.mark.parametrize("history", ["template", "sampled"])
def test_what_a_client_began_for_the_model_is_no_answer(model: Model, history: History) -> None:
    kept = turn(model, [USER], TEXT)
    begun = Message(role="assistant", content="Well")
    more: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
    plan = model.plan([USER, TEXT, MORE, begun], history, **more)
    assert plan.jobs[0].prompt[: len(kept)] == kept
    assert (model.decode(plan.jobs[0].prompt)[-4:], plan.splits) == ("Well", [""])


def test_a_prefix_of_the_answer_is_a_part_of_the_prompt(model: Model) -> None:
    plan = model.plan([USER], response_prefix="The weather")
    kept = plan.jobs[0].prompt + model.answer(plan, " in Paris is fine.<|im_end|>")
    assert goes_on(model, kept, [USER, TEXT, MORE])


@pytest.mark.parametrize(("history", "end"), [("template", "<|end|>"), ("sampled", "<|return|>")])
def test_what_the_template_ends_otherwise_is_not_ended_twice(history: History, end: str) -> None:
    model = Model((TEMPLATES / "history" / "two_ends.jinja").read_text())
    plan = model.plan([USER])
    numbers = model.answer(plan, f"<|channel|>final<|message|>{TEXT.content}<|return|>")[:-1]
    kept = plan.jobs[0].prompt + numbers
    going_on = model.plan([USER, TEXT, MORE], history)
    prompt = going_on.jobs[0].prompt
    assert prompt[: len(kept)] == kept
    rest = f"{end}<|start|>user<|message|>And then?<|end|><|start|>assistant"
    assert model.decode(prompt[len(kept) :]) == rest
    assert going_on.splits == ["end" if history == "template" else ""]


@pytest.mark.parametrize("history", ["template", "sampled"])
def test_what_a_stop_string_has_left_keeps_its_ids(model: Model, history: History) -> None:
    plan = model.plan([USER])
    ids = model.vocabulary.sample(f"{TEXT.content} STOP")
    data = chain_messages([TEXT])[-1]
    model.planner.turn_cache.add(
        TurnRecord(prompt=plan.jobs[0].prompt, ids=ids, prompt_key=plan.keys[0](), message_digest=data)
    )
    kept = plan.jobs[0].prompt + (ids if history == "sampled" else ids[: -len(" STOP")])
    prompt = model.plan([USER, TEXT, MORE], history).jobs[0].prompt
    assert prompt[: len(kept)] == kept
    rest = "<|im_end|>\n<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n"
    assert model.decode(prompt[len(kept) :]) == rest


def test_a_control_token_that_no_text_shows_is_kept(model: Model) -> None:
    plan = model.plan([USER])
    hidden = (*model.vocabulary.sample("The weather"), model.vocabulary.special_ids["<s>"])
    ids = (*hidden, *model.vocabulary.sample(" in Paris is fine.<|im_end|>"))
    model.planner.turn_cache.add(TurnRecord(prompt=plan.jobs[0].prompt, ids=ids, prompt_key=plan.keys[0]()))
    kept = plan.jobs[0].prompt + ids
    assert model.plan([USER, TEXT, MORE]).jobs[0].prompt[: len(kept)] == kept


@pytest.mark.parametrize("history", ["template", "sampled"])
def test_text_stays_text_whoever_wrote_it(model: Model, history: History) -> None:
    """A model that spells a control token in letters, and users that quote it."""
    marker, start = "<|im_start|>", model.vocabulary.special_ids["<|im_start|>"]
    asks = Message(role="user", content=f"What is {marker}?")
    says = Message(role="assistant", content=f"It is {marker}.")
    plan = model.plan([asks], history)
    ids = (*f"It is {marker}.".encode(), model.vocabulary.special_ids["<|im_end|>"])
    model.planner.turn_cache.add(TurnRecord(prompt=plan.jobs[0].prompt, ids=ids, prompt_key=plan.keys[0]()))
    kept = plan.jobs[0].prompt + ids
    prompt = model.plan([asks, says, asks], history).jobs[0].prompt
    assert prompt[: len(kept)] == kept
    assert prompt.count(start) == 5, "of the system, the users and the model, and of nobody's words"


def test_a_control_token_that_was_sampled_is_none_in_a_text(model: Model) -> None:
    """A model that has sampled the token itself, and a client that has its spelling in the answer."""
    start = model.vocabulary.special_ids["<|im_start|>"]
    plan = model.plan([USER])
    turn_ids = model.answer(plan, "It is <|im_start|>.<|im_end|>")
    assert start in turn_ids
    says = Message(role="assistant", content="It is <|im_start|>.")
    assert model.plan([USER, says, MORE]).jobs[0].prompt.count(start) == 5


def test_half_of_a_character_in_a_tool_is_no_failure(model: Model) -> None:
    half = {"type": "function", "function": {"name": "\ud800", "parameters": {"type": "object"}}}
    conversation = Conversation(messages=(USER,), tools=(half,), template_kwargs={"tone": "\udfff"})
    assert digest_frame(conversation) != digest_frame(
        replace(conversation, template_kwargs={"tone": "\ud800"})
    )


def test_other_tools_are_another_history(model: Model) -> None:
    turn(model, [USER], TEXT)
    other = {"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}}
    spec = TurnSpec(
        model=None,
        prompts=(Conversation(messages=(USER, TEXT, MORE), tools=(other,)),),
        sampling=Sampling(max_tokens=8),
        history="sampled",
    )
    plan = model.planner.plan(spec)
    assert plan.splits == ["tools"]
    assert model.decode(plan.jobs[0].prompt) == model.planner.prompter.text(spec.prompts[0])  # type: ignore[arg-type]


def test_what_the_system_says_later_is_not_lost_where_it_is_told_first() -> None:
    """The template has one place for it, so what was sampled cannot be gone on from."""
    model = Model((TEMPLATES / "tagged_tools.jinja").read_text())
    turn(model, [USER], TEXT)
    message = Message(role="system", content="Be brief.")
    histories: tuple[History, ...] = ("template", "sampled")
    for history in histories:
        plan = model.plan([USER, TEXT, message, MORE], history)
        assert "Be brief." in model.decode(plan.jobs[0].prompt)


def test_the_rest_is_no_beginning_of_a_prompt(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenizers that write the first word of a prompt in another way do so once."""
    begun: list[str] = []
    kept = turn(model, [USER], TEXT)
    encoder = model.planner.prompter._encoder
    encode = encoder._encode_piece

    def seen(text: str, begins: bool) -> Sequence[int]:
        begun.extend([text] * begins)
        return encode(text, begins)

    monkeypatch.setattr(encoder, "_encode_piece", seen)
    assert goes_on(model, kept, [USER, TEXT, MORE])
    assert begun == []


def test_nobody_goes_on_from_what_was_sampled_for_another(model: Model) -> None:
    """With the same messages one would read what the other's model thought."""
    thought = replace(TEXT, reasoning="Hm, I think so")
    plan = model.plan([USER], owner="one")
    model.answer(plan, model.writes(AS_THE_TEMPLATE, [USER], thought))
    known = {
        owner: model.plan([USER, TEXT, MORE], "sampled", owner=owner).splits[0] for owner in ("one", "other")
    }
    assert known == {"one": "", "other": "unknown"}


def test_answers_that_were_stored_keep_their_ids_in_a_prompt_that_is_rewritten(model: Model) -> None:
    """A server was started again, and a user speaks again: the reasoning of both answers is dropped."""
    thought = "Hm, I think so"
    calls, says = replace(CALLING, reasoning=thought), replace(TEXT, reasoning=thought)
    messages, stored = [USER], list[bytes]()
    for number, answer in enumerate((calls, says)):
        plan = model.plan(messages)
        ids = model.answer(plan, model.writes(AS_THE_TEMPLATE, messages, answer))
        kept = plan.continued_turns[0].kept if plan.continued_turns[0] else 0
        traced = TurnRecord(
            prompt=plan.jobs[0].prompt,
            ids=ids,
            prompt_key=plan.keys[0](),
            reused_ids=kept,
            source=str(number),
        )
        stored.append(pack_turns([traced]))
        messages += [answer, following(answer)]
    model.forget()
    restore_turns(model.planner.turn_cache, stored)
    prompt = model.plan(messages).jobs[0].prompt
    words = [word for word, id_ in model.vocabulary.words.items() if id_ in prompt]
    assert (model.decode(prompt), thought in model.decode(prompt)) == (model.text(messages), False)
    assert {"get", "_weather", "The", " weather"} <= {*words}


# Whatever is said: the ids say what the template writes, and control tokens are the template's.


MARKS = [
    "<|im_end|>",
    "<|im_start|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "<|end|>",
    "[INST]",
    "</s>",
    "<s>",
]
said_words = st.lists(st.sampled_from([*MARKS, "The", " weather", "a", " ", "\n", "é", "Hm"]), max_size=5)
edits = st.sampled_from(["nothing", "nothing", "the question", "the answer", "the reasoning"])
PLAYED = {path.stem: Model(path.read_text()) for path in (TEMPLATES / "history").glob("*.jinja")}


@settings(max_examples=40)
@given(
    template=st.sampled_from(sorted(PLAYED)),
    talk=st.lists(st.tuples(said_words, said_words, st.booleans(), edits), min_size=1, max_size=4),
    history=st.sampled_from(["template", "sampled"]),
)
def test_text_is_what_the_template_writes_and_stays_text(
    template: str, talk: list[tuple[list[str], list[str], bool, str]], history: History
) -> None:
    """Law 5 with answers among the messages, which a model has spelled in letters."""
    model = PLAYED[template]
    model.forget()
    fresh = Model.like(model)
    messages: list[Message] = []
    for asks, says, thinks, edit in talk:
        messages.append(Message(role="user", content="Q" + "".join(asks)))
        answer = Message(
            role="assistant", content="A" + "".join(says), reasoning="Hm, I think so" if thinks else None
        )
        plan = model.plan(messages, history)
        wrote = model.writes(AS_THE_TEMPLATE, messages, answer)
        ids = model.spell(wrote, str(answer.content))
        model.planner.turn_cache.add(
            TurnRecord(prompt=plan.jobs[0].prompt, ids=ids, prompt_key=plan.keys[0]())
        )
        messages.append(_edited(answer, edit))
        if edit == "the question":
            messages[0] = Message(role="user", content=f"{messages[0].content}!")
        messages.append(Message(role="user", content="And then?"))
        prompt = model.plan(messages, history).jobs[0].prompt
        plainly = fresh.plan(messages).jobs[0].prompt
        if history == "template":
            assert model.decode(prompt) == fresh.decode(plainly)
            # A reasoning marker that the model spelled in letters is a token where its ids are not kept.
            controls = (
                [one for one in model.control(ids) if "think" not in one] for ids in (prompt, plainly)
            )
            assert next(controls) == next(controls)
        quoted = sum(str(message.content).count("<|im_start|>") for message in messages)
        assert (
            model.decode(prompt).count("<|im_start|>") - model.control(prompt).count("<|im_start|>") <= quoted
        )


def _edited(answer: Message, edit: str) -> Message:
    if edit == "the answer":
        return replace(answer, content=f"{answer.content} more")
    return replace(answer, reasoning=None) if edit == "the reasoning" else answer


# Models that end a turn with what opens the next one.


OPENS = """\
{%- for message in messages -%}
<|{{ "observation" if message.role == "tool" else message.role }}|>
{{ message.content or "" }}
{%- endfor -%}
{%- if add_generation_prompt %}<|assistant|>{% endif -%}"""


@pytest.mark.parametrize("history", ["template", "sampled"])
@pytest.mark.parametrize("end", ["<|user|>", "</s>", "<|observation|>", ""])
def test_what_opens_a_message_stands_once(history: History, end: str) -> None:
    model = Model(OPENS, ends=("<|user|>", "<|observation|>"))
    plan = model.plan([USER])
    numbers = model.answer(plan, f"\n{TEXT.content}{end}")
    prompt = model.plan([USER, TEXT, MORE], history).jobs[0].prompt
    kept = plan.jobs[0].prompt + (
        numbers if not end or history == "sampled" or end == "<|user|>" else numbers[:-1]
    )
    assert prompt[: len(kept)] == kept
    opened = "" if end == "<|user|>" else "<|user|>"
    assert model.decode(prompt[len(kept) :]) == f"{opened}\nAnd then?<|assistant|>"
