"""A client of any OpenAI-compatible server: typed events, token ids, tool calls as soon as they end."""

from dragoman.client.async_client import AsyncClient, AsyncStream
from dragoman.client.events import (
    AnswerTree,
    CallArguments,
    CallBegan,
    CallDone,
    Called,
    Finished,
    Other,
    Reasoning,
    Refusal,
    Spoken,
    StreamEvent,
    Text,
    Token,
    Unseen,
    Used,
)
from dragoman.client.problems import (
    BadAddress,
    BadFile,
    BrokenStream,
    CannotConnect,
    ClientError,
    Refused,
    Reply,
    StreamFailed,
    TimedOut,
)
from dragoman.client.request import audio, image
from dragoman.client.setup import Timeouts
from dragoman.client.sync_client import Client, Stream

__all__ = [
    "AnswerTree",
    "AsyncClient",
    "AsyncStream",
    "BadAddress",
    "BadFile",
    "BrokenStream",
    "CallArguments",
    "CallBegan",
    "CallDone",
    "Called",
    "CannotConnect",
    "Client",
    "ClientError",
    "Finished",
    "Other",
    "Reasoning",
    "Refusal",
    "Refused",
    "Reply",
    "Spoken",
    "Stream",
    "StreamEvent",
    "StreamFailed",
    "Text",
    "TimedOut",
    "Timeouts",
    "Token",
    "Unseen",
    "Used",
    "audio",
    "image",
]
