"""The client and the server of this package, over a socket."""

import asyncio
from collections.abc import Iterator

import pytest

import dragoman
from dragoman.client import AnswerTree, CallPart, OtherEvent, StatusError, StreamError, TextDelta, TextPart
from dragoman.engines.default_weights import default_model
from dragoman.engines.local import LocalEngine, LocalOptions
from dragoman.engines.scripted import END_ID, ScriptedEngine, say
from dragoman.types import ToolCall
from tests.client.support import HELLO
from tests.http.conftest import RunningServer, Serve, parrot, serve
from tests.support.engines import RUNNER
from tests.support.parrot import call

__all__ = ["parrot", "serve"]

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("f", "g")
]
OPTIONS = LocalOptions(runner=RUNNER, context=128, slots=1, threads=1)
SAID = f"<think>\nHm.\n</think>\n\nHä?\n{call('f', a=1)}\n{call('g')}"


@pytest.fixture
def client(parrot: RunningServer) -> Iterator[dragoman.Client]:
    with dragoman.Client(parrot.url) as result:
        yield result


def test_an_answer_of_all_kinds_as_a_tree(client: dragoman.Client) -> None:
    rows = [{"role": "user", "content": SAID}]
    stream = client.chat(rows, tools=TOOLS, return_token_ids=True)
    answer = stream.answer()
    assert answer.reasoning.strip() == "Hm."
    assert answer.text.strip() == "Hä?"
    assert [(one.name, one.arguments) for one in answer.calls] == [("f", '{"a": 1}'), ("g", "{}")]
    assert answer.ids == [*SAID.encode(), END_ID]
    assert answer.finish == "tool_calls"
    assert stream.usage is not None and stream.usage.completion_tokens == len(answer.ids)


def test_tokens_of_the_parts(client: dragoman.Client) -> None:
    answer = client.chat([{"role": "user", "content": SAID}], tools=TOOLS, return_token_ids=True).answer()
    kinds = [part.kind if isinstance(part, TextPart) else part.name for part in answer.parts]
    assert kinds[:3] == ["reasoning", "text", "f"]
    for part in answer.parts:
        if isinstance(part, TextPart):
            assert "".join(token.text for token in part.tokens) == part.text
        assert part.tokens


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_markers_are_on_the_parts_that_they_open_and_close(client: dragoman.Client, api: str) -> None:
    rows = [{"role": "user", "content": SAID}]
    if api == "chat":
        stream = client.chat(rows, tools=TOOLS, return_token_ids=True)
    else:
        tools = [{"type": "function", "name": name} for name in ("f", "g")]
        stream = client.responses(rows, tools=tools, store=False, return_token_ids=True)
    parts = [[token.id for token in part.tokens] for part in stream.answer().parts]
    masks = [bytes(id_ for id_ in ids if id_ is not None and id_ != END_ID) for ids in parts]
    assert [mask.decode() for mask in masks] == [
        "<think>\nHm.\n</think>\n\n",
        "Hä?\n",
        call("f", a=1) + "\n",
        call("g"),
    ]


def test_logprobs_in_the_tree(client: dragoman.Client) -> None:
    answer = client.chat(HELLO, logprobs=True, top_logprobs=2, return_token_ids=True).answer()
    assert [(token.id, token.text, token.logprob, len(token.top)) for token in answer.tokens][:2] == [
        (104, "h", -0.5, 2),
        (105, "i", -0.5, 2),
    ]


def test_several_choices(client: dragoman.Client) -> None:
    stream = client.chat(HELLO, n=2)
    stream.answer()
    assert [(answer.choice, answer.text, answer.finish) for answer in stream.answers] == [
        (0, "hi", "stop"),
        (1, "hi", "stop"),
    ]


def test_completions_of_ids(serve: Serve) -> None:
    engine = ScriptedEngine(say("Grüße"))
    with dragoman.Client(serve(engine)) as client:
        answer = client.completions([1, 2, 3], max_tokens=20, return_token_ids=True).answer()
    assert engine.jobs[0].prompt == (1, 2, 3)
    assert (answer.text, answer.ids, answer.finish) == ("Grüße", [*"Grüße".encode(), END_ID], "stop")


def test_responses(client: dragoman.Client) -> None:
    tools = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in ("f", "g")]
    stream = client.responses(SAID, tools=tools, store=False, return_token_ids=True)
    events = list(stream)
    [answer] = stream.answers
    assert answer.ids == [*SAID.encode(), END_ID]
    assert isinstance(events[0], OtherEvent) and events[0].name == "response.created"
    assert answer.reasoning.strip() == "Hm."
    assert answer.text.strip() == "Hä?"
    assert [(one.name, one.arguments) for one in answer.calls] == [("f", '{"a": 1}'), ("g", "{}")]
    assert answer.finish == "tool_calls"


def test_the_three_apis_tell_the_same_text(client: dragoman.Client) -> None:
    assert [event.text for event in client.chat(HELLO) if isinstance(event, TextDelta)] == [
        event.text for event in client.responses("hi", store=False) if isinstance(event, TextDelta)
    ]


def test_a_refusal_names_the_field(client: dragoman.Client) -> None:
    with pytest.raises(StatusError) as caught:
        client.chat(HELLO, tempreature=1).answer()
    assert (caught.value.param, caught.value.context.status) == ("tempreature", 400)
    assert caught.value.context.request_id


def test_a_failing_engine(client: dragoman.Client) -> None:
    with pytest.raises(StreamError) as caught:
        client.chat([{"role": "user", "content": "abc BREAK"}]).answer()
    assert caught.value.code == "engine_failed"


def test_a_wrong_key_is_refused_and_not_shown(serve: Serve) -> None:
    url = serve(ScriptedEngine(say("x")), api_key=["right"])
    with dragoman.Client(url, "wrong-key") as client, pytest.raises(StatusError) as caught:
        client.models()
    assert caught.value.context.status == 401
    assert "wrong-key" not in str(caught.value)
    with dragoman.Client(url, "right") as client:
        assert client.models()[0]["id"] == "scripted"


def test_any_other_route(client: dragoman.Client) -> None:
    reply = client.request("POST", "/v1/conversations", {"metadata": {"a": "b"}})
    assert reply.body["metadata"] == {"a": "b"}
    assert reply.reply.request_id


def test_an_embedded_model_and_the_ids_it_said() -> None:
    """The tree's ids are what the same prompt gives without the client."""
    engine = LocalEngine.open(default_model(), OPTIONS)
    fields = {"max_tokens": 6, "temperature": 0, "return_token_ids": True, "logprobs": True}

    async def run(url: str) -> AnswerTree:
        async with dragoman.AsyncClient(url) as client:
            return await client.chat(HELLO, **fields).answer()

    with dragoman.background(engine) as url:
        answer = asyncio.run(run(url))
        pieces = engine.tokenizer.pieces
    assert len(answer.ids) == 6 or answer.finish == "stop"
    visible = [id_ for id_ in answer.ids if id_ not in engine.tokenizer.end_ids]
    assert b"".join(pieces[id_] for id_ in visible).decode() == answer.text
    assert all(token.logprob is not None and token.logprob <= 0 for token in answer.tokens)


def test_calls_are_told_by_name_in_parts(client: dragoman.Client) -> None:
    answer = client.chat([{"role": "user", "content": call("f", a=1)}], tools=TOOLS).answer()
    [part] = [part for part in answer.parts if isinstance(part, CallPart)]
    assert ToolCall(id=part.id, name=part.name, arguments=part.arguments) == answer.calls[0]
