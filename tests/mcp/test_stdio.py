"""Servers that are processes, and what goes wrong with them."""

import json
import os
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from dragoman.mcp import McpFailure, McpServerSpec, McpSession
from tests.mcp.support import BOUNDS, failure_of, process, with_session
from tests.support.wait import becomes


def test_a_server_that_dies_is_started_anew() -> None:
    async def use(session: McpSession) -> None:
        await session.list_tools()
        failure = await failure_of(session.call("die", {}))
        assert failure.kind == "unreachable"
        assert failure.message == "The MCP server raw closed the connection before it answered."
        assert (await session.call("say", {})).text.startswith("say")

    with_session(process("raw.py"), use)


def test_a_server_that_died_while_nobody_asked_is_started_anew() -> None:
    async def use(session: McpSession) -> None:
        pid = int((await session.call("say", {})).text.split()[-1])
        os.kill(pid, 9)
        assert [tool.name for tool in await session.list_tools()] == ["say"]
        assert int((await session.call("say", {})).text.split()[-1]) != pid

    with_session(process("raw.py"), use)


def test_a_server_that_hangs() -> None:
    async def use(session: McpSession) -> None:
        assert (await failure_of(session.call("hang", {}))).kind == "timeout"
        assert (await session.call("say", {})).text.startswith("say")

    with_session(process("raw.py"), use, msgspec.structs.replace(BOUNDS, call_s=2))


def test_a_server_that_never_speaks() -> None:
    hasty = msgspec.structs.replace(BOUNDS, connect_s=0.5)
    failure = with_session(
        process("raw.py", "silent"), lambda session: failure_of(session.list_tools()), hasty
    )
    assert failure.kind == "timeout"
    assert failure.message == "The MCP server raw did not connect within 0.5 seconds."


def test_lines_that_are_no_messages_are_passed_over() -> None:
    result = with_session(process("raw.py"), lambda session: session.call("chatter", {}))
    assert result.text == "after the chatter"


def test_an_answer_of_another_shape() -> None:
    failure = with_session(process("raw.py"), lambda session: failure_of(session.call("shapeless", {})))
    assert (failure.kind, failure.code) == ("protocol", None)


def test_a_line_without_an_end() -> None:
    async def use(session: McpSession) -> None:
        failure = await failure_of(session.call("endless", {}))
        assert failure.kind == "protocol"
        assert "a line is too long" in failure.message
        assert (await session.call("say", {})).text.startswith("say")

    with_session(process("raw.py"), use)


def test_a_result_that_is_too_long() -> None:
    bounds = msgspec.structs.replace(BOUNDS, result_chars=100)

    async def use(session: McpSession) -> None:
        assert len((await session.call("long", {"chars": 100})).text) == 100
        assert "101 characters" in (await failure_of(session.call("long", {"chars": 101}))).message

    with_session(process("raw.py"), use, bounds)


def test_an_error_keeps_its_code_and_loses_our_secrets() -> None:
    spec = process("raw.py", env={"SECRET": "swordfish"})
    failure = with_session(spec, lambda session: failure_of(session.call("refuse", {})))
    assert (failure.kind, failure.code) == ("protocol", -32050)
    assert failure.message == "The MCP server raw answered with error -32050: no entry with ***"


def test_a_process_gets_its_own_environment_and_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAGOMAN_API_KEY", "ours")
    spec = process("raw.py", env={"SECRET": "theirs"})
    result = with_session(spec, lambda session: session.call("environment", {}))
    seen = json.loads(result.text)
    assert seen["SECRET"] == "theirs"
    assert "DRAGOMAN_API_KEY" not in seen


def test_children_of_a_server_end_with_it() -> None:
    result = with_session(process("raw.py"), lambda session: session.call("child", {}))
    child = int(result.text)
    assert becomes(lambda: not is_running(child))


def test_a_server_that_does_not_leave_is_ended() -> None:
    result = with_session(process("raw.py", "stays"), lambda session: session.call("say", {}))
    assert not is_running(int(result.text.split()[-1]))


def is_running(pid: int) -> bool:
    """A process that ended may stay in the table until its new parent looks."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_server_that_ends_at_what_it_does_not_know_is_asked_in_the_old_way() -> None:
    result = with_session(process("raw.py", "old"), lambda session: session.call("say", {}))
    assert result.text.startswith("say")


def test_a_server_of_an_unknown_revision() -> None:
    spec = process("raw.py", "unknown revision")
    assert with_session(spec, lambda session: failure_of(session.list_tools())).kind == "protocol"


def test_a_command_that_is_not_there() -> None:
    spec = McpServerSpec(label="none", command="/no/such/command")
    failure = with_session(spec, lambda session: failure_of(session.list_tools()))
    assert failure.kind == "unreachable"
    assert failure.message == "The MCP server none could not be started: No such file or directory."


def test_all_pages_are_listed() -> None:
    tools = with_session(process("raw.py", "pages"), lambda session: session.list_tools())
    assert [tool.name for tool in tools] == ["tool0", "tool1", "tool2"]


@pytest.mark.parametrize("start", ["endless pages", "many"])
def test_more_tools_than_are_allowed(start: str) -> None:
    failure = with_session(process("raw.py", start), lambda session: failure_of(session.list_tools()))
    assert failure.kind == "protocol"


def test_a_long_line_of_many_values_is_not_read() -> None:
    asked = {"values": BOUNDS.answer_bytes}
    failure = with_session(process("raw.py"), lambda session: failure_of(session.call("values", asked)))
    assert failure.kind == "protocol"
    assert "of too many values" in failure.message


def test_bytes_of_tools_are_bounded() -> None:
    bounds = msgspec.structs.replace(BOUNDS, tools_bytes=10)
    failure = with_session(process("raw.py"), lambda session: failure_of(session.list_tools()), bounds)
    assert "10 bytes" in failure.message


def test_a_server_that_died_and_left_a_child_is_started_anew() -> None:
    """The child holds the output open, so that it does not come to an end."""

    async def use(session: McpSession) -> None:
        children.append(int((await session.call("leave", {})).text))
        with suppress(McpFailure):
            # It fails, unless the end of the process was noticed even before.
            await session.call("say", {})
        assert (await session.call("say", {})).text.startswith("say")

    children: list[int] = []
    with_session(process("raw.py"), use)
    assert becomes(lambda: not is_running(children[0]))
