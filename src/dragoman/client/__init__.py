"""A client of any OpenAI-compatible server: typed events, token ids, tool calls as soon as they end."""

from dragoman.client.async_client import AsyncClient, AsyncStream
from dragoman.client.config import Timeouts
from dragoman.client.errors import (
    AddressError,
    BrokenStreamError,
    ClientError,
    ClientTimeout,
    ConnectionFailed,
    FileFormatError,
    Reply,
    StatusError,
    StreamError,
)
from dragoman.client.events import (
    AnswerTree,
    ArgumentsDelta,
    CallEnd,
    CallPart,
    CallStart,
    FinishEvent,
    MarkerTokens,
    OtherEvent,
    ReasoningDelta,
    RefusalDelta,
    StreamEvent,
    TextDelta,
    TextPart,
    Token,
    UsageEvent,
)
from dragoman.client.request import audio, image
from dragoman.client.sync_client import Client, Stream

__all__ = [
    "AddressError",
    "AnswerTree",
    "ArgumentsDelta",
    "AsyncClient",
    "AsyncStream",
    "BrokenStreamError",
    "CallEnd",
    "CallPart",
    "CallStart",
    "Client",
    "ClientError",
    "ClientTimeout",
    "ConnectionFailed",
    "FileFormatError",
    "FinishEvent",
    "MarkerTokens",
    "OtherEvent",
    "ReasoningDelta",
    "RefusalDelta",
    "Reply",
    "StatusError",
    "Stream",
    "StreamError",
    "StreamEvent",
    "TextDelta",
    "TextPart",
    "Timeouts",
    "Token",
    "UsageEvent",
    "audio",
    "image",
]
