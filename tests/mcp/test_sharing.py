"""Connections: shared where they are configured, a request's own where it brought them."""

import asyncio

import msgspec

from dragoman.mcp import McpServers, McpServerSpec, McpSession
from tests.mcp.support import BOUNDS, RawServer, failure_of, process, with_session
from tests.support.wait import becomes


def connections(raw: RawServer) -> int:
    return raw.asked.count("initialize")


def use_twice(servers: McpServers, spec: McpServerSpec) -> None:
    async def once() -> None:
        async with servers.session(spec) as session:
            await asyncio.gather(session.call("say", {}), session.list_tools())

    async def run() -> None:
        await asyncio.gather(once(), once())
        await once()
        await servers.close()

    asyncio.run(run())


def test_a_configured_server_has_one_connection(raw: RawServer, raw_spec: McpServerSpec) -> None:
    use_twice(McpServers({"raw": raw_spec}), raw_spec)
    assert connections(raw) == 1


def test_a_named_server_has_one_for_each_request_and_is_left_after_it(
    raw: RawServer, raw_spec: McpServerSpec
) -> None:
    use_twice(McpServers(allow=["*"]), raw_spec)
    assert connections(raw) == 3
    assert raw.asked.count("DELETE") == 3


def test_a_named_server_does_not_get_at_the_connection_of_a_configured_one(
    raw: RawServer, raw_spec: McpServerSpec
) -> None:
    servers = McpServers(
        {"raw": msgspec.structs.replace(raw_spec, authorization="ours")}, allow=["127.0.0.1:*"]
    )
    named = servers.resolve("raw", raw.url)
    use_twice(servers, named)
    assert not any("authorization" in seen for seen in raw.headers)


def test_a_cancelled_call_harms_no_other(raw: RawServer, raw_spec: McpServerSpec) -> None:
    raw.on_call["hang"] = lambda handler, number: (raw.released.wait(), handler.text(number, "late"))[1]

    async def use(session: McpSession) -> None:
        await session.list_tools()
        cancelled, kept = (asyncio.create_task(session.call("hang", {})) for _ in range(2))
        while raw.asked.count("tools/call") < 2:
            await asyncio.sleep(0.01)
        cancelled.cancel()
        await asyncio.wait({cancelled})
        raw.released.set()
        assert (await kept).text == "late"
        assert (await session.call("say", {})).text == "say was called"
        assert connections(raw) == 1

    with_session(raw_spec, use)


def test_who_stops_waiting_for_a_connection_does_not_end_it_for_others() -> None:
    async def use(session: McpSession) -> None:
        first, second = (asyncio.create_task(session.list_tools()) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        assert [tool.name for tool in await second] == ["say"]
        assert first.cancelled()

    with_session(process("raw.py"), use)


def test_to_leave_while_it_connects_is_no_trouble() -> None:
    async def use(session: McpSession) -> None:
        waiting = asyncio.create_task(session.list_tools())
        await asyncio.sleep(0.1)
        session.end()
        assert (await failure_of(waiting)).kind == "unreachable"

    with_session(process("raw.py", "silent"), use)


def test_a_request_that_is_cancelled_ends_its_connection(raw: RawServer, raw_spec: McpServerSpec) -> None:
    raw.on_call["hang"] = lambda handler, number: (raw.released.wait(), None)[1]

    async def run() -> None:
        servers = McpServers(allow=["*"])

        async def request() -> None:
            async with servers.session(raw_spec) as session:
                await session.call("hang", {})

        running = asyncio.create_task(request())
        while "tools/call" not in raw.asked:
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.wait({running})
        await servers.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())
    assert becomes(lambda: "DELETE" in raw.asked)


def test_the_list_of_tools_is_kept(raw: RawServer, raw_spec: McpServerSpec) -> None:
    async def use(session: McpSession) -> None:
        assert await session.list_tools() == await session.list_tools()
        assert raw.asked.count("tools/list") == 1

    with_session(raw_spec, use)


def test_the_list_is_asked_for_again_when_it_is_old(raw: RawServer, raw_spec: McpServerSpec) -> None:
    async def use(session: McpSession) -> None:
        await session.list_tools()
        await session.list_tools()
        assert raw.asked.count("tools/list") == 2

    with_session(raw_spec, use, msgspec.structs.replace(BOUNDS, tools_age_s=0))


def test_the_list_is_asked_for_again_when_the_server_tells_of_a_change() -> None:
    async def use(session: McpSession) -> None:
        assert [tool.name for tool in await session.list_tools()] == ["say"]
        await session.call("grow", {})
        assert [tool.name for tool in await session.list_tools()] == ["say", "new"]

    with_session(process("raw.py"), use)


def test_nothing_is_connected_before_it_is_needed(raw: RawServer, raw_spec: McpServerSpec) -> None:
    async def use(session: McpSession) -> None:
        pass

    with_session(raw_spec, use)
    assert raw.asked == []
