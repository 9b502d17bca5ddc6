"""What went wrong with a server, in a sentence that is safe to show."""

import os
from typing import Any

import httpx2
from mcp.shared.exceptions import MCPError
from pydantic import ValidationError

from dragoman.mcp.guard import FAILED
from dragoman.mcp.spec import McpFailure, ServerSpec

# Sentences of the SDK about connections, which come under a code that servers use for anything.
CLOSED = ("Connection closed", "SSE stream")
UNREADABLE = "Failed to parse"
TOO_LARGE = ("the answer is larger than", "byte limit")


def failure_of(error: BaseException, spec: ServerSpec) -> McpFailure:
    """The failure that an exception of the SDK, of HTTP or of the system stands for."""
    if isinstance(error, BaseExceptionGroup):
        return failure_of(error.exceptions[0], spec)
    if isinstance(error, McpFailure):
        return error
    if isinstance(error, MCPError):
        return _of_answer(error, spec)
    if isinstance(error, httpx2.HTTPStatusError):
        return of_status(error.response.status_code, spec)
    if isinstance(error, httpx2.SSEError):
        is_large = any(words in str(error) for words in TOO_LARGE)
        return too_large("an event is too large", spec) if is_large else unreadable(spec)
    if isinstance(error, httpx2.TransportError):
        return of_status(0, spec)
    if isinstance(error, OSError):
        why = os.strerror(error.errno) if error.errno else type(error).__name__
        return McpFailure("unreachable", f"The MCP server {spec.label} could not be started: {why}.")
    if isinstance(error, ValidationError):
        return unreadable(spec)
    return McpFailure("protocol", f"The MCP server {spec.label} broke the protocol ({type(error).__name__}).")


def of_status(status: int, spec: ServerSpec) -> McpFailure:
    """`of_status(401, spec)`; 0 stands for no answer at all."""
    if not status:
        return McpFailure("unreachable", f"The MCP server {spec.label} could not be reached.")
    return McpFailure("http", f"The MCP server {spec.label} answered with HTTP status {status}.", status)


def timed_out(what: str, seconds: float, spec: ServerSpec) -> McpFailure:
    return McpFailure("timeout", f"The MCP server {spec.label} did not {what} within {seconds:g} seconds.")


def closed(spec: ServerSpec) -> McpFailure:
    return McpFailure("unreachable", f"The MCP server {spec.label} closed the connection before it answered.")


def too_large(what: str, spec: ServerSpec) -> McpFailure:
    return McpFailure("protocol", f"The MCP server {spec.label} sent more than is allowed: {what}.")


def unreadable(spec: ServerSpec) -> McpFailure:
    return McpFailure("protocol", f"The MCP server {spec.label} sent an answer that is not of the protocol.")


def _of_answer(error: MCPError, spec: ServerSpec) -> McpFailure:
    data: Any = error.data
    if isinstance(data, dict) and FAILED in data:
        return of_status(data[FAILED], spec)
    if error.message.startswith((UNREADABLE, *CLOSED)):
        if any(word in error.message for word in TOO_LARGE):
            return too_large("an answer is too large", spec)
        return unreadable(spec) if error.message.startswith(UNREADABLE) else closed(spec)
    said = spec.without_secrets(error.message)
    return McpFailure(
        "protocol", f"The MCP server {spec.label} answered with error {error.code}: {said}", error.code
    )
