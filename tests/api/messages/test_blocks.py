"""Blocks of Messages as the messages that a template knows."""

import re
from typing import Any

import pytest

from dragoman.api.messages.blocks import REFUSED_BLOCKS, REFUSED_SOURCES, sign
from dragoman.errors import BadRequest
from dragoman.types import Message, ToolCall
from tests.api.messages.asking import CALL, RESULT, TOOL, USER, asked, seal, told

SAID = {"role": "assistant", "content": [CALL]}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def test_what_an_assistant_says_in_a_row_is_one_message() -> None:
    thought = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    call = ToolCall(id="t1", name="look", arguments='{"city":"Paris"}')
    assert told(thought, text("I "), text("look."), CALL) == Message(
        role="assistant", content="I look.", reasoning="Hm.", tool_calls=(call,)
    )


def test_each_result_is_a_message_and_comes_before_what_the_user_says() -> None:
    user = {"role": "user", "content": [text("Look again."), RESULT]}
    *_, result, message = asked(USER, SAID, user, tools=[TOOL]).messages
    assert result == Message(role="tool", content="sunny", tool_call_id="t1")
    assert message == Message(role="user", content=[text("Look again.")])


@pytest.mark.parametrize(
    ("content", "read"),
    [
        ("no such city", "Error: no such city"),
        ("Error: gone", "Error: gone"),
        ([text("gone")], [text("Error: "), text("gone")]),
        (None, "Error: "),
    ],
)
def test_an_error_is_told_as_one(content: Any, read: Any) -> None:
    failed = {**RESULT, "content": content, "is_error": True}
    *_, result = asked(USER, SAID, {"role": "user", "content": [failed]}).messages
    assert result.content == read


def test_systems_stand_where_they_were_said() -> None:
    middle = {"role": "system", "content": [text("Be brief.")]}
    messages = asked(USER, middle, system=[text("You are"), text(" kind.")]).messages
    assert [message.role for message in messages] == ["system", "user", "system"]
    assert messages[0].content == [text("You are"), text(" kind.")]


def test_a_system_message_that_is_cleared_is_gone_when_the_user_speaks_again() -> None:
    middle = {"role": "system", "content": "Be brief.", "clear_at": "next_user_message"}
    assert [message.role for message in asked(USER, middle).messages] == ["user", "system"]
    assert [message.role for message in asked(USER, middle, USER).messages] == ["user", "user"]


@pytest.mark.parametrize(
    ("source", "read"),
    [
        ({"type": "text", "media_type": "text/plain", "data": "It rains."}, "Weather\n\nToday.\n\nIt rains."),
        ({"type": "content", "content": [text("It"), text("rains.")]}, "Weather\n\nToday.\n\nIt\nrains."),
    ],
)
def test_a_document_is_its_text(source: dict[str, Any], read: str) -> None:
    document = {"type": "document", "source": source, "title": "Weather", "context": "Today."}
    assert told(document, role="user").content == [text(read)]


def test_a_search_result_is_its_text() -> None:
    fields = {"type": "search_result", "title": "Weather", "source": "a.txt", "content": [text("It rains.")]}
    assert told(fields, role="user").content == [text("Weather\na.txt\n\nIt rains.")]


@pytest.mark.parametrize("kind", REFUSED_BLOCKS)
def test_what_there_is_not_is_refused_by_name(kind: str) -> None:
    with pytest.raises(BadRequest, match=re.escape(f"'messages[0].content[0]' has the type '{kind}'")):
        told({"type": kind}, role="user")


@pytest.mark.parametrize("kind", REFUSED_SOURCES)
def test_a_document_that_is_no_text_is_refused(kind: str) -> None:
    with pytest.raises(BadRequest, match=re.escape("'messages[0].content[0].source'")):
        told({"type": "document", "source": {"type": kind, "data": "x"}}, role="user")


@pytest.mark.parametrize(
    ("block", "place"),
    [
        ({"type": "poem"}, "messages[0].content[0].type"),
        ({"type": 5}, "messages[0].content[0].type"),
        ({"type": "thinking", "thinking": "x"}, "messages[0].content[0].type"),
        ({"type": "text"}, "messages[0].content[0].text"),
        ({"type": "text", "text": 5}, "messages[0].content[0].text"),
        ({"type": "document", "source": {}}, "messages[0].content[0].source.type"),
        (RESULT, "messages[0].content[0].tool_use_id"),
    ],
)
def test_a_wrong_block_is_named(block: dict[str, Any], place: str) -> None:
    with pytest.raises(BadRequest) as wrong:
        told(block, role="user")
    assert wrong.value.param == place


def test_citations_are_refused_where_they_are_asked_for() -> None:
    source = {"type": "text", "data": "x"}
    with pytest.raises(BadRequest, match="citations"):
        told({"type": "document", "source": source, "citations": {"enabled": True}}, role="user")


# Thinking that comes back.


def thinking(said: str, signature: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": said, "signature": signature}


def test_thinking_that_is_as_it_was_is_known() -> None:
    assert told(thinking("Hm.", sign("Hm.", seal, shown=True)), text("Yes.")).reasoning == "Hm."


def test_thinking_that_was_changed_is_refused() -> None:
    for shown in (True, False):
        with pytest.raises(BadRequest) as wrong:
            told(thinking("Ha.", sign("Hm.", seal, shown=shown)))
        assert wrong.value.code == "invalid_signature"


def test_thinking_that_was_never_shown_comes_back() -> None:
    sealed = sign("Hm.", seal, shown=False)
    assert told(thinking("", sealed), text("Yes.")).reasoning == "Hm."
    assert told({"type": "redacted_thinking", "data": sealed}, text("Yes.")).reasoning == "Hm."


def test_of_others_signatures_only_the_text_counts() -> None:
    assert told(thinking("Hm.", "EqQB"), text("Yes.")).reasoning == "Hm."
    assert told({"type": "redacted_thinking", "data": "EqQB"}, text("Yes.")).reasoning is None


# Summaries, and calls that the server made.


def test_a_summary_stands_for_what_was_before_it() -> None:
    summary = {"role": "assistant", "content": [{"type": "compaction", "content": "Tea."}, text("On.")]}
    messages = asked(USER, summary, USER, system="Be kind.").messages
    assert [message.role for message in messages] == ["system", "user", "assistant", "user"]
    assert messages[1].content == "Summary of the conversation so far:\nTea."


def test_calls_of_the_server_are_calls_and_results() -> None:
    call = {"type": "mcp_tool_use", "id": "m1", "name": "look", "server_name": "files", "input": {}}
    result = {"type": "mcp_tool_result", "tool_use_id": "m1", "content": [text("sunny")]}
    fields = {"role": "assistant", "content": [text("Wait."), call, result, text("Sunny.")]}
    messages = asked(USER, fields, USER).messages
    assert [message.role for message in messages] == ["user", "assistant", "tool", "assistant", "user"]
    assert (messages[1].content, messages[3].content) == ("Wait.", "Sunny.")
