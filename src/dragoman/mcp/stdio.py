"""Servers that are processes: messages are lines on their standard input and output.

The SDK has this transport, too, but keeps a line without an end in memory and joins it anew with every piece.
Here a line has a bound.
"""

import asyncio
import os
import signal
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import IO, TypeAlias

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client import Transport
from mcp.client.stdio import get_default_environment
from mcp.shared.message import SessionMessage
from mcp_types import jsonrpc_message_adapter
from pydantic import ValidationError

from dragoman.mcp.failures import closed, too_large
from dragoman.mcp.spec import McpFailure, ServerSpec

# What the process gets to leave by itself, then to heed SIGTERM.
LEAVE_S = 2.0
DRAIN_BYTES = 65536
LOOK_S = 0.5

Received: TypeAlias = SessionMessage | Exception
Lost: TypeAlias = Callable[[McpFailure], None]


def stdio(spec: ServerSpec, answer_bytes: int, lost: Lost, errors: IO[str] | None) -> Transport:
    """The process of a server; its standard error goes to `errors`, or nowhere."""
    return _running(spec, answer_bytes, lost, errors)


@asynccontextmanager
async def _running(
    spec: ServerSpec, answer_bytes: int, lost: Lost, errors: IO[str] | None
) -> AsyncIterator[tuple[MemoryObjectReceiveStream[Received], MemoryObjectSendStream[SessionMessage]]]:
    assert spec.command is not None
    process = await asyncio.create_subprocess_exec(
        spec.command,
        *spec.args,
        stdin=PIPE,
        stdout=PIPE,
        stderr=errors or DEVNULL,
        env=get_default_environment() | spec.env,
        cwd=spec.cwd,
        limit=answer_bytes,
        # A group of its own, so that what the server started ends with it.
        start_new_session=True,
    )
    received, read = anyio.create_memory_object_stream[Received](0)
    write, to_send = anyio.create_memory_object_stream[SessionMessage](0)
    try:
        async with anyio.create_task_group() as pipes, received, read, write, to_send:
            pipes.start_soon(_read_lines, process, received, spec, lost)
            pipes.start_soon(_write_lines, process, to_send)
            pipes.start_soon(_watch, process, spec, lost)
            yield read, write
            pipes.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await _end(process)


async def _read_lines(
    process: Process, received: MemoryObjectSendStream[Received], spec: ServerSpec, lost: Lost
) -> None:
    assert process.stdout is not None
    failure = closed(spec)
    async with received:
        try:
            while line := await process.stdout.readline():
                await received.send(_message(line))
        except ValueError:
            failure = too_large("a line has no end", spec)
        except (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass
        lost(failure)


def _message(line: bytes) -> Received:
    try:
        return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValidationError as error:
        # Many servers print other things as well; what is not a message is not answered.
        return error


async def _write_lines(process: Process, to_send: MemoryObjectReceiveStream[SessionMessage]) -> None:
    assert process.stdin is not None
    # A pipe that broke is noticed by the reader, which sees the end of the output.
    with suppress(OSError, anyio.ClosedResourceError):
        async for item in to_send:
            line = item.message.model_dump_json(by_alias=True, exclude_unset=True)
            process.stdin.write(line.encode() + b"\n")
            await process.stdin.drain()


async def _watch(process: Process, spec: ServerSpec, lost: Lost) -> None:
    """A process that ended may have left a child that holds its output open: then reading does not tell."""
    # `wait` would wait for the output as well.
    while process.returncode is None:  # noqa: ASYNC110, nothing else tells either
        await anyio.sleep(LOOK_S)
    # What it said last is read first.
    await anyio.sleep(LOOK_S)
    lost(closed(spec))


async def _end(process: Process) -> None:
    """Close the input, which is how a server is told to leave; then make sure of it and of its children."""
    assert process.stdin is not None
    process.stdin.close()
    await _wait(process)
    if process.returncode is None:
        _signal(process, signal.SIGTERM)
        await _wait(process)
    _signal(process, signal.SIGKILL)
    await _wait(process)


async def _wait(process: Process) -> None:
    assert process.stdout is not None
    with anyio.move_on_after(LEAVE_S), suppress(OSError):
        # A server that waits for somebody to read what it says cannot see that it shall leave.
        while await process.stdout.read(DRAIN_BYTES):
            pass
        await process.wait()


def _signal(process: Process, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
