"""Raw completions, read in the dialect of their model."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

import dragoman
from dragoman.client import AnswerTree, CallEnd, CallPart, StreamEvent, TextPart
from dragoman.client.raw import RawParseOptions, RawReader
from dragoman.engines.scripted import END_ID, ScriptedEngine, say
from dragoman.errors import SettingsError
from tests.client.recorded import chat, sse
from tests.client.support import read, reading_of
from tests.http.conftest import Serve, serve
from tests.support.parrot import call

__all__ = ["serve"]

SAID = f"<think>\nHm.\n</think>\n\nHä?\n{call('f', a=1)}\n{call('g')}"
MASKS = ["<think>\nHm.\n</think>\n\n", "Hä?\n", call("f", a=1) + "\n", call("g")]


def masks(answer: AnswerTree) -> list[str]:
    ids = [[token.id for token in part.tokens] for part in answer.parts]
    return [bytes(id_ for id_ in some if id_ is not None and id_ != END_ID).decode() for some in ids]


def kinds(answer: AnswerTree) -> list[str]:
    return [part.kind if isinstance(part, TextPart) else part.name for part in answer.parts]


@pytest.mark.parametrize("prompt", [[1, 2, 3], "Go on."])
def test_reasoning_and_calls_are_found(serve: Serve, prompt: str | list[int]) -> None:
    with dragoman.Client(serve(ScriptedEngine(say(SAID)))) as client:
        answer = client.completions(prompt, dialect="hermes", max_tokens=200).answer()
    assert kinds(answer) == ["reasoning", "text", "f", "g"]
    assert (answer.reasoning, answer.text, answer.finish) == ("Hm.", "Hä?", "tool_calls")
    assert [(one.name, one.arguments) for one in answer.calls] == [("f", '{"a": 1}'), ("g", "{}")]
    assert answer.ids == [*SAID.encode(), END_ID]
    assert masks(answer) == MASKS
    for part in answer.parts:
        if isinstance(part, TextPart):
            assert "".join(token.text for token in part.tokens) == part.text


def test_the_dialect_is_found_and_whether_the_prompt_has_opened_reasoning(serve: Serve) -> None:
    url = serve(ScriptedEngine(say("Hm.</think>Yes.")), dialect="hermes")

    async def ask(prompt: str | Sequence[int], **fields: Any) -> AnswerTree:
        async with dragoman.AsyncClient(url) as client:
            return await client.completions(prompt, dialect="auto", max_tokens=99, **fields).answer()

    for prompt in ("Well?<think>\n", list(b"Well?<think>\n")):
        answer = asyncio.run(ask(prompt))
        assert (answer.reasoning, answer.text) == ("Hm.", "Yes."), prompt
    assert asyncio.run(ask("Well?")).text == "Hm.Yes."
    assert asyncio.run(ask("Well?", starts_in_reasoning=True)).reasoning == "Hm."


def test_a_call_is_told_before_the_answer_ends(serve: Serve) -> None:
    with dragoman.Client(serve(ScriptedEngine(say(SAID)))) as client:
        events = list(client.completions([1], dialect="hermes", max_tokens=200))
    done = [number for number, event in enumerate(events) if isinstance(event, CallEnd)]
    begun = [number for number, event in enumerate(events) if getattr(event, "name", "") == "g"]
    assert done[0] < begun[0]


def test_without_a_dialect_all_is_text(serve: Serve) -> None:
    with dragoman.Client(serve(ScriptedEngine(say(SAID)))) as client:
        assert client.completions([1], max_tokens=200).answer().text == SAID


def test_a_call_that_is_cut_short_is_not_done(serve: Serve) -> None:
    with dragoman.Client(serve(ScriptedEngine(say(SAID)))) as client:
        answer = client.completions([1], dialect="hermes", max_tokens=SAID.index('": 1')).answer()
    (last,) = [part for part in answer.parts if isinstance(part, CallPart)]
    assert (last.complete, answer.finish) == (False, "length")


def test_a_server_that_tells_no_ids() -> None:
    """As OpenAI's: the model's name says which dialect it speaks."""
    raw = RawParseOptions(dialect="auto")
    reader = RawReader(raw, {"prompt": "<think>\n", "model": "Qwen3-8B"})
    assert list(reader.questions()) == [("GET", "/v1/models", None)]
    reading = reading_of("/v1/completions")
    reading._reader = reader
    chunks = ({"text": text} for text in ("Hm", ".</thi", "nk>Yes", "."))
    events: list[StreamEvent] = read(reading, [sse(*chat(*chunks, {"text": "", "finish_reason": "stop"}))])
    (answer,) = reading.fold.answers
    assert (answer.reasoning, answer.text, len(events)) == ("Hm.", "Yes.", 5)


def test_a_dialect_that_is_none(serve: Serve) -> None:
    with dragoman.Client("http://127.0.0.1:1") as client, pytest.raises(SettingsError, match="hermes"):
        client.completions([1], dialect="hermess")
