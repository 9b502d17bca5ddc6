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
from dragoman.prompt import Prompter
from dragoman.prompt.encode import chain_messages
from dragoman.turns import thoughts
from dragoman.turns.plan import Planner
from dragoman.turns.spec import Reading, TurnSpec
from dragoman.turns.thoughts import OVERHEAD, SaidAloud, Thoughts, _said
from dragoman.types import Conversation, Event, Message, Restoring, Sampling, Saying, ToolCall
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
    prompter = Prompter(card, tokenizer, clock=clock, dialect=dialect)
    return Planner(card, tokenizer, prompter, dialect, limits=limits)


def spec(messages: Sequence[Message], restoring: Restoring = "tools", **more: Any) -> TurnSpec:
    return TurnSpec(
        model=None,
        prompts=(Conversation(messages=tuple(messages), tools=(TOOL,)),),
        sampling=Sampling(max_tokens=8),
        reading=Reading(tools=(TOOL,)),
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


def saying(message: Message) -> Saying:
    """What a model said, that a client has as this message."""
    said = Saying()
    said.add(Event("reasoning", 0, message.reasoning or ""))
    if message.content:
        said.add(Event("text", 0, str(message.content)))
    for number, made in enumerate(message.tool_calls):
        said.add(Event("call_open", 0, made.name, call=number, call_id=made.id or ""))
        said.add(Event("call_arguments", 0, made.arguments, call=number))
    return said


def say(plans: Planner, before: Sequence[Message], message: Message, asked: TurnSpec | None = None) -> None:
    asked = asked or spec(before)
    told = asked.prompts[0]
    assert isinstance(told, Conversation)
    told = replace(told, messages=tuple(before))
    plans.thoughts.add(told, chain_messages(before)[-1], asked, saying(message), 3)


def dropped(message: Message) -> Message:
    return replace(message, reasoning=None)


def several(*places: str) -> list[ToolCall]:
    return [call(place) for place in places]


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


def sent(talk: Sequence[Message], restoring: Restoring) -> list[Message]:
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
    modes: list[Restoring] = ["tools", "all"]
    for number, talk in enumerate(TALKS):
        for restoring in modes:
            got = planned(plans, spec([*map(dropped, talk)], restoring))
            assert got == planned(fresh, spec(sent(talk, restoring), restoring)), (number, restoring)


def prompts_of(model: Model, restoring: Restoring, *, drops: bool) -> list[tuple[int, ...]]:
    """Of two calls and two texts, with ids that no encoder would choose."""
    model = Model.like(model)
    model.planner.thoughts = Thoughts(64, 1 << 20)
    talk, prompts = [USER], []
    for said in answers("sends it back", calls=model.dialect.has_calls):
        shown = sent(talk, restoring)
        asked = spec([*map(dropped, talk)] if drops else shown, restoring if drops else "off")
        plan = model.planner.plan(asked)
        prompts.append(plan.jobs[0].prompt)
        written = model.writes("as the template", shown, said)
        model.answer(plan, written)
        told = model.told(written, model.text(shown), said)
        if drops and told.reasoning:
            ((prompt, chain),) = plan.asked
            assert isinstance(prompt, Conversation)
            model.planner.thoughts.add(prompt, chain(), asked, saying(told), 3)
        talk += [told, following(told)]
    return prompts


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_sampled_ids_are_those_of_a_client_that_sends(path: Path) -> None:
    model, modes = Model(path.read_text()), list[Restoring](["tools", "all"])
    sends = [prompts_of(model, restoring, drops=False) for restoring in modes]
    assert [prompts_of(model, restoring, drops=True) for restoring in modes] == sends


def given_to(
    plans: Planner, *messages: Message, restoring: Restoring = "all", **more: Any
) -> list[str | None]:
    """The reasoning of all answers, as the template is given it."""
    (told,) = plans.thoughts.restore(spec(messages, restoring, **more))[0].prompts
    assert isinstance(told, Conversation)
    return [message.reasoning for message in told.messages if message.role == "assistant"]


def test_what_is_given_back_is_counted() -> None:
    plans, talk = planner(), users_turns()
    remember(plans, talk)
    found = [
        plans.plan(spec([*map(dropped, talk)], mode)).restored_tokens for mode in ("off", "tools", "all")
    ]
    assert found == [0, 2 * 3, 5 * 3]


def test_what_a_template_drops_is_not_counted() -> None:
    drops = TEMPLATE.replace("{% if message.reasoning_content %}", "{% if message.tool_calls %}")
    plans, talk = planner(drops), users_turns()
    remember(plans, talk)
    assert plans.plan(spec([*map(dropped, talk[:6])], "all")).restored_tokens == 0


def test_a_client_that_sends_reasoning_is_believed() -> None:
    plans, (user, said, told) = planner(), one_call()
    remember(plans, [user, said, told])
    assert given_to(plans, user, replace(said, reasoning="Mine."), told) == ["Mine."]
    assert given_to(plans, user, replace(said, reasoning=""), told) == ["Look first."]


def test_an_answer_that_was_changed_is_another() -> None:
    plans, (user, said, told) = planner(), one_call()
    remember(plans, [user, replace(said, content="I look."), told])
    (made,) = said.tool_calls
    changed = [
        replace(said, content="I do not look."),
        replace(said, tool_calls=(replace(made, arguments='{"at": "away"}'),)),
        replace(said, tool_calls=(replace(made, name="hear"),)),
        replace(said, tool_calls=(made, call("there"))),
        replace(said, tool_calls=()),
    ]
    assert [given_to(plans, user, dropped(message), told) for message in changed] == [[None]] * 5


def test_the_same_words_in_another_conversation_are_another_answer() -> None:
    plans = planner()
    other = Message(role="user", content="Is it dry?")
    said = answer("It rains.", "Yes.")
    say(plans, [USER], said)
    assert given_to(plans, USER, dropped(said), USER) == ["It rains."]
    assert given_to(plans, other, dropped(said), USER) == [None]
    assert given_to(plans, other, dropped(said), USER, dropped(said), USER) == [None, None]


def test_calls_are_known_whatever_became_of_the_time_before() -> None:
    plans, talk = planner(), calls_in_a_row()
    remember(plans, talk)
    summary = Message(role="user", content="We looked here and there.")
    assert given_to(plans, summary, *map(dropped, talk[5:]), restoring="tools") == ["Up?"]


@pytest.mark.parametrize("id_", ["functions.look:0", "a1b2c3d4e", "", None])
def test_ids_that_this_server_did_not_make_are_nothing_to_go_by(id_: str | None) -> None:
    plans = planner()
    made = ToolCall(id=id_, name="look", arguments="{}")
    said = answer("Mine.", "", made)
    say(plans, [USER], said)
    other = Message(role="user", content="Is it dry?")
    assert given_to(plans, USER, dropped(said), result(made)) == ["Mine."]
    assert given_to(plans, other, dropped(said), result(made)) == [None]


def test_an_id_that_the_model_has_copied_leads_to_nobody_else() -> None:
    plans, (user, said, told) = planner(), one_call()
    again = replace(said, reasoning="Once more.")
    remember(plans, [user, said, told, again, told])
    bare = [dropped(said), told, dropped(again), told]
    assert given_to(plans, user, *bare) == ["Look first.", "Once more."]
    assert given_to(plans, Message(role="user", content="Something else."), *bare) == [None, None]


def test_of_two_answers_that_call_alike_each_has_its_own() -> None:
    plans = planner()
    one, other = answer("One.", "", call("here")), answer("Other.", "", call("here"))
    say(plans, [USER], one)
    say(plans, [USER], other)
    found = [given_to(plans, USER, dropped(each), result(each.tool_calls[0])) for each in (one, other)]
    assert found == [["One."], ["Other."]]


def test_a_client_may_write_json_and_spaces_in_its_own_way() -> None:
    plans, id_ = planner(), "functions.look:1"
    made = ToolCall(id=id_, name="look", arguments='{"at":"here","n":1.0}')
    said = answer("Mine.", "\n\nI look. ", made)
    say(plans, [USER], said)
    spaced = replace(made, arguments='{ "n": 1, "at": "here" }')
    parts: list[dict[str, Any]] = [{"type": "text", "text": "I look."}]
    assert given_to(plans, USER, Message(role="assistant", content=parts, tool_calls=(spaced,))) == ["Mine."]


def test_a_client_may_send_each_call_by_itself() -> None:
    plans, (user, said, *results) = planner(), parallel_calls()
    say(plans, [user], said)
    one, other = (Message(role="assistant", tool_calls=(each,)) for each in said.tool_calls)
    assert given_to(plans, user, one, results[0], other, results[1]) == ["All at once.", None]


@pytest.mark.parametrize("more", [{"owner": "b"}, {"owner": "a", "cache_salt": "s"}, {}])
def test_nobody_is_given_the_thoughts_of_another(more: dict[str, Any]) -> None:
    plans, (user, said, told) = planner(), one_call()
    say(plans, [user], said, spec([user], owner="a"))
    assert given_to(plans, user, dropped(said), told, owner="a") == ["Look first."]
    assert given_to(plans, user, dropped(said), told, **more) == [None]


def test_nobody_takes_the_id_of_another() -> None:
    plans, (user, said, told) = planner(), one_call()
    say(plans, [user], replace(said, reasoning="A stranger's."), spec([user], owner="b"))
    say(plans, [user], said, spec([user], owner="a"))
    assert given_to(plans, user, dropped(said), told, owner="a") == ["Look first."]


def test_who_remembers_most_forgets_first() -> None:
    plans = planner(limits=Limits(thoughts=8))
    mine, talk = spec([USER], owner="a"), one_call()
    say(plans, [USER], talk[1], mine)
    for number in range(100):
        say(plans, [USER], answer("x", str(number)), spec([USER], owner="b"))
    assert plans.thoughts.count == 8
    assert given_to(plans, USER, dropped(talk[1]), talk[2], owner="a") == ["Look first."]
    found = [given_to(plans, USER, Message(role="assistant", content=str(n)), owner="b") for n in (92, 93)]
    assert found == [[None], ["x"]]


def test_what_was_asked_for_lately_is_kept() -> None:
    plans = planner(limits=Limits(thoughts=2))
    for text in ("one", "two"):
        say(plans, [USER], answer("x", text))
    assert given_to(plans, USER, Message(role="assistant", content="one")) == ["x"]
    say(plans, [USER], answer("x", "three"))
    found = [given_to(plans, USER, Message(role="assistant", content=text)) for text in ("one", "two")]
    assert found == [["x"], [None]]


def test_bytes_are_bounded() -> None:
    plans = planner(limits=Limits(thought_bytes=10 * OVERHEAD))
    for number in range(20):
        say(plans, [USER], answer("x" * 2 * OVERHEAD, str(number)))
    assert plans.thoughts.count == 3
    say(plans, [USER], answer("x" * 20 * OVERHEAD, "long"))
    assert plans.thoughts.count == 3
    assert given_to(plans, USER, Message(role="assistant", content="long")) == [None]


def test_what_is_said_again_is_remembered_once() -> None:
    plans = planner()
    for number in range(5):
        say(plans, [USER], answer(f"{number}", "Yes."))
    assert plans.thoughts.count == 1
    assert given_to(plans, USER, Message(role="assistant", content="Yes.")) == ["4"]


def test_a_deleted_answer_takes_its_thoughts_with_it() -> None:
    plans, (user, said, told) = planner(), one_call()
    asked = spec([user], owner="a")
    (prompt,) = asked.prompts
    assert isinstance(prompt, Conversation)
    plans.thoughts.add(prompt, b"", asked, saying(said), 3, source="chatcmpl-1")
    plans.thoughts.forget("chatcmpl-1", "b")
    assert given_to(plans, user, dropped(said), told, owner="a") == ["Look first."]
    plans.thoughts.forget("chatcmpl-1", "a")
    assert given_to(plans, user, dropped(said), told, owner="a") == [None]


def test_a_prompt_without_room_for_thoughts_goes_without() -> None:
    plans, (user, said, told) = planner(context=600), one_call()
    say(plans, [user], replace(said, reasoning="hm " * 200))
    bare = [user, dropped(said), told]
    plan = plans.plan(spec(bare))
    assert (plan.restored_tokens, plan.jobs[0].prompt) == (0, planned(planner(context=600), spec(bare)))


def test_control_tokens_in_thoughts_are_text() -> None:
    plans, (user, said, told) = planner(), one_call()
    say(plans, [user], replace(said, reasoning="A <|im_start|> and </s>."))
    ids = plans.plan(spec([user, dropped(said), told])).jobs[0].prompt
    special = ByteTokenizer().special
    assert (ids.count(special["<|im_start|>"]), ids.count(special["</s>"])) == (5, 0)


def test_an_answer_that_went_on_from_words_is_known_with_them() -> None:
    plans = planner()
    begun = Message(role="assistant", content="It is", reasoning="Rain.")
    told = Conversation(messages=(USER, begun), continue_final_message=True, add_generation_prompt=False)
    said = Saying()
    said.add(Event("text", 0, " raining."))
    plans.thoughts.add(told, chain_messages([USER])[-1], spec([USER]), said, 1)
    assert given_to(plans, USER, Message(role="assistant", content="It is raining."), USER) == ["Rain."]


def test_thoughts_between_words_come_back_as_the_api_writes_them() -> None:
    plans, said = planner(), Saying()
    for kind, text in (("reasoning", "One."), ("text", "So."), ("reasoning", "T"), ("reasoning", "wo.")):
        said.add(Event(kind, 0, text))  # type: ignore[arg-type]
    told = Conversation(messages=(USER,))
    plans.thoughts.add(told, chain_messages([USER])[-1], spec([USER]), said, 1)
    back = Message(role="assistant", content="So.")
    assert given_to(plans, USER, back) == ["One.Two."]
    assert given_to(plans, USER, back, between_thoughts="\n") == ["One.\nTwo."]


def test_off_is_neither_given_nor_remembered() -> None:
    plans, (user, said, told) = planner(), one_call()
    remember(plans, [user, said, told])
    plan = plans.plan(spec([user, dropped(said), told], "off"))
    assert (plan.restored_tokens, plan.asked) == (0, ())


def long_talk(rounds: int) -> list[Message]:
    calls = several(*map(str, range(rounds)))
    return [USER, *(each for a in calls for each in (answer(f"Thought {a.id}.", "", a), result(a)))]


def test_what_nothing_was_thought_for_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plans, talk, looked = planner(), long_talk(12), list[Message]()

    def look(message: Message) -> SaidAloud:
        looked.append(message)
        return _said(message)

    remember(plans, talk[:3])
    monkeypatch.setattr(thoughts, "_said", look)
    for end in (21, 23, 25):
        looked.clear()
        found = given_to(plans, *map(dropped, talk[:end]))
        assert found == [talk[1].reasoning, *[None] * (end // 2 - 1)]
    assert len(looked) == 1


def test_a_thought_that_comes_late_is_given_all_the_same() -> None:
    plans, talk = planner(), long_talk(12)
    remember(plans, talk[:3])
    given_to(plans, *map(dropped, talk))
    remember(plans, talk[:9])
    found = given_to(plans, *map(dropped, talk))
    assert found == [talk[number].reasoning if number < 9 else None for number in range(1, 24, 2)]


words = st.sampled_from(["Yes.", "No.", "Look.", ""])
turns = st.lists(
    st.tuples(st.sampled_from("ucp"), words, st.sampled_from(["here", "there"]), st.booleans()), max_size=6
)


def talk_of(drawn: list[tuple[str, str, str, bool]]) -> list[Message]:
    """A conversation of few words, so that much of it is said twice, with ids of both kinds."""
    talk, numbers = [USER], count()
    for kind, text, place, ours in drawn:
        made = [
            call(place, None if ours else f"functions.look:{number}") for number in range("ucp".index(kind))
        ]
        talk += [answer(f"Thought {next(numbers)}.", text, *made), *map(result, made)]
        talk += [] if made else [USER]
    return talk


@given(drawn=turns, others=st.lists(turns, max_size=3), restoring=st.sampled_from(["tools", "all"]))
def test_among_conversations_alike_each_is_given_its_own(
    drawn: Any, others: list[Any], restoring: Restoring
) -> None:
    plans, talk = SHARED_PLANNER, talk_of(drawn)
    plans.thoughts = Thoughts(1000, 1 << 20)
    for other in others:
        remember(plans, talk_of(other))
    remember(plans, talk)
    found = given_to(plans, *map(dropped, talk), restoring=restoring)
    assert found == [message.reasoning for message in sent(talk, restoring) if message.role == "assistant"]


SHARED_PLANNER = planner()
