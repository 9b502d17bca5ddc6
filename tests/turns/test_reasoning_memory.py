"""A client that drops the reasoning of answers gets the prompts of one that sends it."""

import json
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from dragoman.dialects.registry import get_dialect
from dragoman.engines.protocol import ModelCard
from dragoman.errors import DragomanError
from dragoman.limits import Limits
from dragoman.prompt import PromptBuilder
from dragoman.prompt.encode import chain_messages
from dragoman.turns import reasoning_memory
from dragoman.turns.plan import Planner
from dragoman.turns.reasoning_memory import OVERHEAD, ComparableAnswer, ReasoningMemory, _said
from dragoman.turns.spec import ParseOptions, TurnSpec
from dragoman.types import (
    AnswerTranscript,
    Conversation,
    Event,
    Message,
    ReasoningRestore,
    Sampling,
    ToolCall,
)
from tests.prompt.support import SHARED, TEMPLATES, ByteTokenizer, clock
from tests.support.parrot import TEMPLATE
from tests.support.seams import Model, answers, following

PATHS = [*sorted(TEMPLATES.rglob("*.jinja")), *sorted((SHARED / "templates").glob("*.jinja"))]
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        # As much as the most demanding template asks for.
        "parameters": {
            "type": "object",
            "properties": {"at": {"type": "string", "description": "Where."}},
            "required": ["at"],
        },
    },
}
USER = Message(role="user", content="Is it raining?")
_numbers = count()


def planner(template: str = TEMPLATE, limits: Limits | None = None, context: int = 1 << 16) -> Planner:
    tokenizer = ByteTokenizer()
    card = ModelCard(name="m", max_model_len=context, templates={"default": template})
    dialect = get_dialect("hermes")
    prompter = PromptBuilder(card, tokenizer, clock=clock, dialect=dialect)
    return Planner(card, tokenizer, prompter, dialect, limits=limits)


def spec(messages: Sequence[Message], restoring: ReasoningRestore = "tools", **more: Any) -> TurnSpec:
    return TurnSpec(
        model=None,
        prompts=(Conversation(messages=tuple(messages), tools=(TOOL,)),),
        sampling=Sampling(max_tokens=8),
        parsing=ParseOptions(tools=(TOOL,)),
        restore_reasoning=restoring,
        **more,
    )


def call(at: str, id_: str | None = None) -> ToolCall:
    """With an id as this server makes them."""
    return ToolCall(id=id_ or f"call_{next(_numbers):024x}", name="look", arguments=json.dumps({"at": at}))


def answer(thought: str, text: str = "", *calls: ToolCall) -> Message:
    return Message(role="assistant", content=text or None, reasoning=thought, tool_calls=calls)


def result(of: ToolCall, text: str = "wet") -> Message:
    return Message(role="tool", content=text, tool_call_id=of.id)


def saying(message: Message) -> AnswerTranscript:
    """What a model said, that a client has as this message."""
    transcript = AnswerTranscript()
    transcript.add(Event("reasoning", 0, message.reasoning or ""))
    if message.content:
        transcript.add(Event("text", 0, str(message.content)))
    for number, tool_call in enumerate(message.tool_calls):
        transcript.add(Event("call_open", 0, tool_call.name, call=number, call_id=tool_call.id or ""))
        transcript.add(Event("call_arguments", 0, tool_call.arguments, call=number))
    return transcript


def say(plans: Planner, before: Sequence[Message], message: Message, asked: TurnSpec | None = None) -> None:
    asked = asked or spec(before)
    item = asked.prompts[0]
    assert isinstance(item, Conversation)
    item = replace(item, messages=tuple(before))
    plans.reasoning_memory.add(item, chain_messages(before)[-1], asked, saying(message), 3)


def dropped(message: Message) -> Message:
    return replace(message, reasoning=None)


def several(*places: str) -> list[ToolCall]:
    return [call(param) for param in places]


def one_call() -> list[Message]:
    (a,) = several("here")
    return [USER, answer("Look first.", "", a), result(a)]


def calls_in_a_row() -> list[Message]:
    a, b, c = several("here", "there", "up")
    first = [USER, answer("Look first.", "I look.", a), result(a)]
    return [*first, answer("And there?", "", b), result(b), answer("Up?", "One more.", c), result(c)]


def parallel_calls() -> list[Message]:
    a, b = several("here", "there")
    return [USER, answer("All at once.", "", a, b), result(a), result(b, "dry")]


def users_turns() -> list[Message]:
    a, b, c, d = several("here", "there", "up", "down")
    first = [USER, answer("Look first.", "", a), result(a), answer("So it is.", "Yes.")]
    again = [USER, answer("Nobody asks why.", "Still yes."), USER, answer("Again.", "", b), result(b)]
    return [*first, *again, answer("Hm.", "", c, d), result(c), result(d)]


def after_the_answer() -> list[Message]:
    (a,) = several("here")
    return [USER, answer("Look.", "", a), result(a), answer("So it is.", "Yes."), USER]


TALKS = [one_call(), calls_in_a_row(), parallel_calls(), users_turns(), after_the_answer()]


def planned(plans: Planner, asked: TurnSpec) -> tuple[int, ...] | str:
    """The prompt, or how it is refused."""
    try:
        return plans.plan(asked).jobs[0].prompt
    except DragomanError as error:
        return error.message


def remember(plans: Planner, talk: Sequence[Message]) -> None:
    for number, message in enumerate(talk):
        if message.role == "assistant":
            say(plans, [*map(dropped, talk[:number])], message)


def sent(talk: Sequence[Message], restoring: ReasoningRestore) -> list[Message]:
    """What a client sends that gives back what it should."""
    last = max(number for number, message in enumerate(talk) if message.role == "user")
    return [
        message if restoring == "all" or (number > last and message.tool_calls) else dropped(message)
        for number, message in enumerate(talk)
    ]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_dropped_reasoning_is_as_if_it_had_been_sent(path: Path) -> None:
    plans, fresh = planner(path.read_text()), planner(path.read_text())
    for talk in TALKS:
        remember(plans, talk)
    modes: list[ReasoningRestore] = ["tools", "all"]
    for number, talk in enumerate(TALKS):
        for restoring in modes:
            got = planned(plans, spec([*map(dropped, talk)], restoring))
            assert got == planned(fresh, spec(sent(talk, restoring), restoring)), (number, restoring)


def prompts_of(model: Model, restoring: ReasoningRestore, *, drops: bool) -> list[tuple[int, ...]]:
    """Of two calls and two texts, with ids that no encoder would choose."""
    model = Model.like(model)
    model.planner.reasoning_memory = ReasoningMemory(64, 1 << 20)
    talk, prompts = [USER], []
    for message in answers("sends it back", calls=model.dialect.has_calls):
        shown = sent(talk, restoring)
        asked = spec([*map(dropped, talk)] if drops else shown, restoring if drops else "off")
        plan = model.planner.plan(asked)
        prompts.append(plan.jobs[0].prompt)
        written = model.writes("as the template", shown, message)
        model.answer(plan, written)
        outcome = model.told(written, model.text(shown), message)
        if drops and outcome.reasoning:
            ((prompt, chain),) = plan.answered_prompts
            assert isinstance(prompt, Conversation)
            model.planner.reasoning_memory.add(prompt, chain(), asked, saying(outcome), 3)
        talk += [outcome, following(outcome)]
    return prompts


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_sampled_ids_are_those_of_a_client_that_sends(path: Path) -> None:
    model, modes = Model(path.read_text()), list[ReasoningRestore](["tools", "all"])
    sends = [prompts_of(model, restoring, drops=False) for restoring in modes]
    assert [prompts_of(model, restoring, drops=True) for restoring in modes] == sends


def given_to(
    plans: Planner, *messages: Message, restoring: ReasoningRestore = "all", **more: Any
) -> list[str | None]:
    """The reasoning of all answers, as the template is given it."""
    (item,) = plans.reasoning_memory.restore(spec(messages, restoring, **more))[0].prompts
    assert isinstance(item, Conversation)
    return [message.reasoning for message in item.messages if message.role == "assistant"]


def test_what_is_given_back_is_counted() -> None:
    plans, talk = planner(), users_turns()
    remember(plans, talk)
    numbers = [
        plans.plan(spec([*map(dropped, talk)], mode)).restored_tokens for mode in ("off", "tools", "all")
    ]
    assert numbers == [0, 2 * 3, 5 * 3]


def test_what_a_template_drops_is_not_counted() -> None:
    drops = TEMPLATE.replace("{% if message.reasoning_content %}", "{% if message.tool_calls %}")
    plans, talk = planner(drops), users_turns()
    remember(plans, talk)
    assert plans.plan(spec([*map(dropped, talk[:6])], "all")).restored_tokens == 0


def test_a_client_that_sends_reasoning_is_believed() -> None:
    plans, (user, message, outcome) = planner(), one_call()
    remember(plans, [user, message, outcome])
    assert given_to(plans, user, replace(message, reasoning="Mine."), outcome) == ["Mine."]
    assert given_to(plans, user, replace(message, reasoning=""), outcome) == ["Look first."]


def test_an_answer_that_was_changed_is_another() -> None:
    plans, (user, outcome, output) = planner(), one_call()
    remember(plans, [user, replace(outcome, content="I look."), output])
    (tool_call,) = outcome.tool_calls
    changed = [
        replace(outcome, content="I do not look."),
        replace(outcome, tool_calls=(replace(tool_call, arguments='{"at": "away"}'),)),
        replace(outcome, tool_calls=(replace(tool_call, name="hear"),)),
        replace(outcome, tool_calls=(tool_call, call("there"))),
        replace(outcome, tool_calls=()),
    ]
    assert [given_to(plans, user, dropped(message), output) for message in changed] == [[None]] * 5


def test_the_same_words_in_another_conversation_are_another_answer() -> None:
    plans = planner()
    other = Message(role="user", content="Is it dry?")
    message = answer("It rains.", "Yes.")
    say(plans, [USER], message)
    assert given_to(plans, USER, dropped(message), USER) == ["It rains."]
    assert given_to(plans, other, dropped(message), USER) == [None]
    assert given_to(plans, other, dropped(message), USER, dropped(message), USER) == [None, None]


def test_calls_are_known_whatever_became_of_the_time_before() -> None:
    plans, talk = planner(), calls_in_a_row()
    remember(plans, talk)
    summary = Message(role="user", content="We looked here and there.")
    assert given_to(plans, summary, *map(dropped, talk[5:]), restoring="tools") == ["Up?"]


@pytest.mark.parametrize("id_", ["functions.look:0", "a1b2c3d4e", "", None])
def test_ids_that_this_server_did_not_make_are_nothing_to_go_by(id_: str | None) -> None:
    plans = planner()
    tool_call = ToolCall(id=id_, name="look", arguments="{}")
    message = answer("Mine.", "", tool_call)
    say(plans, [USER], message)
    other = Message(role="user", content="Is it dry?")
    assert given_to(plans, USER, dropped(message), result(tool_call)) == ["Mine."]
    assert given_to(plans, other, dropped(message), result(tool_call)) == [None]


def test_an_id_that_the_model_has_copied_leads_to_nobody_else() -> None:
    plans, (user, message, outcome) = planner(), one_call()
    again = replace(message, reasoning="Once more.")
    remember(plans, [user, message, outcome, again, outcome])
    bare = [dropped(message), outcome, dropped(again), outcome]
    assert given_to(plans, user, *bare) == ["Look first.", "Once more."]
    assert given_to(plans, Message(role="user", content="Something else."), *bare) == [None, None]


def test_of_two_answers_that_call_alike_each_has_its_own() -> None:
    plans = planner()
    one, other = answer("One.", "", call("here")), answer("Other.", "", call("here"))
    say(plans, [USER], one)
    say(plans, [USER], other)
    items = [given_to(plans, USER, dropped(each), result(each.tool_calls[0])) for each in (one, other)]
    assert items == [["One."], ["Other."]]


def test_a_client_may_write_json_and_spaces_in_its_own_way() -> None:
    plans, id_ = planner(), "functions.look:1"
    tool_call = ToolCall(id=id_, name="look", arguments='{"at":"here","n":1.0}')
    message = answer("Mine.", "\n\nI look. ", tool_call)
    say(plans, [USER], message)
    spaced = replace(tool_call, arguments='{ "n": 1, "at": "here" }')
    parts: list[dict[str, Any]] = [{"type": "text", "text": "I look."}]
    assert given_to(plans, USER, Message(role="assistant", content=parts, tool_calls=(spaced,))) == ["Mine."]


def test_a_client_may_send_each_call_by_itself() -> None:
    plans, (user, message, *results) = planner(), parallel_calls()
    say(plans, [user], message)
    one, other = (Message(role="assistant", tool_calls=(each,)) for each in message.tool_calls)
    assert given_to(plans, user, one, results[0], other, results[1]) == ["All at once.", None]


@pytest.mark.parametrize("more", [{"owner": "b"}, {"owner": "a", "cache_salt": "s"}, {}])
def test_nobody_is_given_the_thoughts_of_another(more: dict[str, Any]) -> None:
    plans, (user, message, outcome) = planner(), one_call()
    say(plans, [user], message, spec([user], owner="a"))
    assert given_to(plans, user, dropped(message), outcome, owner="a") == ["Look first."]
    assert given_to(plans, user, dropped(message), outcome, **more) == [None]


def test_nobody_takes_the_id_of_another() -> None:
    plans, (user, message, outcome) = planner(), one_call()
    say(plans, [user], replace(message, reasoning="A stranger's."), spec([user], owner="b"))
    say(plans, [user], message, spec([user], owner="a"))
    assert given_to(plans, user, dropped(message), outcome, owner="a") == ["Look first."]


def test_who_remembers_most_forgets_first() -> None:
    plans = planner(limits=Limits(thoughts=8))
    mine, talk = spec([USER], owner="a"), one_call()
    say(plans, [USER], talk[1], mine)
    for number in range(100):
        say(plans, [USER], answer("x", str(number)), spec([USER], owner="b"))
    assert plans.reasoning_memory.count == 8
    assert given_to(plans, USER, dropped(talk[1]), talk[2], owner="a") == ["Look first."]
    items = [given_to(plans, USER, Message(role="assistant", content=str(n)), owner="b") for n in (92, 93)]
    assert items == [[None], ["x"]]


def test_what_was_asked_for_lately_is_kept() -> None:
    plans = planner(limits=Limits(thoughts=2))
    for text in ("one", "two"):
        say(plans, [USER], answer("x", text))
    assert given_to(plans, USER, Message(role="assistant", content="one")) == ["x"]
    say(plans, [USER], answer("x", "three"))
    items = [given_to(plans, USER, Message(role="assistant", content=text)) for text in ("one", "two")]
    assert items == [["x"], [None]]


def test_bytes_are_bounded() -> None:
    plans = planner(limits=Limits(thought_bytes=10 * OVERHEAD))
    for number in range(20):
        say(plans, [USER], answer("x" * 2 * OVERHEAD, str(number)))
    assert plans.reasoning_memory.count == 3
    say(plans, [USER], answer("x" * 20 * OVERHEAD, "long"))
    assert plans.reasoning_memory.count == 3
    assert given_to(plans, USER, Message(role="assistant", content="long")) == [None]


def test_what_is_said_again_is_remembered_once() -> None:
    plans = planner()
    for number in range(5):
        say(plans, [USER], answer(f"{number}", "Yes."))
    assert plans.reasoning_memory.count == 1
    assert given_to(plans, USER, Message(role="assistant", content="Yes.")) == ["4"]


def test_a_deleted_answer_takes_its_thoughts_with_it() -> None:
    plans, (user, message, outcome) = planner(), one_call()
    asked = spec([user], owner="a")
    (prompt,) = asked.prompts
    assert isinstance(prompt, Conversation)
    plans.reasoning_memory.add(prompt, b"", asked, saying(message), 3, source="chatcmpl-1")
    plans.reasoning_memory.forget("chatcmpl-1", "b")
    assert given_to(plans, user, dropped(message), outcome, owner="a") == ["Look first."]
    plans.reasoning_memory.forget("chatcmpl-1", "a")
    assert given_to(plans, user, dropped(message), outcome, owner="a") == [None]


def test_a_prompt_without_room_for_thoughts_goes_without() -> None:
    plans, (user, message, outcome) = planner(context=600), one_call()
    say(plans, [user], replace(message, reasoning="hm " * 200))
    bare = [user, dropped(message), outcome]
    plan = plans.plan(spec(bare))
    assert (plan.restored_tokens, plan.jobs[0].prompt) == (0, planned(planner(context=600), spec(bare)))


def test_control_tokens_in_thoughts_are_text() -> None:
    plans, (user, message, outcome) = planner(), one_call()
    say(plans, [user], replace(message, reasoning="A <|im_start|> and </s>."))
    ids = plans.plan(spec([user, dropped(message), outcome])).jobs[0].prompt
    special = ByteTokenizer().special_ids
    assert (ids.count(special["<|im_start|>"]), ids.count(special["</s>"])) == (5, 0)


def test_an_answer_that_went_on_from_words_is_known_with_them() -> None:
    plans = planner()
    begun = Message(role="assistant", content="It is", reasoning="Rain.")
    conversation = Conversation(
        messages=(USER, begun), continue_final_message=True, add_generation_prompt=False
    )
    transcript = AnswerTranscript()
    transcript.add(Event("text", 0, " raining."))
    plans.reasoning_memory.add(conversation, chain_messages([USER])[-1], spec([USER]), transcript, 1)
    assert given_to(plans, USER, Message(role="assistant", content="It is raining."), USER) == ["Rain."]


def test_thoughts_between_words_come_back_as_the_api_writes_them() -> None:
    plans, transcript = planner(), AnswerTranscript()
    for kind, text in (("reasoning", "One."), ("text", "So."), ("reasoning", "T"), ("reasoning", "wo.")):
        transcript.add(Event(kind, 0, text))  # type: ignore[arg-type]
    conversation = Conversation(messages=(USER,))
    plans.reasoning_memory.add(conversation, chain_messages([USER])[-1], spec([USER]), transcript, 1)
    back = Message(role="assistant", content="So.")
    assert given_to(plans, USER, back) == ["One.Two."]
    assert given_to(plans, USER, back, between_thoughts="\n") == ["One.\nTwo."]


def test_off_is_neither_given_nor_remembered() -> None:
    plans, (user, message, outcome) = planner(), one_call()
    remember(plans, [user, message, outcome])
    plan = plans.plan(spec([user, dropped(message), outcome], "off"))
    assert (plan.restored_tokens, plan.answered_prompts) == (0, ())


def long_talk(rounds: int) -> list[Message]:
    calls = several(*map(str, range(rounds)))
    return [USER, *(each for a in calls for each in (answer(f"Thought {a.id}.", "", a), result(a)))]


def test_what_nothing_was_thought_for_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plans, talk, looked = planner(), long_talk(12), list[Message]()

    def look(message: Message) -> ComparableAnswer:
        looked.append(message)
        return _said(message)

    remember(plans, talk[:3])
    monkeypatch.setattr(reasoning_memory, "_said", look)
    for end in (21, 23, 25):
        looked.clear()
        texts = given_to(plans, *map(dropped, talk[:end]))
        assert texts == [talk[1].reasoning, *[None] * (end // 2 - 1)]
    assert len(looked) == 1


def test_a_thought_that_comes_late_is_given_all_the_same() -> None:
    plans, talk = planner(), long_talk(12)
    remember(plans, talk[:3])
    given_to(plans, *map(dropped, talk))
    remember(plans, talk[:9])
    texts = given_to(plans, *map(dropped, talk))
    assert texts == [talk[number].reasoning if number < 9 else None for number in range(1, 24, 2)]


words = st.sampled_from(["Yes.", "No.", "Look.", ""])
turns = st.lists(
    st.tuples(st.sampled_from("ucp"), words, st.sampled_from(["here", "there"]), st.booleans()), max_size=6
)


def talk_of(drawn: list[tuple[str, str, str, bool]]) -> list[Message]:
    """A conversation of few words, so that much of it is said twice, with ids of both kinds."""
    talk, numbers = [USER], count()
    for kind, text, param, ours in drawn:
        calls = [
            call(param, None if ours else f"functions.look:{number}") for number in range("ucp".index(kind))
        ]
        talk += [answer(f"Thought {next(numbers)}.", text, *calls), *map(result, calls)]
        talk += [] if calls else [USER]
    return talk


@given(drawn=turns, others=st.lists(turns, max_size=3), restoring=st.sampled_from(["tools", "all"]))
def test_among_conversations_alike_each_is_given_its_own(
    drawn: Any, others: list[Any], restoring: ReasoningRestore
) -> None:
    plans, talk = SHARED_PLANNER, talk_of(drawn)
    plans.reasoning_memory = ReasoningMemory(1000, 1 << 20)
    for other in others:
        remember(plans, talk_of(other))
    remember(plans, talk)
    texts = given_to(plans, *map(dropped, talk), restoring=restoring)
    assert texts == [message.reasoning for message in sent(talk, restoring) if message.role == "assistant"]


SHARED_PLANNER = planner()
